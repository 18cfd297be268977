"""Rewards: checked (R3), masked by finish reason (R4), summed."""

import numpy as np
import pytest

from recipes.rewards import RewardError, score_completions, teaching_samples
from recipes.step_metrics import completion_metrics, reward_metrics

PROMPTS, COMPLETIONS = ["p", "p", "q"], ["a", "bb", "ccc"]
ROWS = [{"answer": "a"}, {"answer": "a"}, {"answer": "c"}]
STOP = ["stop"] * 3


def length(prompts, completions, rows):
    return [float(len(completion)) for completion in completions]


def starts_right(prompts, completions, rows):
    return [float(c.startswith(r["answer"])) for c, r in zip(completions, rows, strict=True)]


def test_functions_add_up():
    table = score_completions(
        {"length": length, "right": starts_right}, PROMPTS, COMPLETIONS, ROWS, STOP
    )
    assert table.total == [2.0, 2.0, 4.0]
    metrics = table.metrics()
    assert metrics["rewards/length/mean"] == 2.0
    assert metrics["rewards/right/std"] == pytest.approx(np.std([1, 0, 1]))


def test_none_is_left_out():
    """Of one function: the other's reward stands. Of all: no reward."""
    def never_second(prompts, completions, rows):
        return [1.0, None, 1.0]

    functions = {"some": never_second}
    assert score_completions(functions, PROMPTS, COMPLETIONS, ROWS, STOP).total == [1.0, None, 1.0]
    functions["length"] = length
    assert score_completions(functions, PROMPTS, COMPLETIONS, ROWS, STOP).total == [2.0, 2.0, 4.0]


@pytest.mark.parametrize("reason", ["rejected", "error", "aborted"])
def test_unfinished_samples_are_not_scored(reason):
    """R4: the functions never see them; a truncated one is scored."""
    seen = []

    def spy(prompts, completions, rows):
        seen.extend(zip(prompts, completions, [row["answer"] for row in rows], strict=True))
        return [0.0] * len(completions)

    table = score_completions(
        {"spy": spy}, PROMPTS, COMPLETIONS, ROWS, ["length", reason, "stop"]
    )
    assert seen == [("p", "a", "a"), ("q", "ccc", "c")]
    assert table.total == [0.0, None, 0.0]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], r"'bad' returned 1 rewards for 3 completions"),
        ([0.0, float("nan"), 0.0], r"'bad': reward of sample 1 is nan"),
        ([0.0, 0.0, float("inf")], r"'bad': reward of sample 2 is inf"),
        ([0.0, "x", 0.0], r"'bad': reward of sample 1 must be a number or None, got 'x'"),
    ],
)
def test_broken_functions_are_named(rewards, message):
    """R3."""
    with pytest.raises(RewardError, match=message):
        score_completions({"bad": lambda p, c, r: rewards}, PROMPTS, COMPLETIONS, ROWS, STOP)


def test_mismatched_columns_are_refused():
    with pytest.raises(ValueError, match=r"prompts \(2\), completions \(3\)"):
        score_completions({"length": length}, PROMPTS[:2], COMPLETIONS, ROWS, STOP)


def test_finish_reasons_drive_the_mask():
    """R4."""
    reasons = ["stop", "length", "aborted", "rejected", "error"]
    assert teaching_samples(reasons, False).tolist() == [True, True, False, False, False]
    assert teaching_samples(reasons, True).tolist() == [True, False, False, False, False]


def test_reward_metrics():
    """R5: the zero-variance group is counted, and the missing reward."""
    functions = {"given": lambda p, c, r: [1.0, 1.0, 0.0, 1.0, None]}
    table = score_completions(functions, ["p"] * 5, ["c"] * 5, [{}] * 5, ["stop"] * 5)
    metrics = reward_metrics(table, np.array([0, 0, 1, 1, 1]))
    assert metrics["reward"] == 0.75
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward_std"] == pytest.approx(np.std([0, 1], ddof=1) / 2)
    assert metrics["rewards/unscored"] == 1


def test_completion_metrics():
    metrics = completion_metrics(
        np.array([4, 2, 0, 6]), ["length", "stop", "rejected", "length"], rollout_seconds=2.0
    )
    assert metrics["completions/mean_length"] == 3.0
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rollout/failed_ratio"] == 0.25
    assert metrics["rollout/tokens_per_second"] == 6.0
    assert metrics["num_tokens"] == 12.0
