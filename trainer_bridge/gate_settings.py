"""The times and choices of one process's gate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateSettings:
    """`quiesce_timeout_s`: how long an update waits for the readers' step boundary.
    `reader_timeout_s`: how long a step waits for a running update.
    `intent_lease_s`: how long readers hold back for a waiting writer before they go on; doubled
    each time, so that steps longer than it cannot starve the writer.
    `undo`: keep a second copy of the weights, so that an update that raises leaves the old ones."""

    quiesce_timeout_s: float = 60.0
    reader_timeout_s: float = 300.0
    intent_lease_s: float = 2.0
    undo: bool = False

    def __post_init__(self) -> None:
        for name in ("quiesce_timeout_s", "reader_timeout_s", "intent_lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
