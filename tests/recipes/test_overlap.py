"""`rollout.overlap`: one batch ahead, off-policy by exactly one step, and as reproducible."""

import numpy as np
import pytest
import tiny_run
from test_resume import OPTIONS, outcome, records

from recipes.rewards import RewardTable
from recipes.sampled_step import SampledStep
from recipes.step_metrics import StepClock
from rollout import RolloutBatch

OVERLAP = (*OPTIONS, "--rollout.overlap=true")


def steps_of(folder):
    return [record for record in records(folder) if "reward" in record]


def test_rollouts_are_one_step_behind_and_say_so(run_grpo):
    """Two publications a step: the first batch is on-policy, later ones are two versions behind."""
    code, folder = run_grpo(*OVERLAP)
    assert code == 0
    steps = steps_of(folder)
    assert [r["rollout/versions_behind"] for r in steps] == [0, 2, 2, 2]
    versions = [r["rollout/policy_version"] for r in steps]
    assert [version - versions[0] for version in versions] == [0, 0, 2, 4]
    assert [r["rollout/version_spans_max"] for r in steps] == [1] * 4
    ratios = [r["sampling/importance_sampling_ratio/max"] for r in steps]
    assert ratios[0] == 1 and all(ratio > 1 for ratio in ratios[1:])
    report = (folder / "report.md").read_text()
    assert "| 2 | one step's (overlap) | yes |" in report and "**NO**" not in report


def test_without_it_every_step_is_on_policy(run_grpo):
    """The control."""
    _, folder = run_grpo(*OPTIONS)
    assert [r["rollout/versions_behind"] for r in steps_of(folder)] == [0] * 4
    assert "publications between a rollout and its own step (most) | 0 | 0 | yes" in (
        folder / "report.md"
    ).read_text()


def test_prompts_and_noise_are_those_of_the_synchronous_run(run_grpo):
    """The first step, which is on-policy in both, is the same to the bit."""
    _, ahead = run_grpo(*OVERLAP, output="ahead")
    _, synchronous = run_grpo(*OPTIONS, output="synchronous")
    assert steps_of(ahead)[0] == steps_of(synchronous)[0]
    assert steps_of(ahead)[1] != steps_of(synchronous)[1]


_undisturbed: list[dict] = []


@pytest.fixture
def undisturbed(run_grpo):
    if not _undisturbed:
        code, folder = run_grpo(*OVERLAP, output="undisturbed")
        assert code == 0
        _undisturbed.append(outcome(folder))
    return _undisturbed[0]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (tiny_run.LocalPool, "run_batch", 3),
        (tiny_run.LocalPool, "run_batch", 5),
        (tiny_run.TrainerActor, "step", 4),
        (tiny_run.TrainerActor, "step", 6),
        (tiny_run.TrainerActor, "save_checkpoint", 2),
    ],
)
def test_interrupted_and_gone_on_with(
    run_grpo, undisturbed, interrupt, owner, method, call, after
):
    """R8: what was sampled under weights that are gone comes back from the checkpoint."""
    interrupt(owner, method, call, after=after)
    assert run_grpo(*OVERLAP)[0] == 1
    code, folder = run_grpo(*OVERLAP)
    assert code == 0
    assert outcome(folder) == undisturbed


def test_going_on_without_the_stored_rollouts_shows(
    run_grpo, undisturbed, interrupt, monkeypatch
):
    """The control of the above."""
    interrupt(tiny_run.TrainerActor, "step", 6)
    assert run_grpo(*OVERLAP)[0] == 1
    monkeypatch.setattr(SampledStep, "load", lambda folder: None)
    code, folder = run_grpo(*OVERLAP)
    assert code == 0
    assert outcome(folder)["weights"] != undisturbed["weights"]


def test_it_learns(run_grpo):
    _, folder = run_grpo(
        "--rollout.overlap=true", "--warm_start.steps=25", "--steps=40",
        "--rollout.prompts_per_step=16", "--rollout.group_size=8",
    )  # fmt: skip
    rewards = [record["reward"] for record in steps_of(folder)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3


def test_stored_rollouts_are_the_same(tmp_path):
    batch = RolloutBatch.from_demonstrations([[1, 2], [3]], [[4], [5, 6, 7]])
    rewards = RewardTable([None, 2.0], {"a": np.array([np.nan, 2.0])})
    step = SampledStep(batch, rewards, 7, {"reward": 0.25}, StepClock())
    assert SampledStep.load(tmp_path) is None
    step.save(tmp_path)
    found = SampledStep.load(tmp_path)
    assert list(found.batch) == list(batch) and found.metrics == step.metrics
    assert found.rewards.total == rewards.total
    assert [found.rewards.of_sample(i) for i in range(2)] == [{"a": None}, {"a": 2.0}]
    assert found.prompts_drawn == 7
    for name, column in batch.columns().items():
        assert type(found.batch.columns()[name]) is type(column), name
