"""Conversations in the loop: trained on, evaluated, resumed, shown."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import tiny_run
from test_ppo import lessons  # noqa: F401
from test_resume import OPTIONS, outcome, records

from recipes.algorithms import gae
from recipes.environment import Done, Observation

TALKS = ("--task.name=test_conversations:load", "--rollout.max_tokens=12")


class Dictation:
    """Says two letters more, one at a time; earns 1 for a last turn that begins with the last."""

    def reset(self, row):
        self._left = [row["letter"], "a"]
        return row["prompt"]

    def step(self, token_ids, text):
        if not self._left:
            return Done(float(text.startswith(self._last)))
        self._last = self._left.pop()
        return Observation(f"{self._last}=", reward=0.0)


@dataclass(frozen=True)
class DictationTask(tiny_run.RepeatTask):
    rewards: dict = field(default_factory=dict)

    def environment(self):
        return Dictation()

    def demonstrations(self, num_samples, seed):
        for prompt, letter in super().demonstrations(num_samples, seed):
            yield prompt, [letter, "a=", "a", f"{letter}=", letter]


def load(config, seed):
    return DictationTask()


def steps_of(folder):
    return [record for record in records(folder) if "reward" in record]


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "ppo"])
def test_it_learns(run_grpo, algorithm):
    """The warm start imitates what the policy says, not what it is told; every step is on-policy
    to the bit; the report says so; samples show the whole conversation."""
    code, folder = run_grpo(
        *TALKS, "--warm_start.steps=25", "--steps=40", f"--algorithm={algorithm}",
        "--critic.learning_rate=3e-3", "--rollout.prompts_per_step=16", "--rollout.group_size=8",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(folder)
    rewards = [record["reward"] for record in steps]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    assert steps[-1]["rollout/turns_mean"] == pytest.approx(3, abs=0.2)
    assert steps[-1]["rollout/turns_max"] == 3
    assert "rewards/environment/mean" in steps[0]
    report = (folder / "report.md").read_text()
    assert report.count("| yes |") == 7 and "**NO**" not in report
    heldout = [r["heldout/reward"] for r in records(folder) if "heldout/reward" in r]
    assert heldout[-1] > heldout[0] + 0.3
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for sample in (sample for sample in samples if sample["reward"] == 1):
        said = sum(end - start for _, start, end in sample["versions"])
        assert len(sample["versions"]) == 3 and said == sample["num_tokens"] - 4
        assert "a=" in sample["completion"]


def test_a_lesson_passes_over_what_was_heard(run_grpo, lessons):  # noqa: F811
    """PPO: values, advantages and returns of the chosen tokens are those of GAE on them alone."""
    run_grpo(*TALKS, "--algorithm=ppo", "--critic.learning_rate=3e-3", "--ppo.lam=0.9",
             "--ppo.gamma=0.95", "--ppo.kl_coefficient=0.5", "--warm_start.steps=25")  # fmt: skip
    heard = 0
    for batch, advantages, _, columns in lessons:
        mask = batch.response_mask
        heard += int((~mask).sum())
        assert (advantages[~mask] == 0).all() and (columns.values[~mask] == 0).all()
        rewards = -0.5 * (batch.logprobs - columns.reference_logprobs)[mask].astype(np.float64)
        last = np.cumsum(batch.response_lengths) - 1
        told = columns.returns[mask][last] - rewards[last]  # the last return is its own reward
        assert np.allclose(told, np.round(told), atol=1e-5)
        rewards[last] += np.round(told)
        expected = gae(rewards, columns.values[mask], batch.response_lengths, gamma=0.95, lam=0.9)
        np.testing.assert_allclose(columns.returns[mask], expected.returns, rtol=1e-4, atol=1e-5)
        white = (expected.advantages - expected.advantages.mean()) / expected.advantages.std(ddof=1)
        np.testing.assert_allclose(advantages[mask], white, rtol=1e-3, atol=1e-4)
    assert heard > 100


@pytest.mark.parametrize(
    ("overlap", "owner", "method", "call"),
    [
        ("false", tiny_run.LocalPool, "run_batch", 9),
        ("false", tiny_run.TrainerActor, "step", 6),
        ("true", tiny_run.LocalPool, "run_batch", 14),
        ("true", tiny_run.TrainerActor, "save_checkpoint", 2),
    ],
)
def test_interrupted_and_gone_on_with(run_grpo, interrupt, overlap, owner, method, call):
    """R8, in the midst of conversations too."""
    options = (*OPTIONS, *TALKS, f"--rollout.overlap={overlap}")
    code, undisturbed = run_grpo(*options, output="undisturbed")
    assert code == 0
    interrupt(owner, method, call)
    assert run_grpo(*options, output="interrupted")[0] == 1
    code, resumed = run_grpo(*options, output="interrupted")
    assert code == 0
    assert outcome(resumed) == outcome(undisturbed)


def test_the_number_of_turns_is_bounded(run_grpo):
    _, folder = run_grpo(*TALKS, "--rollout.max_turns=2")
    for record in steps_of(folder):
        assert record["rollout/turns_max"] == 2 and record["reward"] == 0
        assert record["rollout/truncated_ratio"] == 1
