"""The life cycle of the serving loop, and what it shares the scheduler with."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollout import EngineReleased, RolloutEngine
from tests.models import tiny_model
from tests.rollout.test_tasks import Listener


@pytest.fixture(scope="module")
def model():
    return tiny_model()


class SlowForward:
    """While on, every forward says that it has begun and waits to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: object) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        forward = type(model).forward

        def slow(this, *arguments):
            self.begun.set()
            assert self.go.wait(60)
            return forward(this, *arguments)

        monkeypatch.setattr(type(model), "forward", slow)


def test_start_waits_for_an_update(model):
    """W4: a loop does not come up in the midst of a mutation."""
    engine = RolloutEngine(model)
    inside, leave, started = threading.Event(), threading.Event(), threading.Event()

    def update() -> None:
        inside.set()
        leave.wait(60)

    def start() -> None:
        engine.start()
        started.set()

    updater = threading.Thread(target=lambda: engine.apply_weight_update(None, update))
    updater.start()
    assert inside.wait(60)
    starter = threading.Thread(target=start)
    starter.start()
    assert not started.wait(0.3)
    leave.set()
    assert started.wait(60)
    updater.join(60)
    starter.join(60)
    assert engine.stop() and engine.policy_version == 1


def test_stop_never_abandons_a_live_loop(model, monkeypatch):
    """W4: with a forward that takes its time stop() says False, keeps the KV, start() is refused;
    later the loop is gone, its tasks end, and a new loop serves."""
    engine = RolloutEngine(model)
    slow = SlowForward(monkeypatch, model)
    engine.start()
    with pytest.raises(RuntimeError, match="runs already"):
        engine.start()
    heard = Listener()
    engine.add_task([5, 6], max_tokens=50, seed=0, ignore_eos=True, callback=heard)
    assert slow.begun.wait(60)
    assert engine.stop(timeout_s=0.1) is False
    assert engine.get_stats()["kv_blocks_used"] > 0 and not heard.events
    with pytest.raises(RuntimeError, match="has not drained yet"):
        engine.start()
    slow.go.set()
    assert engine.stop() is True
    last = heard.events[-1]
    assert last.finished and last.rollout is not None and last.rollout.finish_reason == "aborted"
    assert engine.get_stats()["kv_blocks_used"] == 0
    engine.start()
    again = Listener()
    engine.add_task([5, 6], max_tokens=3, seed=0, ignore_eos=True, callback=again)
    assert again.done.wait(60)
    assert engine.stop() and engine.stop()


def test_an_old_stop_does_not_clean_up_a_new_loop(model, monkeypatch):
    """Two stops wait for one loop; by the time the second wakes, another loop has tasks."""
    engine = RolloutEngine(model)
    engine.start()
    old = engine._serving._loop
    heard = Listener()
    results: list[bool] = []
    join, restarted = old.join, threading.Event()

    def late_join(timeout_s: float | None) -> bool:
        ended = join(timeout_s)
        assert restarted.wait(60)
        return ended

    monkeypatch.setattr(old, "join", late_join)
    stopper = threading.Thread(target=lambda: results.append(engine.stop()))
    stopper.start()
    while old.alive:
        time.sleep(0.01)
    engine.start()
    engine.pause()
    engine.add_task([5], max_tokens=3, seed=0, ignore_eos=True, callback=heard)
    restarted.set()
    stopper.join(60)
    assert results == [True] and not heard.events
    engine.resume()
    assert heard.done.wait(60) and len(heard.tokens()) == 3
    assert engine.stop()


def test_stop_with_drain_computes_what_is_queued(model):
    engine = RolloutEngine(model, max_batch_size=2)
    heard = [Listener() for _ in range(5)]
    for index, listener in enumerate(heard):
        engine.add_task([5 + index], max_tokens=7, seed=0, ignore_eos=True, callback=listener)
    engine.start()
    assert engine.stop(drain=True)
    assert all(len(listener.tokens()) == 7 for listener in heard)


def test_stop_from_a_callback_is_answered(model):
    """The loop cannot wait for itself: False, and it ends after the step."""
    engine = RolloutEngine(model)
    answers: list[bool] = []

    def stopping(event: object) -> None:
        answers.append(engine.stop())

    engine.add_task([5], max_tokens=50, seed=0, ignore_eos=True, callback=stopping)
    engine.start()
    while not answers:
        time.sleep(0.01)
    assert answers[0] is False
    assert engine.stop()


def test_batches_and_tasks_share_one_scheduler(model):
    """A batch beside the loop: same tokens, and the task gets its own."""
    prompts = [[5, 6], [7], [8, 9, 10]]
    expected = RolloutEngine(model).run_batch(prompts, max_tokens=10, seed=0)
    engine = RolloutEngine(model, max_batch_size=2)
    engine.start()
    heard = Listener()
    engine.add_task([5, 6], max_tokens=10, seed=0, callback=heard)
    for _ in range(3):
        assert engine.run_batch(prompts, max_tokens=10, seed=0) == expected
    assert heard.done.wait(60) and heard.tokens() == expected[0]
    assert engine.stop()


