"""EngineCore: scheduler, KV memory and weights under one lock, one step at a time.

    lock ──► gate.read ──► plan ──► execute ──► gate closed ──► commit ──► on_progress
             weights held still ────────────────┘

Whoever wants something computed calls `step` until it is: the callers of `run_batch`, the serving
loop, a draining update. They take turns; there is one scheduler and nothing is shared unguarded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvcache import KVCacheManager
from kvcache.storage import KVStorage
from rollout.fair_lock import FairLock
from rollout.metrics import EngineMetrics
from rollout.policy import WeightGate
from rollout.request import Request
from rollout.runner import ModelRunner
from rollout.sampling_rows import SampledRows
from rollout.scheduler import Scheduler
from rollout.step_plan import StepPlan

T = TypeVar("T")

IN_FLIGHT_MODES = ("refuse", "drain", "abort", "recompute", "keep")


class EngineReleased(RuntimeError):
    """The KV memory was given back to the system; `restore()` comes before any rollout."""


class EngineCore:
    """Thread-safe. `on_progress` is called under the lock with requests that may have felt it.

    Waiting threads are served in order of arrival, so a publication waits one step at most.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        kv: KVCacheManager[int],
        storage: KVStorage,
        gate: WeightGate,
        check_weights: Callable[[], None],
        on_progress: Callable[[Iterable[Request]], None],
        keeps_in_flight: bool = False,
    ) -> None:
        self.lock = FairLock()  # guards everything below
        self.scheduler = scheduler
        self.kv = kv
        self.gate = gate
        self.metrics = EngineMetrics()
        self._runner = runner
        self._storage = storage
        self._check_weights = check_weights
        self._on_progress = on_progress
        self._keeps_in_flight = keeps_in_flight
        self._planned_version = gate.version
        self._resumed = threading.Event()
        self._resumed.set()

    # ---------------------------------------------------------------- steps

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; those that admission has rejected end at once."""
        with self.lock:
            self.raise_if_unusable()
            with self._bookkeeping():
                for request in requests:
                    self.scheduler.add(request)
                    if not request.finished:
                        self.metrics.prompt_tokens += request.num_prompt_tokens

    def run(self, requests: list[Request]) -> None:
        """Queue these and step until they have ended; an exception frees all that they hold."""
        pending, depth = list(requests), self.lock.depth
        try:
            self.submit(requests)
            while True:
                with self.lock:
                    while pending and pending[-1].finished:
                        pending.pop()
                    if not pending:
                        return
                    self.raise_if_released()
                    resumed = self._resumed.is_set()
                    if resumed:
                        self._step()
                if not resumed:
                    self._resumed.wait(0.1)  # a paused request may still be aborted
        except BaseException:
            self.lock.unwind(depth)
            self.abort(requests)
            raise

    def step(self) -> bool:
        """One step if there is work and nothing holds it up; whether there was one."""
        with self.lock:
            held_up = not self._resumed.is_set() or self._storage.released
            if held_up or not self.scheduler.has_work:
                return False
            self._step()
            return True

    def _step(self) -> None:
        """The weights are held still from plan to results."""
        if not self.scheduler.has_work:
            return
        started = time.monotonic()
        batch, plan, sampled = self.scheduler.batch, None, None
        try:
            with self.gate.read() as version:
                if version != self._planned_version:
                    # Published while requests were running: their KV is of another policy.
                    if self._keeps_in_flight:
                        self.scheduler.seal_running()
                    else:
                        self.scheduler.requeue_running()
                    self._enter_version(version)
                plan = self.scheduler.plan(version)
                sampled = self._runner.execute(plan, batch)
            done = self.scheduler.commit(plan, sampled, version)
        except BaseException:
            self._clean_up(plan, sampled)
            raise
        arrived = batch.arrived[done.first_token_rows]
        self.metrics.count_step(plan, done, arrived, time.monotonic() - started)
        self._on_progress([*self.scheduler.running, *done.ended])

    def _clean_up(self, plan: StepPlan | None, sampled: SampledRows | None) -> None:
        """After a step that raised, wherever that was: nobody goes on from half of it."""
        running = list(self.scheduler.running)
        with self._bookkeeping():
            if plan is not None and sampled is None:
                self.scheduler.abandon(plan)
                return
        self.scheduler.start_over()
        if sampled is not None:  # taking the results in was interrupted: an end may be missed
            self.scheduler.fail(
                running,
                "step_interrupted",
                "the step that would have taken this request's next token was interrupted; "
                "the tokens so far are kept",
            )
            self._on_progress(running)

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests as `aborted`, tokens kept; those that have ended are left alone."""
        requests = list(requests)
        with self.lock:
            with self._bookkeeping():
                self.scheduler.abort(requests)
            self._on_progress(requests)

    def fail(self, requests: list[Request], reason: str, message: str) -> None:
        """End requests as `error`, tokens kept; those that have ended are left alone."""
        with self.lock:
            with self._bookkeeping():
                self.scheduler.fail(requests, reason, message)
            self._on_progress(requests)

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """An exception inside, Ctrl-C for one, leaves books that are right: see `start_over`."""
        try:
            yield
        except BaseException:
            self.scheduler.start_over()
            raise

    def pause(self) -> None:
        """No step runs when this returns, and none will before `resume`."""
        with self.lock:
            self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    # ---------------------------------------------------------------- policy versions

    def apply_weight_update(
        self, version: int | None, update: Callable[[int], T], in_flight: str
    ) -> T:
        """See `RolloutEngine.apply_weight_update`; `update` takes the target version."""
        with self.lock:
            self.gate.check_write(version)  # before any request feels it
            self._check_weights()
            self._settle(in_flight, "change the weights")
            result = self.gate.write(version, update, self._check_weights)
            with self._bookkeeping():
                if in_flight == "keep":
                    self.scheduler.seal_running()
                else:
                    self.scheduler.requeue_running()
            self._enter_version(self.gate.version)
            return result

    def snapshot(self, fn: Callable[[int], T]) -> T:
        """See `RolloutEngine.with_policy_snapshot`. Lock before gate, as everywhere."""
        with self.lock, self.gate.read() as version:
            return fn(version)

    def recover(self, reload: Callable[[], None] | None) -> int:
        """See `RolloutEngine.recover`."""
        with self.lock:
            version = self.gate.recover(reload)
            if version != self._planned_version:
                with self._bookkeeping():
                    self.scheduler.requeue_running()
                self._enter_version(version)
            return version

    def _enter_version(self, version: int) -> None:
        """From here on plan under `version`; nothing cached under an older one can be found."""
        self.kv.advance_version(version)
        self._planned_version = version

    def _settle(self, in_flight: str, purpose: str) -> None:
        """Bring queued and running requests to where `in_flight` wants them."""
        if not self.scheduler.has_work:
            return
        if in_flight == "refuse":
            raise RuntimeError(
                f"cannot {purpose}: {len(self.scheduler.running)} requests run and "
                f"{len(self.scheduler.waiting)} wait; finish them, or pass another in_flight mode "
                f"than 'refuse' ({', '.join(IN_FLIGHT_MODES[1:])})"
            )
        if in_flight == "drain":
            self.raise_if_released()
            if not self._resumed.is_set():
                raise RuntimeError(f"cannot {purpose} by draining while paused; resume() first")
            while self.scheduler.has_work:
                self._step()
        elif in_flight == "abort":
            self.abort([*self.scheduler.running, *self.scheduler.waiting])

    # ---------------------------------------------------------------- KV memory

    def release(self, in_flight: str) -> None:
        """See `RolloutEngine.release`."""
        with self.lock:
            if self._storage.released:
                return
            self._settle(in_flight, "release the KV memory")
            with self._bookkeeping():
                self.scheduler.requeue_running()
                self.kv.reset()
            self._storage.release()

    def restore(self) -> None:
        """See `RolloutEngine.restore`."""
        with self.lock:
            self._storage.restore()

    @property
    def released(self) -> bool:
        return self._storage.released

    def raise_if_unusable(self) -> None:
        """`EngineReleased`, or what the gate says of weights that nothing can be computed with."""
        self.raise_if_released()
        self.raise_if_poisoned()

    def raise_if_poisoned(self) -> None:
        with self.gate.read():
            pass

    def raise_if_released(self) -> None:
        if self._storage.released:
            raise EngineReleased(
                "the engine's KV memory is released; call engine.restore() before rollouts"
            )
