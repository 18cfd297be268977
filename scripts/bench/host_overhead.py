"""What a step costs on the host, with a model that does nothing.

    python -m scripts.bench.host_overhead                 # 1, 16, 64 and 256 running requests
    python -m scripts.bench.host_overhead --running 256 --context 2048

Per step, medians in microseconds: planning (scheduler, block table, keys), inputs (the flat
arrays of the step) and results (tokens and log-probs taken in, ends found). The real scheduler and
block bookkeeping run; only forward and sampling are left out. Beside them the plan that the default
attention backend makes of the step, which belongs to the backend and grows with the context. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from attention import select_backend
from kvcache import BlockPool, KVCacheManager
from rollout.batch import StepInputs
from rollout.request import PromptTask, Request
from rollout.running import RunningBatch
from rollout.sampling import SamplingParams
from rollout.sampling_rows import SampledRows
from rollout.scheduler import Scheduler

T = TypeVar("T")
BLOCK_SIZE = 16
VOCABULARY = 32_000
EOS = frozenset({2})


class Rig:
    """`running` requests in the middle of their output, each with `context` tokens."""

    def __init__(self, running: int, context: int, steps: int) -> None:
        length = context + steps + 64
        blocks = running * (length // BLOCK_SIZE + 2)
        self.kv: KVCacheManager[int] = KVCacheManager(BlockPool(blocks), BLOCK_SIZE)
        self.batch = RunningBatch(running, length, BLOCK_SIZE, EOS)
        self.scheduler = Scheduler(self.kv, self.batch, running * context, EOS)
        self.rng = np.random.default_rng(0)
        params = SamplingParams(seed=0, stop_token_ids=(3, 4))
        for index in range(running):
            # lengths differ by up to a block, as in any real batch: block borders are spread
            tokens = self.rng.integers(5, VOCABULARY, context - index % BLOCK_SIZE)
            request = Request(index, PromptTask(index, tokens.tolist(), params, index, 0), 0)
            request.admit(tokens.astype(np.int32), length)
            self.scheduler.add(request)
        self.seconds: dict[str, list[float]] = {}

    def timed(self, part: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self.seconds.setdefault(part, []).append(time.perf_counter() - start)
        return result

    def results(self, rows: int) -> SampledRows:
        """What a device would have handed over."""
        tokens = self.rng.integers(5, VOCABULARY, rows)
        logprobs = -self.rng.random(rows, np.float32)
        return SampledRows(tokens, logprobs, logprobs.copy(), None, None)

    def step(self, backend_plan: bool) -> None:
        plan = self.timed("planning", lambda: self.scheduler.plan(0))
        inputs = self.timed("inputs", lambda: StepInputs.build(plan, self.batch))
        if backend_plan:
            backend = select_backend()
            self.timed(
                "attention_plan", lambda: backend.plan(inputs.metadata, 2, torch.device("cpu"))
            )
        sampled = self.results(len(inputs.sampled))
        self.timed("results", lambda: self.scheduler.commit(plan, sampled, 0))


def measure(running: int, context: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part over `steps` steps of `running` decodes."""
    rig = Rig(running, context, steps + 20)
    for _ in range(20):
        rig.step(backend_plan=False)
    rig.seconds.clear()
    gc.collect()
    for index in range(steps):
        rig.step(backend_plan=index % 10 == 0)
    assert len(rig.scheduler.running) == running
    micro = {part: float(np.median(times)) * 1e6 for part, times in rig.seconds.items()}
    host = [sum(parts) for parts in zip(*(rig.seconds[p] for p in PARTS), strict=True)]
    micro["host"] = float(np.median(host)) * 1e6
    micro["host_p99"] = float(np.quantile(host, 0.99)) * 1e6
    return micro


PARTS = ("planning", "inputs", "results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    columns = (*PARTS, "host", "host_p99", "attention_plan")
    print("running " + " ".join(f"{c:>15}" for c in columns) + "   µs per step, medians")
    table: dict[str, dict[str, float]] = {}
    for running in args.running:
        row = measure(running, args.context, args.steps)
        table[str(running)] = {name: round(row[name], 1) for name in columns}
        print(f"{running:7d} " + " ".join(f"{row[c]:15.0f}" for c in columns))
    print(json.dumps({"bench": "host_overhead", "context": args.context, "us": table}))


if __name__ == "__main__":
    main()
