"""RolloutActor: a process that owns one engine, its scheduler and its KV, on shared weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch

from rollout.engine import RolloutEngine
from rollout.rollout_batch import RolloutBatch
from rollout.transport import PackedPrompts


class RolloutActor:
    """A shell around `RolloutEngine`, made a Ray actor by whoever starts it (`ray.remote`).

    build_engine: called once in the actor's process; attaches to the weights. num_threads: CPU
    threads of this process. Give it `max_concurrency >= 2`: `run` occupies one of Ray's threads,
    and the other calls must be answered meanwhile.

    All computing is done on one scheduler thread, whichever of Ray's threads asks: OpenMP keeps a
    team of workers, and malloc an arena, for every thread that ever computed.
    """

    def __init__(self, build_engine: Callable[[], RolloutEngine], num_threads: int) -> None:
        self._scheduler_thread = ThreadPoolExecutor(
            1, "scheduler", torch.set_num_threads, (num_threads,)
        )
        self._engine = self._scheduler_thread.submit(build_engine).result()

    def run(self, prompts: PackedPrompts) -> RolloutBatch:
        """Sample every prompt; rollouts in the order of the prompts, `prompt_index` renumbered."""
        tasks = prompts.unpack()
        rollouts = self._scheduler_thread.submit(self._engine.run_tasks, tasks).result()
        return RolloutBatch.from_rollouts(rollouts)

    def describe(self) -> dict[str, Any]:
        """Who this is, what it reads and promises: answered as soon as the engine is ready."""
        return {
            "pid": os.getpid(),
            "policy_version": self._engine.policy_version,
            "backend": self._engine.backend_name,
            "exactness": self._engine.exactness,
        }

    def get_stats(self) -> dict[str, Any]:
        """The engine's counters; answered while a batch runs."""
        return self._engine.get_stats()

    def release(self, in_flight: str) -> None:
        """`RolloutEngine.release`."""
        self._engine.release(in_flight=in_flight)

    def restore(self) -> None:
        """`RolloutEngine.restore`."""
        self._engine.restore()

    def memory_uss(self) -> int:
        """Bytes that only this process holds; the shared weights are not among them."""
        return int(psutil.Process().memory_full_info().uss)
