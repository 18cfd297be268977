"""A scheduler with real block bookkeeping whose "model" invents the tokens it is told to."""

from __future__ import annotations

import numpy as np

from kvcache import BlockPool, KVCacheManager
from rollout.request import PromptTask, Request
from rollout.running import RunningBatch
from rollout.sampling import SamplingParams
from rollout.sampling_rows import SampledRows
from rollout.scheduler import Scheduler
from rollout.step_plan import Committed, StepPlan

EOS = frozenset({1})
BLOCK = 4
CONTEXT = 60


def sampled(tokens: list[int], logprob: float = -1.0) -> SampledRows:
    """Results of a step, one row for each token."""
    column = np.full(len(tokens), logprob, np.float32)
    return SampledRows(np.array(tokens, np.int64), column, column - 1, None, None)


class Rig:
    """Drives a scheduler over `blocks` usable blocks; integrity is checked after every call."""

    def __init__(
        self, blocks: int = 100, batch: int = 8, budget: int = 1024, chunk: int = 0
    ) -> None:
        self.kv: KVCacheManager[int] = KVCacheManager(BlockPool(blocks + 1), BLOCK)
        self.batch = RunningBatch(batch, CONTEXT, BLOCK, EOS)
        self.scheduler = Scheduler(self.kv, self.batch, budget, EOS, chunk)
        self.version = 0
        self.ids = 0

    def add(self, prompt: list[int] | int, **fields: object) -> Request:
        return self.group(prompt, 1, **fields)[0]

    def group(self, prompt: list[int] | int, n: int, **fields: object) -> list[Request]:
        """n samples of one prompt."""
        tokens = [50 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **fields, "n": n})
        task = PromptTask(self.ids, tokens, params, 0, 0)
        requests = [Request(self.ids + sample, task, sample) for sample in range(n)]
        for request in requests:
            request.admit(np.array(tokens, np.int32), CONTEXT)
            self.scheduler.add(request)
        self.ids += n
        return requests

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.version)
        self.kv.check_integrity()
        return plan

    def commit(self, plan: StepPlan, token: int = 7) -> Committed:
        rows = sampled([token] * len(plan.sampled_rows))
        done = self.scheduler.commit(plan, rows, self.version)
        self.kv.check_integrity()
        return done

    def step(self, token: int = 7) -> Committed:
        return self.commit(self.plan(), token)

    def finish(self) -> int:
        """Step to the end; how many steps that took."""
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < 5000, "livelock"
        return steps

    def shape(self, plan: StepPlan) -> dict[int, int]:
        """{request id: new tokens}"""
        return {
            self.batch.request(row).request_id: new
            for row, new in zip(plan.rows.tolist(), plan.num_new.tolist(), strict=True)
        }

    def output(self, request: Request) -> list[int]:
        return self.batch.output(request)[0].tolist()
