"""The writer's side of the gate: getting the readers to the end of their step."""

from __future__ import annotations

import os
import time

from rollout.policy import UpdateBusy
from trainer_bridge.control_page import ControlPage
from trainer_bridge.file_lock import FileLock
from trainer_bridge.gate_settings import GateSettings
from trainer_bridge.processes import describe_process

_FIRST_POLL_S = 0.0001
_LONGEST_POLL_S = 0.002


class QuiesceTimeout(UpdateBusy):
    """Readers did not reach the end of their step in time; nothing was changed."""


class WriterLock:
    """The exclusive lock, taken with an announcement and a deadline.

    flock itself is neither fair nor has a timeout: with readers whose steps overlap, a writer
    would never get it. So the writer announces itself, new steps hold back, and it asks again and
    again. A reader that hangs must not stop the others for long: the announcement lapses, they go
    on for a while, and it is renewed for twice the time, so that long steps cannot starve it.
    """

    def __init__(self, page: ControlPage, lock: FileLock, settings: GateSettings) -> None:
        self._page = page
        self._lock = lock
        self._settings = settings
        self._pid = os.getpid()

    def acquire(self, what: str) -> float:
        """Returns the seconds waited. On any error nothing is held and nothing was changed."""
        other = self._page.announced_writer()
        if other not in (0, self._pid):
            raise UpdateBusy(f"{describe_process(other)} is updating the weights")
        settings = self._settings
        started = time.monotonic()
        lease, renew_at, poll = settings.intent_lease_s, started, _FIRST_POLL_S
        try:
            while True:
                now = time.monotonic()
                if now >= renew_at:
                    self._page.announce(self._pid, time.monotonic_ns() + int(lease * 1e9))
                    renew_at = now + lease + settings.intent_lease_s
                    lease *= 2
                if self._lock.try_exclusive():
                    return time.monotonic() - started
                if now - started >= settings.quiesce_timeout_s:
                    raise QuiesceTimeout(self._message(what, now - started))
                time.sleep(poll)
                poll = min(2 * poll, _LONGEST_POLL_S)
        except BaseException:
            self._page.withdraw(self._pid)
            raise

    def release(self) -> None:
        self._lock.unlock()
        self._page.withdraw(self._pid)

    def close(self) -> None:
        self._lock.close()

    def _message(self, what: str, waited_s: float) -> str:
        holders = [describe_process(pid) for pid in self._lock.holders()]
        return (
            f"{what} waited {waited_s:.1f} s for the end of a step in "
            f"{', '.join(holders) or 'another process'}; nothing was changed, the live policy "
            f"version is {self._page.version}"
        )
