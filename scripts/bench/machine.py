"""What this machine could do at most: measured rates, and a written model of a rollout.

    python -m scripts.bench.machine            # prints the rates as JSON

The model has no waste in it: every matrix product runs at the best rate that was measured, memory
is read at the best bandwidth, nothing else costs time. No engine reaches it; the fraction reached
can be compared between models and machines.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from rollout.model import DecoderConfig
from scripts.bench.workloads import Group

GEMM_SHAPES = ((512, 512, 512), (512, 2048, 512), (1024, 1024, 1024), (2048, 2048, 2048))
"""rows × columns × inner"""
READ_BYTES = 1 << 30
"""More than any cache holds."""
MEASURE_SECONDS = 0.7
BYTES = 4
"""fp32"""


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured on `threads` threads. 1 GFLOP = 10⁹ multiplications or additions."""

    threads: int
    gflop_per_s: float
    gb_per_s: float


def measure(threads: int) -> Rates:
    """The best of some matrix products, and the best of some reads of memory; a few seconds.

    Leaves this process with `threads` torch threads.
    """
    torch.set_num_threads(threads)
    best = 0.0
    for rows, columns, inner in GEMM_SHAPES:
        a, b = torch.rand(rows, inner), torch.rand(inner, columns)
        out = torch.empty(rows, columns)
        seconds = _best(partial(torch.matmul, a, b, out=out))
        best = max(best, 2e-9 * rows * columns * inner / seconds)
    memory = torch.ones(READ_BYTES // BYTES)
    return Rates(threads, best, 1e-9 * READ_BYTES / _best(partial(memory.dot, memory)))


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest call within `MEASURE_SECONDS`, after one that does not count."""
    call()
    fastest, end = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while True:
        started = time.perf_counter()
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - started)
        if now > end:
            return fastest


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and memory traffic of one phase."""

    flops: float
    read_bytes: float

    def seconds(self, rates: Rates) -> float:
        """The slower of the two decides; both overlap."""
        return max(self.flops / (rates.gflop_per_s * 1e9), self.read_bytes / (rates.gb_per_s * 1e9))


def layer_parameters(config: DecoderConfig) -> int:
    """Weights that every token is multiplied with, the projection onto the vocabulary left out."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = (2 * heads + 2 * kv_heads) * config.head_dim * config.hidden_size
    return config.num_hidden_layers * (
        attention + 3 * config.hidden_size * config.intermediate_size
    )


def prefill_work(config: DecoderConfig, groups: Sequence[Group]) -> Work:
    """Prompts, each computed once for its group, and their common beginning once for all.

        tokens     T = common + Σ_groups (prompt - common)
        flops      T · 2 · layer parameters  +  Σ_tokens 4 · layers · heads · head_dim · position
                   + groups · 2 · vocab · hidden
        bytes      4 · all parameters, once
    """
    common = common_beginning([group.prompt for group in groups])
    ends = [len(group.prompt) for group in groups]
    tokens = common + sum(end - common for end in ends)
    positions = _sum_to(common) + sum(_sum_to(end) - _sum_to(common) for end in ends)
    projection = config.vocab_size * config.hidden_size
    flops = 2 * tokens * layer_parameters(config) + 2 * len(groups) * projection
    flops += _attention_flops(config) * positions
    return Work(flops, BYTES * (layer_parameters(config) + projection))


def decode_work(config: DecoderConfig, groups: Sequence[Group], batch: int) -> Work:
    """All tokens but each sample's first, which the prefill gives; `batch` at a time.

        tokens     D = Σ_samples (new - 1)
        steps      S = max(⌈D / batch⌉, longest sample - 1)
        flops      D · 2 · parameters  +  Σ_tokens 4 · layers · heads · head_dim · context
        bytes      S · 4 · parameters  +  Σ_tokens 8 · layers · kv_heads · head_dim · context

    At a full batch of 64 a step is thus 2 · parameters · 64 and its attention, against
    4 · parameters and its keys and values.
    """
    tokens = contexts = 0
    for group in groups:
        prompt = len(group.prompt)
        for new in group.max_tokens:
            tokens += new - 1
            contexts += _sum_to(prompt + new - 1) - _sum_to(prompt)
    longest = max(new for group in groups for new in group.max_tokens)
    steps = max(-(-tokens // batch), longest - 1)
    parameters = layer_parameters(config) + config.vocab_size * config.hidden_size
    kv_bytes = 2 * BYTES * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return Work(
        2 * tokens * parameters + _attention_flops(config) * contexts,
        steps * BYTES * parameters + kv_bytes * contexts,
    )


def limit_tokens_per_s(
    config: DecoderConfig, groups: Sequence[Group], batch: int, rates: Rates
) -> float:
    """Generated tokens per second of a perfect engine: tokens / (prefill + decode seconds).

    Each phase takes max(flops / rate, bytes / bandwidth); see `prefill_work` and `decode_work`.
    Norms, softmax, sampling and the host are free. Weights that fit a cache are read from it, so a
    small model's decode may in truth be faster than its bytes say; arithmetic bounds it then.
    """
    works = (prefill_work(config, groups), decode_work(config, groups, batch))
    tokens = sum(sum(group.max_tokens) for group in groups)
    return tokens / sum(work.seconds(rates) for work in works)


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """Number of ids that all prompts begin with."""
    first, last = min(prompts), max(prompts)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return length


def _attention_flops(config: DecoderConfig) -> int:
    """Per token and token of its context: scores and weighted values, in all layers."""
    return 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def _sum_to(n: int) -> int:
    """1 + 2 + … + n: the contexts of the first n tokens."""
    return n * (n + 1) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(json.dumps({"bench": "machine", **asdict(measure(args.threads))}))


if __name__ == "__main__":
    main()
