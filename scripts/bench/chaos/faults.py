"""Faults at the labelled points of the protocol, from outside: nothing in the product knows them.

    trainer   attaching, recovering, before lock, announced, locked, before ATTEMPT, after ATTEMPT,
              mid-update, before VERSION, after VERSION, unlocked,
              checkpoint half written, checkpoint before rename, checkpoint after rename
    rollout   attaching, before step, step begun, mid-step, step computed, step ended
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from trainer_bridge.publication import SharedGate

TRAINER_POINTS = (
    "before lock", "announced", "locked", "before ATTEMPT", "after ATTEMPT", "mid-update",
    "before VERSION", "after VERSION", "unlocked",
)  # fmt: skip
CHECKPOINT_POINTS = (
    "checkpoint half written", "checkpoint before rename", "checkpoint after rename",
)  # fmt: skip
ROLLOUT_POINTS = ("before step", "step begun", "mid-step", "step computed", "step ended")
RAISING = {"before lock", "mid-update", "mid-step", "step computed", "checkpoint half written"}
"""Where an exception can come from in the product; elsewhere there is no code that could raise."""


class InjectedFault(Exception):
    """The adversary's own."""


@dataclass(frozen=True)
class Fault:
    """action: kill, stop, delay or raise. skip: how often the point is passed unharmed."""

    point: str
    action: str
    skip: int = 0
    seconds: float = 0.0


def draw_fault(rng: random.Random, points: tuple[str, ...], longest_skip: int) -> Fault:
    """Any point, any action that can happen there."""
    point = rng.choice(points)
    actions = ["kill", "kill", "stop", "delay"] + ["raise"] * (point in RAISING)
    return Fault(point, rng.choice(actions), rng.randint(0, longest_skip), rng.uniform(0.001, 0.05))


class FaultPoints:
    """One process's adversary: at most one fault is armed. It is reported before it strikes."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._armed: Fault | None = None
        self._left = 0

    def arm(self, fault: Fault | None) -> None:
        with self._lock:
            self._armed, self._left = fault, 0 if fault is None else fault.skip

    def reached(self, point: str) -> None:
        with self._lock:
            fault = self._armed
            if fault is None or fault.point != point:
                return
            if self._left:
                self._left -= 1
                return
            self._armed = None
        self._report(point, fault.action)
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        else:
            raise InjectedFault(point)

    def around(self, owner: Any, method: str, before: str | None, after: str | None) -> None:
        """Put points before and after a method of one object."""
        original = getattr(owner, method)

        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if before:
                self.reached(before)
            result = original(*arguments, **keywords)
            if after:
                self.reached(after)
            return result

        setattr(owner, method, wrapper)


class SafeSender:
    """A pipe's end that several threads of one process may send through."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def __call__(self, *message: Any) -> None:
        with self._lock:
            self._pipe.send(message)


def put_on_writer(points: FaultPoints, gate: SharedGate) -> None:
    points.around(gate._lock, "acquire", "before lock", "locked")
    points.around(gate.page, "announce", None, "announced")
    points.around(gate.page, "begin", "before ATTEMPT", "after ATTEMPT")
    points.around(gate.page, "commit", "before VERSION", "after VERSION")
    points.around(gate._lock, "release", None, "unlocked")


def put_on_reader(points: FaultPoints, gate: SharedGate, runner: Any) -> None:
    points.around(runner, "execute", "mid-step", "step computed")
    reader = gate.read()

    @contextmanager
    def read() -> Iterator[int]:
        points.reached("before step")
        with reader as version:
            points.reached("step begun")
            yield version
        points.reached("step ended")

    gate.read = read  # type: ignore[method-assign,assignment]


def switch_protocol_off(gate: SharedGate) -> None:
    """The control: locks that exclude nobody, words that nobody looks at."""

    def version_whatever_the_state() -> int:
        return gate.page.version

    for lock in (gate._lock._lock, gate._reader._lock):
        lock.try_shared = lambda: True  # type: ignore[method-assign]
        lock.try_exclusive = lambda: True  # type: ignore[method-assign]
        lock.unlock = lambda: None  # type: ignore[method-assign]
    gate.page.require_stable = version_whatever_the_state  # type: ignore[method-assign]
    gate.page.announced_writer = lambda: 0  # type: ignore[method-assign]


