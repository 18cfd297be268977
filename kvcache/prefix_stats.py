"""Counters of prefix hits, by policy version."""

from __future__ import annotations

from typing import NamedTuple

MOST_VERSIONS = 64


class PrefixStats(NamedTuple):
    """What prefix matching did for the requests admitted under one version."""

    queries: int  # tokens that were looked up
    hits: int  # tokens among them that were found, so need no prefill


class PrefixCounters:
    """The counters of the latest versions. One thread adds, any may take a snapshot."""

    def __init__(self) -> None:
        self._stats: dict[int, PrefixStats] = {}

    def add(self, policy_version: int, queries: int, hits: int) -> None:
        before = self._stats.get(policy_version, PrefixStats(0, 0))
        self._stats[policy_version] = PrefixStats(before.queries + queries, before.hits + hits)
        if len(self._stats) > MOST_VERSIONS:
            del self._stats[min(self._stats)]

    def snapshot(self) -> dict[int, PrefixStats]:
        return dict(self._stats)
