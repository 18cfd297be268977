"""Ctrl-C and SIGTERM as one exception, so that a run ends through its own code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """The run was asked to end; `exit_code` is 128 + the signal's number (130 for Ctrl-C).

    at_once: it was asked again while something was `held`, which is therefore half done.
    """

    def __init__(self, signal_number: int, at_once: bool = False) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number
        self.at_once = at_once


class StopSignals:
    """What the handler of the signals knows."""

    def __init__(self) -> None:
        self._holding = False
        self._waiting: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal within the block raises at its end: what belongs together is finished first.

        A second one raises at once, with `at_once` set.
        """
        self._holding, self._waiting = True, None
        try:
            yield
        finally:
            self._holding = False
        if self._waiting is not None:
            raise Stopped(self._waiting)

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._holding and self._waiting is None:
            self._waiting = signal_number
            return
        at_once, self._waiting = self._holding, None
        raise Stopped(signal_number, at_once)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Within the block SIGINT and SIGTERM raise `Stopped` in the main thread.

    A second signal raises again, also while the first one's clean-up is running. The former
    handlers are put back on leaving. Main thread only (ValueError elsewhere).
    """
    signals = StopSignals()
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in former:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
