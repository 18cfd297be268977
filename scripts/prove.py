"""Proves exactness on this machine: rollouts of a model, scored again by the trainer, bit for bit.

    python -m scripts.prove smollm2                          # SmolLM2-135M-Instruct
    python -m scripts.prove families --tokens 1000000        # random weights of every family
    python -m scripts.prove qwen3                            # of one of them
    python -m scripts.prove path/to/hf/folder --threads 1,2,4 --actors 1,2
    python -m scripts.prove embedded --json                  # one JSON line per model, too

What is drawn at random, and what counts: `trainer_bridge/proof.py`; from Python: `prove(model)`.
The control is the same comparison with the mechanism off. Exit code 0: not one bit differed in any
model, and the control showed that it would have been seen; else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from recipes.errors import RunError
from recipes.models import model_location
from recipes.tasks.embedded import character_tokenizer
from rollout import Decoder, DecoderConfig, save_pretrained
from rollout.model.config import FAMILIES
from trainer_bridge import prove
from trainer_bridge.proof import CONTROL_TOKENS

LIVELY = 5
"""Random weights are scaled by it, so that log-probs depend on every part of the model."""


def family_config(family: str) -> DecoderConfig:
    """A small model of one family, no size of which divides into the kernels' tiles.

    Mistral's layers are Llama's; it has more query heads to a key/value head here.
    """
    return DecoderConfig.from_dict({
        "model_type": family,
        "vocab_size": 1_031,
        "hidden_size": 144,
        "intermediate_size": 328,
        "num_hidden_layers": 4,
        "num_attention_heads": 10 if family == "mistral" else 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": family in ("qwen2", "qwen3"),
        "hidden_act": "silu",
        "eos_token_id": 1,
    })  # fmt: skip


def write_family(family: str, folder: Path) -> Path:
    """Random weights of `family` as a Hugging Face folder; biases and norms are random too."""
    model = Decoder(family_config(family))
    seed = sorted(FAMILIES).index(family)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(LIVELY)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_pretrained(model, folder, character_tokenizer())
    return folder


@contextmanager
def models(name: str) -> Iterator[list[tuple[str, str]]]:
    """(name, location) of the models that the command line's MODEL stands for."""
    with tempfile.TemporaryDirectory(prefix="lockstep-prove-") as scratch:
        if name == "families" or name in FAMILIES:
            chosen = sorted(FAMILIES) if name == "families" else [name]
            yield [(f, str(write_family(f, Path(scratch) / f))) for f in chosen]
        else:
            yield [(name, model_location(name, Path(scratch), seed=0))]


def counts(value: str) -> tuple[int, ...]:
    """Comma-separated whole numbers of at least 1."""
    numbers = tuple(int(part) for part in value.split(",") if part.strip().isdecimal())
    if len(numbers) != len(value.split(",")) or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no list of whole numbers such as 1,2")
    return numbers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a folder, Hub id, smollm2, embedded, a family, or families")
    parser.add_argument("--tokens", type=int, default=20_000, help="at least, for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=counts, default=(1, 2), help="such as 1,2")
    parser.add_argument("--actors", type=counts, default=(1, 2), help="1 = in this process")
    parser.add_argument("--json", action="store_true", help="a JSON line for each model, too")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    proved = True
    try:
        with models(args.model) as chosen:
            for name, location in chosen:
                proof = prove(
                    location,
                    tokens=args.tokens,
                    seed=args.seed,
                    threads=args.threads,
                    actors=args.actors,
                    control_tokens=min(CONTROL_TOKENS, args.tokens),
                    progress=_show if sys.stderr.isatty() else None,
                )
                print(f"{name}\n{proof}\n", flush=True)
                if args.json:
                    summary = {"held": proof.held, "conclusive": proof.conclusive}
                    print(json.dumps({"model": name, **summary, **asdict(proof)}), flush=True)
                proved = proved and proof.held and proof.conclusive
    except (RunError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if proved else 1


def _show(tokens: int) -> None:
    print(f"\r{tokens:,} tokens", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
