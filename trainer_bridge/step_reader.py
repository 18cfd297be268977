"""The reader's side of the gate: what every scheduler step pays."""

from __future__ import annotations

import os
import time
from threading import Lock, get_ident

from rollout.policy import UpdateBusy, WeightsError
from trainer_bridge.control_page import ControlPage
from trainer_bridge.file_lock import FileLock
from trainer_bridge.gate_settings import GateSettings
from trainer_bridge.processes import describe_process

_POLL_S = 0.0005


class StepReader:
    """A context manager that keeps the weights still and yields their version.

    One object serves every step of every thread of a process and may be nested: the first one in
    takes the flock, the last one out drops it. While a writer waits, a new step lets it go first,
    for as long as the writer lives and its announcement has not lapsed.
    """

    def __init__(self, page: ControlPage, lock: FileLock, settings: GateSettings) -> None:
        self.updating_thread = 0  # set by the gate while that thread changes the weights
        self._page = page
        self._lock = lock
        self._timeout_s = settings.reader_timeout_s
        self._pid = os.getpid()
        self._mutex = Lock()
        self._depth: dict[int, int] = {}  # thread -> how deep it is nested
        self._version = 0

    def holds(self, thread: int) -> bool:
        return thread in self._depth

    def __enter__(self) -> int:
        me = get_ident()
        if os.getpid() != self._pid:
            raise WeightsError(
                "this gate was opened before a fork() and shares its lock with the parent; attach "
                "a gate in the child"
            )
        if me == self.updating_thread:
            raise WeightsError("the weights cannot be read from inside an update of them")
        if self._page.intent_pid and me not in self._depth:
            self._let_writer_go_first()
        if not self._try_join(me):
            self._join(me)
        return self._version

    def __exit__(self, *_exc: object) -> None:
        me = get_ident()
        with self._mutex:
            depth = self._depth.pop(me)
            if depth > 1:
                self._depth[me] = depth - 1
            elif not self._depth:
                self._lock.unlock()

    def close(self) -> None:
        self._lock.close()

    def _try_join(self, me: int) -> bool:
        """False while a writer has the lock."""
        with self._mutex:
            if not self._depth:
                if not self._lock.try_shared():
                    return False
                try:
                    self._version = self._page.require_stable()
                except BaseException:
                    self._lock.unlock()
                    raise
            self._depth[me] = self._depth.get(me, 0) + 1
            return True

    def _join(self, me: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._try_join(me):
            if time.monotonic() >= deadline:
                writer = self._page.writer_pid
                raise UpdateBusy(
                    f"waited {self._timeout_s:g} s for the update to policy version "
                    f"{self._page.attempt}, which {describe_process(writer)} has not finished"
                )
            time.sleep(_POLL_S)

    def _let_writer_go_first(self) -> None:
        while self._page.announced_writer():
            time.sleep(_POLL_S)
