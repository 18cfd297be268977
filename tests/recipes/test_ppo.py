"""PPO in the loop: its lesson against independent sums, the critic's own steps, resumes."""

import numpy as np
import pytest
import tiny_run
from test_resume import OPTIONS, outcome, records

from recipes import loop, ppo
from recipes.algorithms.presets import PRESETS
from recipes.command_line import CONFIGS
from recipes.report import RunRecord

PPO = ("--algorithm=ppo", "--critic.learning_rate=3e-3")
STEERED = (
    *OPTIONS, *PPO, "--critic.warmup_steps=1", "--ppo.kl_coefficient=0.5",
    "--ppo.kl_target=0.001", "--ppo.kl_horizon=40", "--algorithm.ref_model_sync_steps=3",
)  # fmt: skip


def steps_of(folder):
    return [record for record in records(folder) if "reward" in record]


@pytest.fixture
def lessons(monkeypatch):
    """What each training step was given: batch, advantages, algorithm, columns."""
    seen = []
    step = tiny_run.TrainerActor.step

    def spy(self, batch, advantages, algorithm, columns=None, *rest):
        if advantages is not None:  # not the warm start
            seen.append((batch, advantages, algorithm, columns))
        return step(self, batch, advantages, algorithm, columns, *rest)

    monkeypatch.setattr(tiny_run.TrainerActor, "step", spy)
    return seen


