"""How much of the prompts a group workload computes.

    python -m scripts.bench.group_prefill                     # 64 prompts, 8 samples of each
    python -m scripts.bench.group_prefill --prompt 64 --batch 16 64

Prompt tokens computed / prompt tokens submitted, counted by the engine; 1 / samples is the least.
The model is tiny and random: only the scheduler and the cache decide. Outputs end at random, so
that samples are admitted one by one as others leave. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random

from rollout import Decoder, DecoderConfig, RolloutEngine

VOCABULARY = 64


def tiny_model() -> Decoder:
    """Two small layers; every eighth token or so ends a sample."""
    fields = {
        "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32, "head_dim": 16,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
        "eos_token_id": list(range(8)),
    }
    model = Decoder(DecoderConfig.from_dict(fields))
    model.init_weights(0)
    return model


def measure(model: Decoder, prompts: list[list[int]], samples: int, batch: int) -> dict[str, float]:
    """Counters of one run of all prompts through a fresh engine."""
    engine = RolloutEngine(model, max_batch_size=batch)
    engine.run_batch(prompts, n=samples, max_tokens=64, seed=0)
    stats = engine.get_stats()
    # the last token a sample draws is never computed, every one before it is
    of_outputs = stats["generated_tokens"] - sum(stats["requests_finished"].values())
    computed = stats["computed_tokens"] - of_outputs
    return {
        "batch": batch,
        "submitted": stats["prompt_tokens"],
        "computed": computed,
        "ratio": round(computed / stats["prompt_tokens"], 4),
        "preemptions": stats["preemptions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, nargs="+", default=[16, 64, 250, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64, 512])
    args = parser.parse_args()
    model, rows = tiny_model(), []
    print("prompt  batch  submitted   computed    ratio   (1 / samples: %.4f)" % (1 / args.samples))
    for length in args.prompt:
        rng = random.Random(length)
        prompts = [
            [rng.randrange(8, VOCABULARY) for _ in range(length)] for _ in range(args.prompts)
        ]
        for batch in args.batch:
            row = {"prompt": length, **measure(model, prompts, args.samples, batch)}
            rows.append(row)
            counts = f"{row['submitted']:10d} {row['computed']:10d}"
            print(f"{length:6d} {batch:6d} {counts}   {row['ratio']:.4f}")
    print(json.dumps({"bench": "group_prefill", "samples": args.samples, "rows": rows}))


if __name__ == "__main__":
    main()
