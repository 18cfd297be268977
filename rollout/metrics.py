"""Counters of one engine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvcache import KVCacheManager
from rollout.scheduler import Scheduler
from rollout.step_plan import Committed, StepPlan

WINDOW = 1024
"""Requests, or steps, that a rate or a median looks back on."""


class EngineMetrics:
    """Counts what the steps did. `snapshot` reads plain ints and copies, so any thread may call it.

    Times are kept in rings of fixed size: they never grow, and are never resized under a reader.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.steps = 0
        self.computed_tokens = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._num_waits = 0
        self._waits = np.zeros(WINDOW)  # seconds from arrival to first token
        self._step_seconds = np.zeros(WINDOW)
        self._step_tokens = np.zeros(WINDOW, np.int64)

    def count_step(
        self, plan: StepPlan, done: Committed, arrived: np.ndarray, seconds: float
    ) -> None:
        """arrived: monotonic seconds at which the requests of `done.first_token_rows` came."""
        place = self.steps % WINDOW
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        self.generated_tokens += done.num_generated
        self._step_seconds[place] = seconds
        self._step_tokens[place] = done.num_generated
        for wait in (time.monotonic() - arrived).tolist():
            self._waits[self._num_waits % WINDOW] = wait
            self._num_waits += 1

    def snapshot(
        self, scheduler: Scheduler, kv: KVCacheManager[int], policy_version: int
    ) -> dict[str, Any]:
        """Gauges and totals since construction.

        time_to_first_token_s: median over the latest 1,024 requests, from arrival, queueing
        included; tokens_per_second: over the latest 1,024 steps, of the time spent in steps. Both
        None before there is anything to tell. computed_tokens: prompt and output tokens that went
        through the model; prompt_tokens: those submitted, once for every sample.
        """
        prefix = kv.prefix_stats()
        waits = self._waits[: min(self._num_waits, WINDOW)].copy()
        steps = min(self.steps, WINDOW)
        seconds = float(self._step_seconds[:steps].sum())
        tokens = int(self._step_tokens[:steps].sum())
        return {
            "policy_version": policy_version,
            "requests_waiting": len(scheduler.waiting),
            "requests_running": len(scheduler.running),
            "requests_finished": dict(scheduler.finished),
            "preemptions": scheduler.preemptions,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "time_to_first_token_s": float(np.median(waits)) if len(waits) else None,
            "tokens_per_second": tokens / seconds if seconds else None,
            "uptime_s": time.monotonic() - self._started,
            "prefix_query_tokens": sum(s.queries for s in prefix.values()),
            "prefix_hit_tokens": sum(s.hits for s in prefix.values()),
            "prefix_hit_tokens_by_version": {v: s.hits for v, s in prefix.items()},
            "kv_blocks_total": kv.pool.num_total,
            "kv_blocks_used": kv.pool.num_used,
            "kv_blocks_cached": kv.pool.num_cached,
            "kv_blocks_free": kv.pool.num_free,
        }
