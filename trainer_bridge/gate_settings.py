"""The times and choices of one process's gate."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

MEMORY_PER_UNDO = 8
"""Available memory, in sizes of the weights, that leaves room for gradients, an optimizer's two
moments and the activations beside the copy."""


@dataclass(frozen=True, slots=True)
class GateSettings:
    """`quiesce_timeout_s`: how long an update waits for the readers' step boundary.
    `reader_timeout_s`: how long a step waits for a running update.
    `intent_lease_s`: how long readers hold back for a waiting writer before they go on; doubled
    each time, so that steps longer than it cannot starve the writer.
    `undo`: copy the weights aside before every update, so that one that raises leaves the old ones;
    None = while there is plenty of memory for it (`MEMORY_PER_UNDO`)."""

    quiesce_timeout_s: float = 60.0
    reader_timeout_s: float = 300.0
    intent_lease_s: float = 2.0
    undo: bool | None = None

    def wants_undo(self, weights_bytes: int) -> bool:
        """Whether a gate over that many bytes keeps an undo copy."""
        if self.undo is not None:
            return self.undo
        return bool(psutil.virtual_memory().available >= MEMORY_PER_UNDO * weights_bytes)

    def __post_init__(self) -> None:
        for name in ("quiesce_timeout_s", "reader_timeout_s", "intent_lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
