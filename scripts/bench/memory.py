"""What a set of processes takes of memory together, at its highest, while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

INTERVAL_S = 0.2


class PeakMemory:
    """Sums the proportional set size (PSS) of some processes five times a second.

    PSS divides a page among those that map it, so weights that all share count once. Use it as a
    context manager; `bytes` is the highest sum since `reset`. processes: asked anew each time.
    """

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]]) -> None:
        self.bytes = 0
        self._processes = processes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def reset(self) -> None:
        self.bytes = 0

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            total = 0
            for process in self._processes():
                with suppress(psutil.Error):
                    total += int(process.memory_full_info().pss)
            self.bytes = max(self.bytes, total)


def family(pid: int) -> list[psutil.Process]:
    """A process with all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
