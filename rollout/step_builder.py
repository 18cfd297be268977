"""A step's plan while it is being made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcache import BlockCopy
from rollout.request import Request
from rollout.running import RunningBatch
from rollout.step_plan import IntColumn, StepPlan


class PromptSource(NamedTuple):
    """A running request whose prompt has KV that samples of the same prompt can share."""

    request: Request
    in_step: bool  # computed by this very step, which samples its first token too


class StepBuilder:
    """Starts with the running requests' part of the plan and takes in those admitted.

    budget: tokens that the step can still compute.
    """

    def __init__(self, rows: IntColumn, num_new: IntColumn, max_num_batched_tokens: int) -> None:
        self._rows = rows
        self._num_new = num_new
        self.budget = max_num_batched_tokens - int(num_new.sum())
        self._admitted: list[tuple[int, int]] = []
        self._forked: list[tuple[int, int]] = []
        self._before: list[BlockCopy] = []
        self._after: list[BlockCopy] = []

    def add(self, row: int, num_new: int, copy: BlockCopy | None = None) -> None:
        """`row` computes `num_new` tokens, after `copy`."""
        self._admitted.append((row, num_new))
        self.budget -= num_new
        if copy is not None and copy.num_tokens:
            self._before.append(copy)

    def fork(self, row: int, leader_row: int, copy: BlockCopy) -> None:
        """`row` samples from the logits of `leader_row`, and gets its KV after the forward."""
        self._forked.append((row, leader_row))
        if copy.num_tokens:
            self._after.append(copy)

    def prompt_sources(self, batch: RunningBatch) -> dict[int, PromptSource]:
        """By `id(task)`, among the running requests of the plan, the oldest of each."""
        sources: dict[int, PromptSource] = {}
        computed, prompt = batch.num_computed[self._rows], batch.num_prompt_tokens[self._rows]
        done = computed >= prompt
        in_step = computed + self._num_new == batch.num_tokens[self._rows]
        in_step &= batch.num_tokens[self._rows] == prompt
        for index in np.flatnonzero(done | in_step).tolist():
            request = batch.request(int(self._rows[index]))
            if request.params.n > 1 and not request.sealed:
                source = PromptSource(request, not done[index])
                sources.setdefault(id(request.task), source)
        return sources

    def build(self, batch: RunningBatch) -> StepPlan:
        """The plan; the builder is used up."""
        rows, num_new = self._rows, self._num_new
        if self._admitted:
            columns = np.array(self._admitted, np.int64)
            rows = np.concatenate((rows, columns[:, 0]))
            num_new = np.concatenate((num_new, columns[:, 1]))
        samples = batch.num_computed[rows] + num_new == batch.num_tokens[rows]
        forked = np.array(self._forked, np.int64).reshape(-1, 2)
        entry = np.zeros(batch.max_batch_size, np.int64)
        entry[rows] = np.arange(len(rows))
        return StepPlan(
            rows, num_new, samples, forked[:, 0], entry[forked[:, 1]], self._before, self._after
        )
