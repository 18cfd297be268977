"""Counters of one engine."""

from __future__ import annotations

import time
from typing import Any

from kvcache import KVCacheManager
from rollout.request import Request
from rollout.scheduler import Sampled, Scheduled, Scheduler


class EngineMetrics:
    """Counts what the steps did. `snapshot` reads plain ints and may run in any thread."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.steps = 0
        self.computed_tokens = 0
        self.generated_tokens = 0

    def count_step(
        self, plan: list[Scheduled], sampled: list[Sampled], ended: list[Request]
    ) -> None:
        self.steps += 1
        self.computed_tokens += sum(entry.num_new_tokens for entry in plan)
        self.generated_tokens += sum(row.token is not None for row in sampled)

    def snapshot(
        self, scheduler: Scheduler, kv: KVCacheManager[int], policy_version: int
    ) -> dict[str, Any]:
        """requests, tokens, prefix cache, blocks, policy version; seconds since construction."""
        prefix = kv.prefix_stats()
        return {
            "policy_version": policy_version,
            "requests_waiting": len(scheduler.waiting),
            "requests_running": len(scheduler.running),
            "requests_finished": dict(scheduler.finished),
            "preemptions": scheduler.preemptions,
            "steps": self.steps,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "uptime_s": time.monotonic() - self._started,
            "prefix_query_tokens": sum(s.queries for s in prefix.values()),
            "prefix_hit_tokens": sum(s.hits for s in prefix.values()),
            "prefix_hit_tokens_by_version": {v: s.hits for v, s in prefix.items()},
            "kv_blocks_total": kv.pool.num_total,
            "kv_blocks_used": kv.pool.num_used,
            "kv_blocks_cached": kv.pool.num_cached,
            "kv_blocks_free": kv.pool.num_free,
        }
