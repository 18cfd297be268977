"""A batch that is computed by one thread while another takes what has ended."""

from __future__ import annotations

import threading

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.request import prompt_tasks
from tests.models import tiny_model

PROMPTS = [[5, 6, 7], [9] * 20, [30, 2], [8]]
LENGTHS = [1, 30, 5, 60]


@pytest.fixture(scope="module")
def engine():
    return RolloutEngine(tiny_model(), max_batch_size=4)


def tasks(n=2):
    params = [SamplingParams(n=n, max_tokens=k, ignore_eos=True, seed=3) for k in LENGTHS]
    return prompt_tasks(PROMPTS, params, run_seed=0, first_uid=0)


def test_parts_are_whole_prompts_and_together_the_batch(engine):
    """Nothing is lost and nothing doubled, however often it is asked."""
    expected = engine.run_tasks(tasks())
    batch = engine.open_batch(tasks())
    assert batch.take_finished() == []
    worker = threading.Thread(target=batch.compute)
    worker.start()
    parts = []
    while worker.is_alive():
        if part := batch.take_finished():
            parts.append(part)
    worker.join()
    parts.append(batch.take_rest())
    assert len(parts) > 1, "nothing came before the end"
    for part in parts:
        counts = {index: [r.prompt_index for r in part].count(index) for index in range(4)}
        assert set(counts.values()) <= {0, 2}
    found = sorted((r for part in parts for r in part), key=lambda r: r.prompt_index)
    assert found == expected
    assert batch.take_rest() == []


def test_an_aborted_batch_has_no_early_results(engine):
    batch = engine.open_batch(tasks())
    batch.abort()
    assert batch.take_finished() == []
    batch.compute()
    assert [r.finish_reason for r in batch.take_rest()] == ["aborted"] * 8
    engine.check_integrity()


def test_a_batch_that_raises_gives_out_only_what_had_ended(engine, monkeypatch):
    """The abort that frees its memory must not look like results."""
    steps = []
    execute = engine._core._runner.execute

    def breaks(plan, running):
        steps.append(plan)
        if len(steps) == 10:
            raise ArithmeticError("a kernel broke")
        return execute(plan, running)

    monkeypatch.setattr(engine._core._runner, "execute", breaks)
    batch = engine.open_batch(tasks())
    with pytest.raises(ArithmeticError):
        batch.compute()
    assert {r.prompt_index for r in batch.take_finished()} == {0, 2}
    assert {r.finish_reason for r in batch.take_rest()} == {"aborted"}
