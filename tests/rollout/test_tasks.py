"""Streamed tasks: events, cancelling, failing callbacks, the async form."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from rollout import RolloutEngine, SamplingParams, TaskEvent
from tests.folders import word_tokenizer
from tests.models import EOS, VOCABULARY, tiny_model


class Listener:
    """A callback that keeps what it is told; `done` is set by the last event."""

    def __init__(self) -> None:
        self.events: list[TaskEvent] = []
        self.done = threading.Event()

    def __call__(self, event: TaskEvent) -> None:
        assert not self.done.is_set(), "an event after the last"
        self.events.append(event)
        if event.finished:
            self.done.set()

    def tokens(self, sample: int = 0) -> list[int]:
        return [t for e in self.events if e.sample_index == sample for t in e.token_ids]

    def text(self) -> str:
        return "".join(e.text or "" for e in self.events)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def engine(model) -> Iterator[RolloutEngine]:
    """Started; at the end nothing may be held or queued."""
    engine = RolloutEngine(model, word_tokenizer(), max_batch_size=4)
    engine.start()
    yield engine
    assert engine.stop()
    engine.check_integrity()
    stats = engine.get_stats()
    assert (stats["requests_waiting"], stats["requests_running"]) == (0, 0)
    assert stats["kv_blocks_used"] == 0


def test_events_add_up_to_the_rollout(engine, model):
    """Streaming gives the tokens of `run_batch`, one at a time, and one last event."""
    (expected,) = RolloutEngine(model).run_batch(
        [[5, 6]], max_tokens=12, seed=3, ignore_eos=True, return_details=True
    )
    heard = Listener()
    task = engine.add_task([5, 6], max_tokens=12, seed=3, ignore_eos=True, callback=heard)
    assert heard.done.wait(60)
    assert {e.task_id for e in heard.events} == {task}
    assert heard.tokens() == expected.token_ids
    assert [p for e in heard.events for p in e.logprobs] == expected.logprobs
    assert all(len(e.token_ids) == 1 for e in heard.events)
    assert [e.finished for e in heard.events] == [False] * 11 + [True]
    assert heard.events[-1].rollout == expected
    assert all(e.rollout is None for e in heard.events[:-1])


def test_samples_of_one_task(engine):
    """Every sample ends with its rollout; the task ends once, with the last of them."""
    heard = Listener()
    engine.add_task([5, 6, 7], n=3, max_tokens=9, seed=1, callback=heard)
    assert heard.done.wait(60)
    ends = [e for e in heard.events if e.rollout is not None]
    assert sorted(e.sample_index for e in ends) == [0, 1, 2]
    assert [e.finished for e in heard.events].count(True) == 1 and heard.events[-1].finished
    for end in ends:
        assert end.rollout is not None and end.rollout.token_ids == heard.tokens(end.sample_index)


def test_a_prompt_of_text_is_answered_in_text(engine):
    heard = Listener()
    engine.add_task("w5 w6", max_tokens=6, seed=2, ignore_eos=True, callback=heard)
    assert heard.done.wait(60)
    rollout = heard.events[-1].rollout
    assert rollout is not None and rollout.prompt_token_ids == [5, 6]
    assert heard.text() == rollout.text == engine.tokenizer.decode(rollout.token_ids)


def test_a_stop_string_ends_a_task(engine):
    """L10: the text is cut before it, deltas never show it, the tokens keep it."""
    free = Listener()
    engine.add_task("w5 w6", max_tokens=12, seed=2, ignore_eos=True, callback=free)
    assert free.done.wait(60)
    words = free.text().split()
    stop = f"{words[3]} {words[4]}"
    heard = Listener()
    engine.add_task(
        "w5 w6", max_tokens=12, seed=2, ignore_eos=True, stop=stop, callback=heard
    )
    assert heard.done.wait(60)
    rollout = heard.events[-1].rollout
    assert rollout is not None
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", stop)
    assert rollout.token_ids == free.tokens()[:5]
    assert heard.text() == rollout.text and stop not in heard.text()
    assert rollout.text.split() == words[:3]


def test_a_rejected_prompt_is_told_at_once(engine):
    """S14: one last event with the reason."""
    heard = Listener()
    engine.add_task([5, VOCABULARY], callback=heard)
    (event,) = heard.events
    assert event.finished and event.rollout is not None
    assert event.rollout.error_reason == "token_out_of_vocabulary"


def test_cancel_waiting_and_running(engine):
    """S1, S11: a storm of 32; each has exactly one last event, and no token comes after."""
    heard = [Listener() for _ in range(32)]
    ids = [
        engine.add_task([5 + i], max_tokens=200, seed=i, ignore_eos=True, callback=listener)
        for i, listener in enumerate(heard)
    ]
    assert len(set(ids)) == 32
    for task_id, listener in zip(ids, heard, strict=True):
        was_open = engine.cancel_task(task_id)
        count = len(listener.events)
        last = listener.events[-1]
        assert last.finished and last.rollout is not None
        assert last.rollout.finish_reason == ("aborted" if was_open else "length")
        assert last.rollout.token_ids == listener.tokens()
        assert not engine.remove_task(task_id) and len(listener.events) == count
    assert engine.get_stats()["requests_running"] == 0
    assert engine.get_stats()["kv_blocks_used"] == 0
    assert not engine.cancel_task(10_000)


@pytest.mark.parametrize("at", [0, 3])
def test_a_raising_callback_fails_its_own_task_only(engine, at):
    """S13: it is told so once, its neighbour goes on undisturbed."""
    told: list[TaskEvent] = []

    def raising(event: TaskEvent) -> None:
        told.append(event)
        if len(told) > at:
            raise OSError("no more")

    quiet = Listener()
    engine.add_task([9], max_tokens=30, seed=0, ignore_eos=True, callback=quiet)
    failing = engine.add_task([5, 6], n=2, max_tokens=30, seed=1, ignore_eos=True, callback=raising)
    assert quiet.done.wait(60)
    last = quiet.events[-1].rollout
    assert last is not None and (last.finish_reason, len(last.token_ids)) == ("length", 30)
    assert not engine.cancel_task(failing)
    assert [e.finished for e in told].count(True) == 1 and told[-1].finished
    ends = [e.rollout for e in told if e.rollout is not None]
    assert {r.error_reason for r in ends} == {"callback_failed"} and len(ends) == 2
    assert all("OSError: no more" in str(r.error_message) for r in ends)


def test_a_callback_may_use_the_engine(engine):
    """It can cancel its own task and add another; nothing locks up and nothing is told twice."""
    second = Listener()
    heard = Listener()
    ids: list[int] = []

    def chaining(event: TaskEvent) -> None:
        heard(event)
        if len(heard.events) == 4:
            engine.add_task([8], max_tokens=3, seed=0, ignore_eos=True, callback=second)
            engine.cancel_task(event.task_id)

    ids.append(
        engine.add_task([5], max_tokens=50, seed=0, ignore_eos=True, callback=chaining)
    )
    assert heard.done.wait(60) and second.done.wait(60)
    last = heard.events[-1].rollout
    assert last is not None and (last.finish_reason, len(last.token_ids)) == ("aborted", 4)
    assert len(second.tokens()) == 3


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_no_exception_of_a_callback_ends_the_loop(engine, error):
    """S13: not even those that are no `Exception`."""
    told: list[TaskEvent] = []

    def raising(event: TaskEvent) -> None:
        told.append(event)
        raise error

    engine.add_task([5], max_tokens=5, seed=0, ignore_eos=True, callback=raising)
    other = Listener()
    engine.add_task([6], max_tokens=5, seed=0, ignore_eos=True, callback=other)
    assert other.done.wait(60) and told[-1].finished
    assert told[-1].rollout is not None and told[-1].rollout.error_reason == "callback_failed"


def test_a_stream_cancelled_while_it_is_added(model):
    """Nobody is left to hear it, so nobody computes it."""
    engine = RolloutEngine(model)
    engine.start()
    engine.pause()

    async def cancelled() -> None:
        async def consume() -> None:
            async for _ in engine.stream([5], max_tokens=200, ignore_eos=True):
                pass

        with engine._core.lock:  # so that adding waits
            task = asyncio.ensure_future(consume())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    engine.resume()
    assert engine.stop(drain=True)
    assert engine.get_stats()["requests_finished"] == {"aborted": 1}


def test_a_stream_needs_a_loop_that_goes_on(model):
    engine = RolloutEngine(model)
    engine.start()
    stopped = threading.Event()

    def stopping(event: TaskEvent) -> None:
        engine.stop()
        stopped.set()

    engine.add_task([5], max_tokens=2, seed=0, callback=stopping)
    assert stopped.wait(60)

    async def stream() -> None:
        async for _ in engine.stream([5]):
            pass

    with pytest.raises(RuntimeError, match=r"call engine\.start\(\) first"):
        asyncio.run(stream())
    assert engine.stop()


def test_scores_of_a_prompt_that_was_not_computed_are_not_invented(model):
    """An aborted task tells the log-probs it has: none before its first step."""
    engine = RolloutEngine(model)
    heard = Listener()
    task = engine.add_task([5, 6, 7], max_tokens=3, prompt_logprobs=1, callback=heard)
    engine.cancel_task(task)
    rollout = heard.events[-1].rollout
    assert rollout is not None
    assert rollout.prompt_logprobs == rollout.prompt_top_logprobs == [None, None, None]


def test_tasks_wait_for_the_loop(model):
    engine = RolloutEngine(model)
    heard = Listener()
    engine.add_task([5], max_tokens=3, seed=0, ignore_eos=True, callback=heard)
    assert not heard.events and engine.get_stats()["requests_waiting"] == 1
    engine.start()
    assert heard.done.wait(60) and len(heard.tokens()) == 3
    assert engine.stop()


def test_async_iterator(engine):
    """All events in order; several streams at once; leaving early cancels."""

    async def collect(prompt: list[int], limit: int) -> list[TaskEvent]:
        events = []
        stream = engine.stream(prompt, SamplingParams(max_tokens=20, seed=4, ignore_eos=True))
        async for event in stream:
            events.append(event)
            if len(events) == limit:
                await stream.aclose()
                break
        return events

    async def both() -> list[list[TaskEvent]]:
        return list(await asyncio.gather(collect([5, 6], 100), collect([7], 3)))

    whole, cut = asyncio.run(both())
    assert len(whole) == 20 and whole[-1].finished and whole[-1].rollout is not None
    assert [t for e in whole for t in e.token_ids] == whole[-1].rollout.token_ids
    assert len(cut) == 3 and not cut[-1].finished
    assert engine.get_stats()["requests_running"] == 0


def test_wrong_use_is_named(model):
    engine = RolloutEngine(model)
    with pytest.raises(TypeError, match="callback must be callable, got NoneType"):
        engine.add_task([5], callback=None)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.add_task("text", callback=print)
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        engine.add_task([5], callback=print, max_token=3)

    async def stream() -> None:
        async for _ in engine.stream([5]):
            pass

    with pytest.raises(RuntimeError, match=r"call engine\.start\(\) first"):
        asyncio.run(stream())
    assert EOS in engine.eos_token_ids and engine.get_stats()["requests_waiting"] == 0
