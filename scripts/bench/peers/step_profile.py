"""Where a step of Lockstep spends its time, seen from Python around the kernels.

cProfile and torch.profiler do not see inside a C kernel called through ctypes, nor name it; so the
clock is put around the methods of the objects that a step is made of:

    plan and build   scheduler.plan; the step's inputs and the attention plan, until the forward
    attention        the backend's store and attend
    linear           the operators' matmul and linear, the projection onto the vocabulary included
    other forward    what else the forward does: norms, rotary embedding, gating, embedding
    sampling         from the forward's end to tokens and log-probs, without the projection
    commit           scheduler.commit
    other            the rest of the call: admission, events, results

Every step is run by Python meanwhile: a replayed one has no parts that Python sees.

Times are exclusive: who calls another part is not charged for it. The clock itself costs about a
microsecond for each call of a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout import RolloutEngine

PARTS = (
    "plan and build", "attention", "linear", "other forward", "sampling", "commit", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One run. `milliseconds` are per step; `share` is of the whole; both by part."""

    seconds: float
    steps: int
    operators: str
    attention: str
    milliseconds: dict[str, float]
    share: dict[str, float]


class Clock:
    """Charges each moment to the innermost part that runs."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running = ["other"]
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, call: Callable[..., Any], then: str | None = None) -> Any:
        """`call` charged to `part`. then: what its caller is charged to from its end on."""

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._running.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._charge()
                self._running.pop()
                if then is not None:
                    self._running[-1] = then

        return timed_call

    def stop(self) -> None:
        self._charge()


@contextmanager
def _around(clock: Clock, engine: RolloutEngine) -> Iterator[None]:
    """The clock around every part of this engine's steps, taken off again at the end."""
    core = engine._core
    runner, scheduler, backend = core._runner, core.scheduler, engine._backend
    operators = engine.model.operators
    watched: list[tuple[Any, str, str, str | None]] = [
        (scheduler, "plan", "plan and build", None),
        (scheduler, "commit", "commit", None),
        (runner, "execute", "plan and build", None),
        (engine.model, "forward", "other forward", "sampling"),
        (backend, "store", "attention", None),
        (backend, "attend", "attention", None),
        (operators, "matmul", "linear", None),
        (operators, "linear", "linear", None),
    ]
    recorded, runner.recorded = runner.recorded, None
    try:
        for target, name, part, then in watched:
            setattr(target, name, clock.timed(part, getattr(target, name), then))
        yield
    finally:
        runner.recorded = recorded
        for target, name, _, _ in watched:
            vars(target).pop(name, None)


def profiled(engine: RolloutEngine, run: Callable[[], object]) -> StepProfile:
    """Time by part of one `run` on this engine, which must be idle otherwise."""
    before = engine.get_stats()["steps"]
    clock = Clock()
    with _around(clock, engine):
        run()
        clock.stop()
    steps = engine.get_stats()["steps"] - before
    if not steps:
        raise ValueError("the profiled run made no step; give it prompts to compute")
    total = sum(clock.seconds.values())
    return StepProfile(
        seconds=total,
        steps=steps,
        operators=engine.model.operators.name,
        attention=engine.backend_name,
        milliseconds={part: 1e3 * clock.seconds[part] / steps for part in PARTS},
        share={part: clock.seconds[part] / total for part in PARTS},
    )
