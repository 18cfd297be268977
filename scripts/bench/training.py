"""Forward and backward of the trainer's log-probs against stock torch on the same rows.

    python -m scripts.bench.training [--models mid,smollm2] [--repeats 5] [--rows 16] [--threads 2]

Rows are rollouts of workload w1: 64 prompt ids, 64 new tokens, 8 samples to a prompt. Three ways to
the same log-probs, in turn, medians of `--repeats`:

    stock     transformers with SDPA, logits of the response alone, `log_softmax` and gather
    lockstep  `trainer_bridge.score`, every row with a prompt of its own
    shared    the same, each group's prompt computed once

One JSON line per model: seconds of forward and of forward + backward, ratios to stock, and the
largest difference between the log-probs of both. Needs the dev extra (transformers).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams, load_pretrained
from scripts.bench.peers.model_files import DEFAULT_CACHE, MODELS, model_files
from scripts.bench.workloads import WORKLOADS
from trainer_bridge import score


def stock_logprobs(model: torch.nn.Module, rollouts: list[Rollout]) -> torch.Tensor:
    """All response tokens' log-probs `[rows * new tokens]`; rows are equally long."""
    rows = torch.tensor([r.prompt_token_ids + r.token_ids for r in rollouts])
    new = len(rollouts[0].token_ids)
    logits = model(rows, logits_to_keep=new + 1, use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, rows[:, -new:].unsqueeze(-1)).flatten()


def seconds(logprobs: Callable[[], torch.Tensor], backward: bool) -> float:
    started = time.perf_counter()
    values = logprobs()
    if backward:
        values.sum().backward()
    return time.perf_counter() - started


def measure(name: str, repeats: int, rows: int, cache: Path) -> dict[str, object]:
    folder = model_files(name, cache).folder
    model, _ = load_pretrained(str(folder))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stock.train()  # no dropout in these models; train() is how a trainer would hold it
    groups = WORKLOADS["w1"].draw(0, model.config.vocab_size)[: max(1, rows // 8)]
    engine = RolloutEngine(model, max_batch_size=64, max_seq_len=256)
    shared: list[Rollout] = engine.run_batch(
        [group.prompt for group in groups],
        SamplingParams(n=min(rows, 8), max_tokens=64, ignore_eos=True, seed=0),
        return_details=True,
    )
    alone = [dataclasses.replace(r, prompt_index=i) for i, r in enumerate(shared)]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "stock": lambda: stock_logprobs(stock, shared),
        "lockstep": lambda: torch.cat(score(model, alone)),
        "shared": lambda: torch.cat(score(model, shared)),
    }
    times: dict[tuple[str, bool], list[float]] = {}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for way, logprobs in ways.items():
            for backward in (False, True):
                taken = seconds(logprobs, backward)
                if repeat:
                    times.setdefault((way, backward), []).append(taken)
        model.zero_grad()
        stock.zero_grad()
    with torch.no_grad():
        difference = float((ways["stock"]() - ways["lockstep"]()).abs().max())
    line: dict[str, object] = {"benchmark": "training", "model": name, "rows": len(shared)}
    for (way, backward), taken in times.items():
        part = "forward_backward" if backward else "forward"
        median = statistics.median(taken)
        line[f"{way}_{part}_s"] = round(median, 4)
        line[f"{way}_{part}_ratio"] = round(median / statistics.median(times["stock", backward]), 3)
    return {**line, "max_logprob_difference": difference, "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mid,smollm2", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models.split(","):
        line = measure(name, options.repeats, options.rows, options.cache.expanduser())
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
