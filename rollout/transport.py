"""Prompts and rollouts on the wire: a handful of arrays per message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.request import PromptTask, Rollout
from rollout.rollout_batch import RolloutBatch
from rollout.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """`PromptTask`s as columns. token_ids int32 flat, offsets int64 `[P + 1]`, the rest `[P]`."""

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prompt_index: NDArray[np.int64]
    seeds: NDArray[np.int64]
    first_sample_index: NDArray[np.int64]
    params: tuple[SamplingParams, ...]  # the distinct ones
    params_index: NDArray[np.int32]

    @staticmethod
    def pack(tasks: Sequence[PromptTask]) -> PackedPrompts:
        """Token ids that int32 cannot hold become -1: they are outside any vocabulary anyway."""
        distinct: dict[SamplingParams, int] = {}
        index = [distinct.setdefault(t.params, len(distinct)) for t in tasks]
        flat = np.array([x for t in tasks for x in t.token_ids], dtype=np.int64)
        flat = np.where((flat >= 0) & (flat < 2**31), flat, -1)
        return PackedPrompts(
            flat.astype(np.int32),
            np.concatenate(([0], np.cumsum([len(t.token_ids) for t in tasks], dtype=np.int64))),
            np.array([t.prompt_index for t in tasks], dtype=np.int64),
            np.array([t.seed for t in tasks], dtype=np.int64),
            np.array([t.first_sample_index for t in tasks], dtype=np.int64),
            tuple(distinct),
            np.array(index, dtype=np.int32),
        )

    def unpack(self) -> list[PromptTask]:
        """The tasks as they were packed."""
        ids = self.token_ids.tolist()
        return [
            PromptTask(
                int(self.prompt_index[i]),
                ids[self.offsets[i] : self.offsets[i + 1]],
                self.params[self.params_index[i]],
                int(self.seeds[i]),
                int(self.first_sample_index[i]),
            )
            for i in range(len(self.seeds))
        ]


@dataclass(frozen=True, slots=True)
class FinishedPrompts:
    """All samples of some prompts. prompt_index int64 `[N]`: per rollout, the `PromptTask`'s."""

    prompt_index: NDArray[np.int64]
    batch: RolloutBatch

    @staticmethod
    def pack(rollouts: Sequence[Rollout]) -> FinishedPrompts:
        return FinishedPrompts(
            np.array([r.prompt_index for r in rollouts], dtype=np.int64),
            RolloutBatch.from_rollouts(rollouts),
        )

    def unpack(self) -> dict[int, list[Rollout]]:
        """The samples of each prompt, by the prompt's index."""
        found: dict[int, list[Rollout]] = {}
        for index, rollout in zip(self.prompt_index.tolist(), self.batch, strict=True):
            found.setdefault(index, []).append(replace(rollout, prompt_index=index))
        return found
