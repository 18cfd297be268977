"""Streamed tasks: prompts whose tokens are handed to a callback as the steps produce them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple, Protocol

from rollout.request import Request, Rollout
from rollout.scheduler import Scheduler

logger = logging.getLogger(__name__)


class TaskEvent(NamedTuple):
    """Progress of one sample of a task.

    token_ids, logprobs: what is new since the sample's last event; a step gives one token. text:
    the new text, where the task detokenizes. rollout: the whole sample, with its last event.
    finished: whether this is the task's last event; there is exactly one such.
    """

    task_id: int
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    text: str | None
    rollout: Rollout | None
    finished: bool


Callback = Callable[[TaskEvent], None]


class _AddTask(Protocol):
    def __call__(self, *, callback: Callback) -> int: ...


async def stream_events(
    add_task: _AddTask, cancel_task: Callable[[int], bool]
) -> AsyncIterator[TaskEvent]:
    """The events of the task that `add_task` opens; leaving early cancels it."""
    events: asyncio.Queue[TaskEvent] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def hand_over(event: TaskEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    opened: list[int] = []
    left = False

    def add() -> None:
        opened.append(add_task(callback=hand_over))
        if left:
            cancel_task(opened[0])

    finished = False
    try:
        # Adding and cancelling may wait for a step: not on the thread of the event loop.
        await asyncio.to_thread(add)
        while not finished:
            event = await events.get()
            finished = event.finished
            yield event
    finally:
        left = True
        if opened and not finished:
            loop.run_in_executor(None, cancel_task, opened[0])


class _Task:
    __slots__ = ("callback", "failed", "open", "requests", "sent", "task_id")

    def __init__(self, task_id: int, requests: list[Request], callback: Callback) -> None:
        self.task_id = task_id
        self.requests = requests
        self.callback = callback
        self.sent = {request.request_id: 0 for request in requests}
        self.open = {request.request_id for request in requests}
        self.failed = False


class TaskBoard:
    """The open tasks of one engine. Every call is made under the engine's lock.

    Callbacks run on the thread that made the progress, so one that blocks holds up the engine. It
    may call the engine: what is sent is noted before it is told.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tasks: dict[int, _Task] = {}
        self._task_of: dict[int, _Task] = {}  # by request id, while the sample is open
        self._ids = itertools.count()

    def open(self, requests: list[Request], callback: Callback) -> int:
        """Register a task; its id. Events start with the next `deliver` of its requests."""
        task = _Task(next(self._ids), requests, callback)
        self._tasks[task.task_id] = task
        self._task_of.update((request.request_id, task) for request in requests)
        return task.task_id

    def requests(self, task_id: int | None = None) -> list[Request]:
        """Of one task, none if it has ended or never was; of all open tasks for None."""
        if task_id is not None:
            return self._tasks[task_id].requests if task_id in self._tasks else []
        return [request for task in self._tasks.values() for request in task.requests]

    def deliver(self, requests: Iterable[Request]) -> None:
        """Tell the tasks of these requests what is new; requests of no task are passed over."""
        if not self._task_of:
            return
        for request in requests:
            task = self._task_of.get(request.request_id)
            if task is not None:
                self._deliver(task, request)

    def _deliver(self, task: _Task, request: Request) -> None:
        request_id = request.request_id
        tokens, logprobs = self._scheduler.batch.output(request)
        start = task.sent[request_id]
        if len(tokens) == start and not request.finished:
            return
        ended = request.finished
        finished = ended and len(task.open) == 1
        text = request.detokenizer
        event = TaskEvent(
            task.task_id,
            request.sample_index,
            tokens[start:].tolist(),
            logprobs[start:].tolist(),
            None if text is None else text.take_delta(),
            request.result() if ended else None,
            finished,
        )
        task.sent[request_id] = len(tokens)
        if ended:
            task.open.discard(request_id)
            self._task_of.pop(request_id, None)
        if finished:
            self._tasks.pop(task.task_id, None)
        try:
            task.callback(event)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # asyncio's CancelledError and SystemExit too
            self._fail(task, error)

    def _fail(self, task: _Task, error: BaseException) -> None:
        """A callback raised: its task ends, and is told so once; nobody else is touched."""
        logger.warning("the callback of task %d raised", task.task_id, exc_info=error)
        if task.failed or not task.open:
            return
        task.failed = True
        self._scheduler.fail(
            task.requests,
            "callback_failed",
            f"the callback of task {task.task_id} raised {type(error).__name__}: {error}",
        )
        self.deliver(task.requests)
