"""Giving the KV memory back between phases, and taking it again."""

from __future__ import annotations

import sys

import pytest

from rollout import EngineReleased, RolloutEngine
from tests.memory import own_memory
from tests.models import tiny_model
from tests.rollout.test_engine import bits, nudge, random_prompts, rollouts
from tests.rollout.test_tasks import Listener


def test_output_is_the_same_after_a_cycle():
    """W9, W11: rope tables, weights and everything else that is not KV stays."""
    model = tiny_model()
    engine = RolloutEngine(model)
    prompts = random_prompts(4)
    before = bits(rollouts(engine, prompts, n=2, max_tokens=12, seed=0))
    engine.release()
    engine.release()
    assert engine.get_stats()["kv_released"] and engine.get_stats()["kv_blocks_cached"] == 0
    engine.restore()
    engine.restore()
    assert not engine.get_stats()["kv_released"]
    hits = engine.get_stats()["prefix_hit_tokens"]
    assert bits(rollouts(engine, prompts[:1], max_tokens=12, seed=0)) == before[:1]
    assert engine.get_stats()["prefix_hit_tokens"] == hits, "a prefix survived its memory"
    assert bits(rollouts(engine, prompts, n=2, max_tokens=12, seed=0)) == before


def test_every_call_meanwhile_says_what_to_do():
    """W11: rollouts and tasks are refused with the way out; updates, snapshots, stats work."""
    model = tiny_model()
    engine = RolloutEngine(model)
    engine.release()
    with pytest.raises(EngineReleased, match=r"call engine\.restore\(\)"):
        engine.run_batch([[5]], max_tokens=2)
    with pytest.raises(EngineReleased, match=r"call engine\.restore\(\)"):
        engine.add_task([5], callback=print)
    engine.apply_weight_update(None, lambda: nudge(model))
    assert engine.with_policy_snapshot(lambda version: version) == 1
    assert engine.get_stats()["requests_waiting"] == 0
    engine.check_integrity()
    engine.restore()
    warm = rollouts(engine, [[5, 6]], max_tokens=8, seed=0)
    assert bits(warm) == bits(rollouts(RolloutEngine(model), [[5, 6]], max_tokens=8, seed=0))


def test_work_in_flight():
    """Refused by default; `recompute` lets running tasks wait for restore, with the same tokens."""
    model = tiny_model()
    expected = RolloutEngine(model).run_batch([[5, 6]], max_tokens=40, seed=0, ignore_eos=True)
    engine = RolloutEngine(model)
    heard = Listener()
    engine.add_task([5, 6], max_tokens=40, seed=0, ignore_eos=True, callback=heard)
    for _ in range(10):
        engine._core.step()
    with pytest.raises(RuntimeError, match="cannot release the KV memory: 1 requests run"):
        engine.release()
    with pytest.raises(ValueError, match="'keep'"):
        engine.release(in_flight="keep")
    engine.release(in_flight="recompute")
    assert engine.get_stats()["requests_waiting"] == 1 and len(heard.tokens()) == 10
    assert engine._core.step() is False
    engine.restore()
    engine.start()
    assert heard.done.wait(60) and engine.stop()
    assert [heard.tokens()] == expected


@pytest.mark.parametrize("in_flight", ["drain", "abort"])
def test_release_settles_what_is_queued(in_flight):
    engine = RolloutEngine(tiny_model())
    heard = Listener()
    engine.add_task([5], max_tokens=9, seed=0, ignore_eos=True, callback=heard)
    engine._core.step()
    engine.release(in_flight=in_flight)
    rollout = heard.events[-1].rollout
    assert rollout is not None
    wanted = ("length", 9) if in_flight == "drain" else ("aborted", 1)
    assert (rollout.finish_reason, len(rollout.token_ids)) == wanted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_memory_goes_back_to_the_system_and_does_not_grow():
    """W10, W11: 20 cycles over 64 MB of KV, all written; the control is what it was before."""
    engine = RolloutEngine(tiny_model(), kv_cache_bytes=64 << 20)
    prompts = random_prompts(4)

    def fill() -> list[object]:
        for pages in engine._core._storage.pages:
            pages.fill_(1.0)
        return bits(rollouts(engine, prompts, max_tokens=6, seed=0))

    expected = fill()
    full = own_memory()
    engine.release()
    empty = own_memory()
    assert full - empty > 58 << 20
    for _ in range(20):
        engine.restore()
        assert fill() == expected
        engine.release()
    assert own_memory() - empty < 6 << 20
