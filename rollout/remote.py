"""Waiting for Ray actors: every wait has a deadline, every failure names actor, phase and cause.

    ActorFailure
      ActorTimeout         it answers, but has not done this call in time
      ActorLost            it will not do this call any more
        ActorDied          its process is gone
        ActorOutOfMemory   and here is why
        ActorHung          its process is there and does not answer
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NO_MEMORY = re.compile(
    r"MemoryError|can't allocate memory|out of memory|cannot allocate|bad_alloc", re.I
)
_POLL_S = 1.0


class ActorFailure(RuntimeError):
    """A remote actor did not do its part."""


class ActorTimeout(ActorFailure):
    """The actor answers but has not finished in time."""


class ActorLost(ActorFailure):
    """The actor will not finish this call; whoever supervises it may start another one."""


class ActorDied(ActorLost):
    """The actor's process is gone."""


class ActorOutOfMemory(ActorLost):
    """The actor's process found no memory. Another one would meet the same end."""


class ActorHung(ActorLost):
    """The actor's process exists but has not answered for too long."""


class RemoteActor:
    """One actor as its supervisor sees it: a name, a handle, and the last time it was heard of.

    `handle` has the methods `heartbeat()`, which answers at once with a sentence on what the actor
    does, and `process_identity()`. heartbeat_timeout_s: silence after which it counts as hung.
    """

    def __init__(self, name: str, handle: Any, heartbeat_timeout_s: float) -> None:
        self.name = name
        self.handle = handle
        self._identity = handle.process_identity.remote()
        self._timeout_s = heartbeat_timeout_s
        self._checking = threading.Lock()
        self._started = False
        self._ping: Any = None
        self._asked = self._heard = time.monotonic()
        self._said = "nothing yet"
        self._memory_kills = memory_kills()

    def call(self, phase: str, reference: Any, timeout_s: float) -> Any:
        """The result of a call; its own error comes through as itself, else `ActorFailure`."""
        return wait_for(reference, self.name, phase, timeout_s, self.check)

    def check(self, phase: str) -> None:
        """Ask for a heartbeat now and then; `ActorLost` when the actor is dead or silent.

        While its process is still starting, it may be silent: that wait has a deadline of its own.
        Any thread may ask; one at a time does.
        """
        if not self._checking.acquire(blocking=False):
            return
        try:
            if self._has_started(phase):
                self._check(phase)
        finally:
            self._checking.release()

    def _check(self, phase: str) -> None:
        now = time.monotonic()
        if self._ping is None:
            if now - self._asked >= min(_POLL_S, self._timeout_s / 4):
                self._asked, self._ping = now, self.handle.heartbeat.remote()
            return
        ready, _ = ray.wait([self._ping], timeout=0)
        if ready:
            ping, self._ping = self._ping, None
            try:
                self._said = str(ray.get(ping))
            except RayActorError as error:
                raise self.death(phase, error) from None
            self._heard = now
        elif now - self._asked > self._timeout_s:
            raise ActorHung(
                f"{self.name} has not answered for {now - self._heard:.1f} s during {phase!r}; "
                f"the last it said: {self._said}"
            )

    def _has_started(self, phase: str) -> bool:
        if not self._started and ray.wait([self._identity], timeout=0)[0]:
            try:
                ray.get(self._identity)
            except RayActorError as error:
                raise self.death(phase, error) from None
            self._started, self._asked = True, time.monotonic()
            self._heard = self._asked
        return self._started

    def death(self, phase: str, error: Exception) -> ActorLost:
        """What `error` of a call means, as the error to raise."""
        lost = actor_lost(self.name, phase, error)
        kills = memory_kills() - self._memory_kills
        if type(lost) is ActorDied and kills > 0:
            return ActorOutOfMemory(f"{lost}; the kernel killed {kills} process(es) for memory")
        return lost

    def kill(self) -> None:
        """End the process, a stopped one too, and return when it is gone. Idempotent.

        By Ray, which takes a moment and knows then that it was meant; by force if that fails.
        """
        ready, _ = ray.wait([self._identity], timeout=0)
        with suppress(RayError):
            ray.kill(self.handle)
            if ready:
                ray.get(self._identity).kill()


def wait_for(
    reference: Any,
    actor: str,
    phase: str,
    timeout_s: float,
    check: Callable[[str], None] | None = None,
) -> Any:
    """The result of one remote call. An error raised by the call comes through as itself.

    Raises `ActorLost` or `ActorTimeout`, which name `actor` and `phase`. `check(phase)` is called
    every second and may raise.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        ready, _ = ray.wait([reference], timeout=max(0.0, min(_POLL_S / 4, left)))
        if ready:
            return result_of(reference, actor, phase)
        if left <= 0:
            raise ActorTimeout(
                f"{actor} did not finish {phase!r} within {timeout_s:.0f} s; it may wait for a "
                "machine that has no room for it (see `ray status`), or need a longer timeout"
            )
        if check is not None:
            check(phase)


def result_of(reference: Any, actor: str, phase: str) -> Any:
    """The result of a call that is ready."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.as_instanceof_cause()
        if is_out_of_memory(cause):
            raise ActorOutOfMemory(
                f"{actor} ran out of memory during {phase!r}: {_lines(cause)[-1]}"
            ) from None
        raise cause from None
    except (RayActorError, OutOfMemoryError) as error:
        raise actor_lost(actor, phase, error) from None


def actor_lost(actor: str, phase: str, error: Exception) -> ActorLost:
    """`ActorDied`, or `ActorOutOfMemory` where Ray's report says so."""
    cause = _cause(error)
    if isinstance(error, OutOfMemoryError) or is_out_of_memory(error):
        return ActorOutOfMemory(f"{actor} ran out of memory during {phase!r}: {cause}")
    return ActorDied(f"{actor} died during {phase!r}: {cause}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of Python, torch or Ray's own accounts."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | RayActorError) and bool(
        _NO_MEMORY.search(str(error))
    )


def memory_kills() -> int:
    """Processes that the kernel has killed for want of memory so far: in this cgroup if it counts
    them, else on this host; 0 where neither is told."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        with suppress(OSError, ValueError):
            for line in Path(path).read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
    return 0


def _cause(error: Exception) -> str:
    """One line of Ray's report: its last, the exception itself, if the constructor raised; else
    its first, which says how the process ended."""
    lines = _lines(error)
    return lines[-1] if "creation task" in lines[0] else lines[0]


def _lines(error: BaseException) -> list[str]:
    """What the error says, without colours and empty lines; never nothing."""
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines()]
    return [line for line in lines if line] or [type(error).__name__]
