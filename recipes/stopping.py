"""Ctrl-C and SIGTERM as one exception, so that a run ends through its own code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """The run was asked to end; `exit_code` is 128 + the signal's number (130 for Ctrl-C)."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


@contextmanager
def stop_signals() -> Iterator[None]:
    """Within the block SIGINT and SIGTERM raise `Stopped` in the main thread.

    A second signal raises again, also while the first one's clean-up is running. The former
    handlers are put back on leaving. Main thread only (ValueError elsewhere).
    """
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in former:
        signal.signal(number, _raise_stopped)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _raise_stopped(signal_number: int, frame: FrameType | None) -> None:
    raise Stopped(signal_number)
