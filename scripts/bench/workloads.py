"""The rollouts that every engine is asked for: prompts of random ids, output lengths fixed.

A workload is drawn from a seed: other seeds give other prompts of the same kind, so that nothing of
one repeat can be found in another one's prefix cache. No EOS ends a sample. Only NumPy is needed:
the engines' own processes import this too.

    w1      8 prompts × 8 samples, 64 prompt ids, 64 new tokens
    w2      as w1, but every prompt is 448 ids that all share, then 64 of its own
    ragged  64 prompts × 8 samples, 16–512 prompt ids, 16–256 new tokens

The lengths of `ragged` stand for samples that stop at random. They are drawn per sample and handed
to every engine as `max_tokens`, so that all generate the same number of tokens. Where the samples
of one request must share `max_tokens`, each sample is then a request of its own (`requests`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

TRIAL_SEED, WARM_UP_SEED = 1_000_000, 2_000_000
"""Seeds beyond those of repeats: prompts of trials and warm-ups occur in no repeat."""


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and how many tokens each of its samples gets."""

    prompt: list[int]
    max_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """`n` samples of one prompt with the same `max_tokens`: what engines take."""

    prompt: list[int]
    n: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as an engine returned it; `logprobs[i]` is that of `token_ids[i]`."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Workload:
    """Ranges include both ends. `prefix` ids are common to all prompts and come before the rest."""

    name: str
    prompts: int
    samples: int
    prefix: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.samples < 1 or self.prefix < 0:
            raise ValueError(
                f"Workload needs prompts and samples of at least 1 and a prefix of at least 0, got "
                f"{self.prompts}, {self.samples} and {self.prefix}"
            )
        for name in ("prompt_tokens", "new_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"Workload.{name} must be 1 ≤ low ≤ high, got {(low, high)}")

    @property
    def max_seq_len(self) -> int:
        """Room that the longest sample can need, in tokens."""
        return self.prefix + self.prompt_tokens[1] + self.new_tokens[1]

    def draw(self, seed: int, vocab_size: int) -> list[Group]:
        """The groups of one repeat; a pure function of name, seed and sizes."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        prefix = rng.integers(0, vocab_size, self.prefix).tolist()
        groups = []
        for _ in range(self.prompts):
            length = rng.integers(self.prompt_tokens[0], self.prompt_tokens[1] + 1)
            own = rng.integers(0, vocab_size, length).tolist()
            low, high = self.new_tokens
            groups.append(Group(prefix + own, rng.integers(low, high + 1, self.samples).tolist()))
        return groups

    def trial(self) -> Workload:
        """A shorter one of the same kind, for choosing settings."""
        low, high = self.new_tokens
        return replace(
            self,
            prompts=min(self.prompts, 16),
            new_tokens=(max(1, low // 4), max(1, high // 4)),
        )

    def warm_up(self) -> Workload:
        """What is run once before anything is timed: two groups, a few tokens each."""
        low, high = self.new_tokens
        return replace(self, prompts=min(self.prompts, 2), new_tokens=(min(low, 4), min(high, 4)))

    def smoke(self) -> Workload:
        """A tiny one that shows whether everything runs; its figures mean nothing."""
        low, high = self.new_tokens
        return replace(
            self, prompts=2, samples=2, new_tokens=(max(1, low // 8), max(1, high // 8))
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", 8, 8, 0, (64, 64), (64, 64)),
        Workload("w2", 8, 8, 448, (64, 64), (64, 64)),
        Workload("ragged", 64, 8, 0, (16, 512), (16, 256)),
    )
}


def requests(groups: Sequence[Group]) -> list[Request]:
    """The groups as requests; results in their order are samples in the order of the groups.

    One request for each group if the samples of every group get equally many tokens, else one
    for each sample.
    """
    if all(len(set(group.max_tokens)) == 1 for group in groups):
        return [Request(g.prompt, len(g.max_tokens), g.max_tokens[0]) for g in groups]
    return [Request(g.prompt, 1, length) for g in groups for length in g.max_tokens]


def check_samples(groups: Sequence[Group], samples: Sequence[Sample]) -> int:
    """Tokens generated, after holding the samples against what was asked for.

    ValueError if a sample is missing, too short or too long, or lacks a finite log-prob.
    """
    wanted = [length for group in groups for length in group.max_tokens]
    if len(samples) != len(wanted):
        raise ValueError(f"asked for {len(wanted)} samples, the engine returned {len(samples)}")
    for index, (sample, length) in enumerate(zip(samples, wanted, strict=True)):
        if len(sample.token_ids) != length or len(sample.logprobs) != length:
            raise ValueError(
                f"sample {index} should have {length} tokens and log-probs, the engine returned "
                f"{len(sample.token_ids)} and {len(sample.logprobs)}"
            )
        values = np.asarray(sample.logprobs)
        if not np.isfinite(values).all() or (values > 1e-3).any():
            raise ValueError(f"sample {index} has a log-prob that is not finite or above 0")
    return sum(wanted)


def groups_from_json(values: Sequence[dict[str, Any]]) -> list[Group]:
    """The inverse of `dataclasses.asdict` for groups."""
    return [Group(value["prompt"], value["max_tokens"]) for value in values]
