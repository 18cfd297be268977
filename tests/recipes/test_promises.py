"""The report's table of promises: exact, and honest about what was not measured."""

import pytest

from recipes.promises import check_promises

GOOD = {
    "publication/bytes_copied": 0.0,
    "sampling/importance_sampling_ratio/max": 1.0,
    "sampling/importance_sampling_ratio/min": 1.0,
    "sampling/sampling_logp_difference/max": 0.0,
    "rollout/version_spans_max": 1.0,
}


def test_all_hold():
    checks = check_promises([GOOD | {"rollout/policy_version": v} for v in (0, 1, 2)])
    assert [check.holds for check in checks] == [True] * 5
    assert checks[3].measured == "0 to 2 over 3 steps"


@pytest.mark.parametrize(
    ("row", "change", "measured"),
    [
        (0, {"publication/bytes_copied": 4096.0}, "4,096"),
        (1, {"sampling/importance_sampling_ratio/max": 1.25}, "0.25"),
        (1, {"sampling/importance_sampling_ratio/min": 0.5}, "0.5"),
        (1, {"sampling/importance_sampling_ratio/max": float("nan")}, "inf"),
        (2, {"sampling/sampling_logp_difference/max": 1e-7}, "1e-07"),
        (3, {"rollout/policy_version": 1.0}, "1 to 1 over 2 steps"),
        (4, {"rollout/version_spans_max": 2.0}, "2"),
    ],
)
def test_one_bad_step_is_enough(row, change, measured):
    first, second = (GOOD | {"rollout/policy_version": v} for v in (1, 2))
    checks = check_promises([first, second | change])
    assert [check.holds for check in checks] == [i != row for i in range(5)]
    assert checks[row].measured == measured


def test_nothing_measured_is_said():
    for history in ([], [{"reward": 1.0}]):
        checks = check_promises(history)
        assert [check.holds for check in checks] == [None] * 5
        assert all(check.measured == "not measured" for check in checks)
