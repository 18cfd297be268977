"""The report's table of promises: exact, and honest about what was not measured."""

import pytest

from recipes.promises import check_exactness, check_promises, check_weights
from rollout import Exactness
from rollout.exactness import ProbeResult
from trainer_bridge import WeightsEcho

GOOD = {
    "sampling/importance_sampling_ratio/max": 1.0,
    "sampling/importance_sampling_ratio/min": 1.0,
    "sampling/sampling_logp_difference/max": 0.0,
    "rollout/versions_behind": 0.0,
    "rollout/version_spans_max": 1.0,
    "publication/update_s": 0.001,
}


def test_all_hold():
    checks = check_promises([GOOD | {"rollout/policy_version": v} for v in (0, 1, 2)])
    assert [check.holds for check in checks] == [True] * 5
    assert checks[3].measured == "0 to 2 over 3 steps"


@pytest.mark.parametrize(
    ("row", "change", "measured"),
    [
        (0, {"sampling/importance_sampling_ratio/max": 1.25}, "0.25"),
        (0, {"sampling/importance_sampling_ratio/min": 0.5}, "0.5"),
        (0, {"sampling/importance_sampling_ratio/max": float("nan")}, "inf"),
        (1, {"sampling/sampling_logp_difference/max": 1e-7}, "1e-07"),
        (2, {"rollout/versions_behind": 1.0}, "1"),
        (3, {"rollout/policy_version": 1.0}, "1 to 1 over 2 steps"),
        (4, {"rollout/version_spans_max": 2.0}, "2"),
    ],
)
def test_one_bad_step_is_enough(row, change, measured):
    first, second = (GOOD | {"rollout/policy_version": v} for v in (1, 2))
    checks = check_promises([first, second | change])
    assert [check.holds for check in checks] == [i != row for i in range(5)]
    assert checks[row].measured == measured


def test_with_overlap_only_the_lag_is_promised():
    """One step's publications, here two, and no more; nothing is said of the ratio."""
    versions, behind = (4, 4, 6, 8), (0, 2, 2, 2)
    history = [
        {
            "rollout/policy_version": v, "rollout/versions_behind": b,
            "rollout/version_spans_max": 1, "publication/update_s": 0.001,
        }
        for v, b in zip(versions, behind, strict=True)
    ]
    checks = check_promises(history, overlap=True)
    assert [(check.measured, check.holds) for check in checks] == [
        ("2", True), ("4 to 8 over 4 steps", True), ("1", True),
    ]  # fmt: skip
    history[3]["rollout/versions_behind"] = 3
    assert [check.holds for check in check_promises(history, overlap=True)] == [False, True, True]
    assert [check.holds for check in check_promises(history)][2:4] == [False, False]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_version_may_stay_where_nothing_was_published(overlap):
    """Steps of a critic alone; with overlap an update is seen one step later."""
    versions = (4, 4, 4, 4, 5, 6) if overlap else (4, 4, 4, 5, 6)
    history = [GOOD | {"rollout/policy_version": v} for v in versions]
    for record in history[:2]:
        del record["publication/update_s"]
    rises = check_promises(history, overlap)[-2]
    assert rises.promise.startswith("policy version") and rises.holds
    history[1]["publication/update_s"] = 0.001
    assert check_promises(history, overlap)[-2].holds is False


def test_nothing_measured_is_said():
    for history in ([], [{"reward": 1.0}]):
        checks = check_promises(history)
        assert [check.holds for check in checks] == [None] * 5
        assert all(check.measured == "not measured" for check in checks)


def exactness(fingerprint="a", held=True):
    return Exactness(True, "", ProbeResult(held, "", 1000, 0.25, fingerprint))


def test_the_probes_of_all_processes_are_one_row():
    check = check_exactness({"trainer": exactness(), "rollout-0": exactness()})
    assert check.holds is True
    assert check.measured == "0 of 2,000 numbers differ in 2 processes (at most 0.25 s)"
    assert check_exactness({"trainer": exactness(), "rollout-0": exactness("b")}).holds is False


def test_a_mode_that_is_off_is_not_a_promise():
    off = Exactness(False, "switched off (exact=False)")
    check = check_exactness({"trainer": off, "rollout-0": off})
    assert check.holds is None and check.measured == "not promised: switched off (exact=False)"
    assert check_exactness({"trainer": exactness(), "rollout-0": off}).holds is None
    assert check_exactness({}).measured == "not measured"


def echo(version=7, memory="a", checksum="c"):
    return WeightsEcho(version, 12, memory, checksum)


def test_what_the_processes_read_is_one_row():
    check = check_weights({"trainer": echo(), "rollout-0": echo()})
    assert check.holds is True
    assert check.measured == "1 copy in 2 processes, version 7, 1 checksum"
    for other in (echo(memory="b"), echo(version=6), echo(checksum="d")):
        assert check_weights({"trainer": echo(), "rollout-0": other}).holds is False
    assert check_weights({}).holds is None


def test_several_nodes_have_a_copy_each():
    both = {"trainer": echo(), "rollout-0": echo(), "rollout-1": echo(memory="b")}
    check = check_weights(both, nodes=2)
    assert check.holds is True
    assert check.promise.startswith("one copy of the weights on each node")
    assert check.measured == "2 copies in 3 processes, version 7, 1 checksum"
    assert check_weights(both).holds is False
    assert check_weights({"trainer": echo(), "rollout-0": echo()}, nodes=2).holds is False