def test_a_failing_step_ends_the_tasks_and_the_loop_goes_on(model, monkeypatch):
    engine = RolloutEngine(model)
    engine.start()
    with monkeypatch.context() as patch:

        def failing(*arguments: object) -> None:
            raise MemoryError("device")

        patch.setattr(type(model), "forward", failing)
        heard = Listener()
        engine.add_task([5], max_tokens=3, seed=0, callback=heard)
        assert heard.done.wait(60)
    rollout = heard.events[-1].rollout
    assert rollout is not None
    assert (rollout.finish_reason, rollout.error_reason) == ("error", "step_failed")
    assert rollout.error_message == "MemoryError: device"
    again = Listener()
    engine.add_task([5], max_tokens=3, seed=0, ignore_eos=True, callback=again)
    assert again.done.wait(60) and len(again.tokens()) == 3
    assert engine.stop()
    engine.check_integrity()


def test_pause_holds_batches_and_tasks(model):
    """No step while paused; an update goes through; after resume everything is as it would be."""
    engine = RolloutEngine(model)
    engine.pause()
    steps = engine.get_stats()["steps"]
    found: list[list[list[int]]] = []
    runner = threading.Thread(
        target=lambda: found.append(engine.run_batch([[5, 6]], max_tokens=6, seed=0))
    )
    runner.start()
    runner.join(0.3)
    assert runner.is_alive() and engine.get_stats()["steps"] == steps
    engine.apply_weight_update(None, lambda: None, in_flight="recompute")
    engine.resume()
    runner.join(60)
    assert found == [RolloutEngine(model).run_batch([[5, 6]], max_tokens=6, seed=0)]


def test_a_paused_batch_can_be_aborted(model):
    engine = RolloutEngine(model)
    engine.pause()
    found: list[object] = []
    runner = threading.Thread(
        target=lambda: found.extend(
            engine.run_batch([[5, 6]], max_tokens=6, seed=0, return_details=True)
        )
    )
    runner.start()
    while not engine.get_stats()["requests_waiting"]:
        time.sleep(0.01)
    engine.apply_weight_update(None, lambda: None, in_flight="abort")
    runner.join(60)
    assert [r.finish_reason for r in found] == ["aborted"]


def test_an_interrupt_in_the_midst_of_a_commit(model, monkeypatch):
    """Ctrl-C where a step's results are taken in: nobody goes on from half a step, no KV stays."""
    engine = RolloutEngine(model)
    engine.pause()
    heard = Listener()
    engine.add_task([7], max_tokens=9, seed=0, ignore_eos=True, callback=heard)
    engine.resume()
    finish_all = engine._scheduler._finish_all
    with monkeypatch.context() as patch:

        def interrupted(requests: object) -> None:
            patch.setattr(engine._scheduler, "_finish_all", finish_all)
            raise KeyboardInterrupt

        patch.setattr(engine._scheduler, "_finish_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.run_batch([[5, 6]], max_tokens=9, seed=0)
    rollout = heard.events[-1].rollout
    assert rollout is not None and rollout.error_reason == "step_interrupted"
    assert len(rollout.logprobs) == len(rollout.token_ids) == rollout.version_spans[-1].end
    engine.check_integrity()
    assert engine.get_stats()["kv_blocks_used"] == 0
    assert engine.run_batch([[5, 6]], max_tokens=9, seed=0) == RolloutEngine(model).run_batch(
        [[5, 6]], max_tokens=9, seed=0
    )


def test_a_released_engine_does_not_start(model):
    engine = RolloutEngine(model)
    engine.release()
    with pytest.raises(EngineReleased, match=r"restore\(\)"):
        engine.start()


def test_a_loop_that_was_not_waited_for_ends_its_tasks(model, monkeypatch):
    """After stop() said False the tasks still get their last event, with nobody asking again."""
    engine = RolloutEngine(model)
    slow = SlowForward(monkeypatch, model)
    engine.start()
    heard = Listener()
    engine.add_task([5, 6], max_tokens=50, seed=0, ignore_eos=True, callback=heard)
    assert slow.begun.wait(60)
    assert engine.stop(timeout_s=0.0) is False
    slow.go.set()
    assert heard.done.wait(60)
    rollout = heard.events[-1].rollout
    assert rollout is not None and rollout.finish_reason == "aborted"


def test_a_process_may_end_while_the_loop_computes():
    """Exit code 0, not a crash of the interpreter under a running step."""
    script = (
        "from rollout import RolloutEngine\n"
        "from tests.models import tiny_model\n"
        "engine = RolloutEngine(tiny_model())\n"
        "engine.start()\n"
        "engine.add_task([5], n=8, max_tokens=250, ignore_eos=True, callback=lambda e: None)\n"
    )
    root = Path(__file__).parents[2]
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
