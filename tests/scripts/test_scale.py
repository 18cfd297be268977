"""The simulated step: closed forms, and what must hold of any costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.scale import Costs, Job, rollout_seconds, scaled, simulate, table

COSTS = Costs(step_s=0.1, sequence_s=0.01, prefill_s=0.001, update_s=0.002, publish_s=0.5,
              mirror_s_per_gb=2.0, weights_gb=3.0, max_batch=4)  # fmt: skip
JOB = Job(groups=16, samples=4, prompt=10, mean=20, sigma=0.5, longest=100, gpus_per_node=4)


def test_equal_lengths_by_hand():
    prefill = 2 * 10 * 0.001
    assert rollout_seconds([7] * 3, 2, 10, COSTS) == pytest.approx(prefill + 7 * 0.13)
    assert rollout_seconds([7] * 8, 2, 10, COSTS) == pytest.approx(prefill + 14 * 0.14)
    # four run; one ends after 1 step and lets the fifth in, which runs with the three to step 3
    mixed = prefill + 1 * 0.14 + 2 * 0.14 + 3 * 0.11
    assert rollout_seconds([1, 3, 3, 3, 5], 2, 10, COSTS) == pytest.approx(mixed)
    assert rollout_seconds([], 0, 10, COSTS) == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_between_the_bounds_of_any_schedule(lengths, max_batch):
    """Every token costs its share; no step is fuller than the batch allows."""
    costs = Costs(step_s=0.1, sequence_s=0.01, prefill_s=0.0, max_batch=max_batch)
    seconds = rollout_seconds(lengths, 1, 1, costs)
    steps = max(max(lengths), -(-sum(lengths) // max_batch))
    assert seconds >= steps * 0.1 + sum(lengths) * 0.01 - 1e-9
    assert seconds <= sum(lengths) * (0.1 + 0.01) + 1e-9


def test_phases_add_up_or_overlap():
    one = simulate(1, JOB, COSTS, False, np.random.default_rng(0))
    assert one.step_s == pytest.approx(one.rollout_s + one.update_s + 0.5) and one.waiting == 0
    tokens = JOB.lengths(np.random.default_rng(0)).sum() + 16 * 10
    assert one.update_s == pytest.approx(0.002 * tokens)
    beside = simulate(3, JOB, COSTS, True, np.random.default_rng(0))
    two = simulate(2, JOB, COSTS, False, np.random.default_rng(0))
    assert beside.rollout_s == two.rollout_s, "the trainer's GPU samples nothing"
    assert beside.step_s == pytest.approx(max(beside.rollout_s, beside.update_s) + 0.5)
    far = simulate(5, JOB, COSTS, False, np.random.default_rng(0))
    assert far.publish_s == pytest.approx(0.5 + 6.0), "a second node has a mirror"


def test_more_gpus_sample_faster_and_the_trainer_is_the_limit():
    steps = scaled(JOB, COSTS, [1, 2, 4, 8, 16], overlap=False)
    rollouts = [step.rollout_s for step in steps]
    assert rollouts == sorted(rollouts, reverse=True) and steps[-1].waiting > steps[1].waiting
    assert len({step.update_s for step in steps}) == 1
    text = table(steps, JOB)
    assert text.count("\n| ") == 5 and "64 rollouts a step" in text
    assert "less than half of each GPU is used from" in text
    slow_update = scaled(JOB, Costs(update_s=1.0), [1, 2], overlap=False)
    assert "less than half of each GPU" not in table(slow_update[:1], JOB)
    assert slow_update[1].costliest == "update"
