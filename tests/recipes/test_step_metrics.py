"""Numbers of a step from its batch and its engines."""

import time

import numpy as np

from recipes.step_metrics import StepClock, engine_metrics, version_metrics
from rollout import Rollout, RolloutBatch, VersionSpan


def rollout(spans):
    length = spans[-1].end if spans else 0
    numbers = [0.0] * length
    return Rollout(
        0, 0, [1], [2] * length, numbers, numbers, tuple(spans), "stop", 2, None, None, 0, 1.0
    )


def test_versions_of_a_batch():
    spans = [[VersionSpan(4, 0, 2)], [VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)]]
    batch = RolloutBatch.from_rollouts([rollout(s) for s in spans])
    assert version_metrics(batch) == {
        "rollout/policy_version": 5.0,
        "rollout/version_spans_max": 2.0,
    }
    assert version_metrics(RolloutBatch.from_rollouts([rollout([])])) == {}


def test_engine_counters_are_added_up():
    stats = [
        {"prefix_query_tokens": 100, "prefix_hit_tokens": 75, "preemptions": 1},
        {"prefix_query_tokens": 100, "prefix_hit_tokens": 25, "preemptions": 2},
    ]
    assert engine_metrics(stats) == {"rollout/prefix_hit_rate": 0.5, "rollout/preemptions": 3.0}
    assert engine_metrics([])["rollout/prefix_hit_rate"] == 0.0


def test_laps_add_up_to_the_step():
    clock = StepClock()
    for name in ("rollout", "reward", "rollout", "update"):
        time.sleep(0.001)
        clock.lap(name)
    laps = [clock.seconds(name) for name in ("rollout", "reward", "update")]
    assert laps[0] > 0.002 and min(laps) > 0.001
    metrics = clock.metrics()
    assert metrics["timing_s/rollout"] == laps[0]
    np.testing.assert_allclose(metrics["timing_s/step"], sum(laps))
    assert metrics["step_time"] == metrics["timing_s/step"]