def test_the_critic_has_steps_of_its_own(run_grpo):
    """It learns, nothing is published, and the promises of the report hold all the same."""
    code, folder = run_grpo(
        *PPO, "--steps=12", "--critic.warmup_steps=8", "--rollout.group_size=8",
        "--rollout.prompts_per_step=16",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(folder)
    assert [r["rollout/policy_version"] for r in steps] == [0] * 9 + [1, 2, 3]
    assert ["actor/pg_loss" in r for r in steps] == [False] * 8 + [True] * 4
    assert steps[0]["critic/values/mean"] == 0 and steps[0]["critic/vf_explained_var"] == 0
    assert steps[8]["critic/vf_loss"] < steps[0]["critic/vf_loss"]
    assert steps[0]["kl"] == 0 and steps[8]["kl"] == 0 < abs(steps[11]["kl"])
    for name in ("critic/returns/mean", "critic/vf_clipfrac", "critic/grad_norm", "kl_coefficient"):
        assert name in steps[0], name
    assert "actor/pg_clipfrac_lower" in steps[8]
    report = (folder / "report.md").read_text()
    assert report.count("| yes |") == 7 and "**NO**" not in report


def test_a_lesson_is_what_the_formulas_say(run_grpo, lessons, monkeypatch):
    """gamma = lambda = 1: a return is the sum of what comes, the rewards of all tokens before the
    last are the KL penalty alone, advantages are whitened. Half the rewards are None."""
    given = []

    def some(prompts, completions, rows):
        given.append([None if i % 2 else len(c) / 2 for i, c in enumerate(completions)])
        return given[-1]

    monkeypatch.setattr(tiny_run, "repeats", some)
    code, _ = run_grpo(*PPO, "--steps=2", "--ppo.kl_coefficient=0.5", "--evaluation.prompts=2")
    assert code == 0
    trained = [rewards for rewards in given if len(rewards) == 32]
    for step, (batch, advantages, _, columns) in enumerate(lessons):
        assert len(batch) == 16
        difference = batch.logprobs.astype(np.float64) - columns.reference_logprobs
        assert (difference == 0).all() == (step == 0)
        returns = []
        for i in range(len(batch)):
            rewards = -0.5 * difference[batch.offsets[i] : batch.offsets[i + 1]]
            rewards[-1] += trained[step][2 * i]
            returns.extend(np.cumsum(rewards[::-1])[::-1])
        np.testing.assert_allclose(columns.returns, returns, rtol=1e-5, atol=1e-6)
        expected = np.array(returns) - columns.values
        expected = (expected - expected.mean()) / expected.std(ddof=1)
        np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
        assert (columns.values == 0).all() == (step == 0)


def test_without_a_penalty_there_is_no_reference(run_grpo, lessons):
    _, folder = run_grpo(*PPO, "--ppo.kl_coefficient=0")
    assert all(columns.reference_logprobs is None for *_, columns in lessons)
    assert not any("kl" in record for record in steps_of(folder))


def test_the_reference_is_the_policy_after_the_warm_start(run_grpo):
    """The KL of the first step is 0 to the bit; of later ones it is not, unless the reference
    follows."""
    options = ("--warm_start.steps=3", "--algorithm.beta=0.1")
    _, stays = run_grpo(*options, output="stays")
    _, follows = run_grpo(*options, "--algorithm.ref_model_sync_steps=1", output="follows")
    kept, followed = ([r["kl"] for r in steps_of(f)] for f in (stays, follows))
    assert kept[0] == 0 < min(kept[1:])
    assert followed == [0, 0, 0]


def test_the_penalty_is_steered(run_grpo):
    """Downwards while the policy is nearer than the target, upwards when it is further away; by
    at most a fifth in `kl_horizon` rollouts."""
    _, near = run_grpo(*PPO, "--ppo.kl_target=9", "--ppo.kl_horizon=32", output="near")
    coefficients = [r["kl_coefficient"] for r in steps_of(near)]
    assert coefficients == pytest.approx([1e-3, 0.8e-3, 0.64e-3])
    _, fixed = run_grpo(*PPO, output="fixed")
    assert {r["kl_coefficient"] for r in steps_of(fixed)} == {1e-3}
    _, far = run_grpo(
        *PPO, "--ppo.kl_target=1e-9", "--ppo.kl_horizon=32", "--steps=5", output="far"
    )
    kls, coefficients = ([r[n] for r in steps_of(far)] for n in ("kl", "kl_coefficient"))
    for i, kl in enumerate(kls[:-1]):
        assert coefficients[i + 1] / coefficients[i] == pytest.approx(1.2 if kl > 0 else 0.8)


def test_the_penalty_is_steered_only_by_what_the_policy_learns(run_grpo, monkeypatch):
    """While the critic learns alone the KL is 0 by construction, and a step without any reward says
    nothing: both leave the coefficient as it is."""
    steered = ("--ppo.kl_target=9", "--ppo.kl_horizon=32", "--ppo.kl_coefficient=0.5")
    _, warm = run_grpo(*PPO, *steered, "--critic.warmup_steps=2", "--steps=5", output="warm")
    coefficients = [r["kl_coefficient"] for r in steps_of(warm)]
    assert coefficients == pytest.approx([0.5, 0.5, 0.5, 0.4, 0.32])
    calls = []

    def sometimes(prompts, completions, rows):
        calls.append(len(completions) == 32)
        third = calls[-1] and sum(calls) == 3
        return [None if third else float(len(c)) for c in completions]

    monkeypatch.setattr(tiny_run, "repeats", sometimes)
    _, gap = run_grpo(*PPO, *steered, "--steps=5", output="gap")
    coefficients = [r.get("kl_coefficient") for r in steps_of(gap)]
    assert coefficients == pytest.approx([0.5, 0.4, None, 0.32, 0.256])


def test_another_algorithm_under_this_name_is_refused(capsys):
    assert ppo.main(["--config", str(CONFIGS / "grpo_embedded.yaml")]) == 2
    said = capsys.readouterr().err
    assert "recipes.ppo is not the recipe of algorithm.name grpo: run python -m recipes.grp" in said


def test_a_reference_that_a_preset_brings_can_follow(run_grpo, monkeypatch):
    """No reference, nothing to sync: a preset from Python may have none, whatever the fields."""
    monkeypatch.setattr(loop, "configured_preset", lambda config: PRESETS["grpo"])
    code, _ = run_grpo("--algorithm.beta=0.1", "--algorithm.ref_model_sync_steps=1")
    assert code == 0


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_one_completion_per_prompt_is_enough(trunk, policy, tmp_path, monkeypatch):
    """From its own entry point; no alarm says that groups of one have no variance."""
    monkeypatch.setattr(loop, "Colocation", tiny_run.LocalColocation)
    output = tmp_path / "run"
    fixed = {
        "model": policy, "output": output, "task.name": "tiny_run:load", "steps": 40,
        "rollout.max_tokens": 3, "rollout.prompts_per_step": 128, "rollout.group_size": 1,
        "optimizer.learning_rate": 3e-3, "optimizer.lr_schedule": "constant",
        "warm_start.steps": 25, "logging.wandb": "disabled", "critic.trunk": trunk,
        "critic.learning_rate": 3e-3,
    }  # fmt: skip
    assert ppo.main([f"--{name}={value}" for name, value in fixed.items()]) == 0
    rewards = [record["reward"] for record in steps_of(output)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[5:10]) + 0.3
    assert "name: ppo_embedded" in (output / "config.yaml").read_text()


def test_nothing_to_learn_from_is_no_step(run_grpo, monkeypatch, lessons):
    monkeypatch.setattr(tiny_run, "repeats", lambda p, completions, r: [None] * len(completions))
    code, folder = run_grpo(*PPO)
    assert code == 0 and not lessons
    assert [r["rollout/policy_version"] for r in steps_of(folder)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("overlap", "owner", "method", "call"),
    [
        ("false", tiny_run.TrainerActor, "score_tokens", 3),
        ("false", tiny_run.TrainerActor, "step", 5),
        ("false", tiny_run.TrainerActor, "reset_from_policy", 1),
        ("false", tiny_run.TrainerActor, "reset_from_policy", 2),
        ("true", tiny_run.LocalPool, "run_batch", 6),
        ("true", tiny_run.TrainerActor, "score_tokens", 3),
        ("true", tiny_run.TrainerActor, "save_checkpoint", 2),
    ],
)
def test_interrupted_and_gone_on_with(run_grpo, interrupt, overlap, owner, method, call):
    """R8, with a steered penalty and a reference that follows: both are in the checkpoint."""
    options = (*STEERED, f"--rollout.overlap={overlap}")
    code, undisturbed = run_grpo(*options, output="undisturbed")
    assert code == 0
    interrupt(owner, method, call)
    assert run_grpo(*options, output="interrupted")[0] == 1
    code, resumed = run_grpo(*options, output="interrupted")
    assert code == 0
    assert outcome(resumed) == outcome(undisturbed)


def test_going_on_with_another_coefficient_shows(run_grpo, interrupt, monkeypatch):
    """The control of the above."""
    _, undisturbed = run_grpo(*STEERED, output="undisturbed")
    assert len({r["kl_coefficient"] for r in steps_of(undisturbed)}) == 3
    interrupt(tiny_run.TrainerActor, "step", 5)
    assert run_grpo(*STEERED, output="interrupted")[0] == 1
    restore = RunRecord.restore

    def forgetful(self, checkpoint):
        restore(self, checkpoint)
        self.carried = {}

    monkeypatch.setattr(RunRecord, "restore", forgetful)
    code, resumed = run_grpo(*STEERED, output="interrupted")
    assert code == 0
    assert outcome(resumed)["weights"] != outcome(undisturbed)["weights"]
