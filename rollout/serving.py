"""The background loop: a thread that steps the engine while there is work, and its life cycle."""

from __future__ import annotations

import atexit
import logging
import threading

from rollout.core import EngineCore
from rollout.tasks import TaskBoard

logger = logging.getLogger(__name__)


class ServingLoop:
    """One thread of one engine; started once, never restarted.

    A step that raises ends the open tasks with `step_failed`; the loop goes on and serves what
    comes next. Batches in the same queue get the exception from their own steps. When it is
    stopped, it ends the tasks that are left as its last act.
    """

    def __init__(self, core: EngineCore, board: TaskBoard) -> None:
        self._core = core
        self._board = board
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rollout-serving", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set() or self._drain.is_set()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the loop itself, in a callback."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """There may be work."""
        self._wake.set()

    def ask_to_stop(self, drain: bool) -> None:
        """End after the step that runs now, or when the queue is empty."""
        (self._drain if drain else self._stop).set()
        self._wake.set()

    def join(self, timeout_s: float | None) -> bool:
        """Whether the thread has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            self._step_until_stopped()
        finally:
            with self._core.lock:
                self._core.abort(self._board.requests())
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """The interpreter must not be torn down under a step that computes."""
        self.ask_to_stop(drain=False)
        self.join(60.0)

    def _step_until_stopped(self) -> None:
        while not self._stop.is_set():
            try:
                stepped = self._core.step()
            except Exception as error:
                logger.exception("a step of the serving loop failed")
                stepped = True
                self._fail_tasks(error)
            if stepped:
                continue
            if self._drain.is_set() and not self._core.scheduler.has_work:
                return
            self._wake.wait()
            self._wake.clear()

    def _fail_tasks(self, error: Exception) -> None:
        with self._core.lock:
            self._core.fail(
                self._board.requests(), "step_failed", f"{type(error).__name__}: {error}"
            )


class Serving:
    """Starts and stops the loops of one engine; at most one lives."""

    def __init__(self, core: EngineCore, board: TaskBoard) -> None:
        self._core = core
        self._board = board
        self._loop: ServingLoop | None = None

    @property
    def alive(self) -> bool:
        """Whether a loop runs that was not asked to stop."""
        return self._loop is not None and self._loop.alive and not self._loop.stopping

    def wake(self) -> None:
        """There may be work for the loop, if one is started."""
        loop = self._loop
        if loop is not None:
            loop.wake()

    def start(self) -> None:
        """See `RolloutEngine.start`."""
        self._refuse_a_second()  # at once, although a step of the first may hold the lock
        with self._core.lock:  # an update that runs holds it too
            self._refuse_a_second()
            self._core.raise_if_released()
            self._loop = ServingLoop(self._core, self._board)

    def _refuse_a_second(self) -> None:
        if self._loop is not None and self._loop.alive:
            state = "has not drained yet" if self._loop.stopping else "runs already"
            raise RuntimeError(f"the serving loop {state}; stop() it and wait for True first")

    def stop(self, timeout_s: float | None, drain: bool) -> bool:
        """See `RolloutEngine.stop`."""
        loop = self._loop
        if loop is None:
            return True
        loop.ask_to_stop(drain)
        return not loop.is_current and loop.join(timeout_s)
