"""DAPO's dynamic sampling, the overlong penalty and the parts a user brings, in the loop."""

import numpy as np
import pytest
import tiny_run
from test_resume import OPTIONS, outcome, records

from recipes.rewards import RewardTable

DAPO = (*OPTIONS, "--algorithm=dapo", "--algorithm.overlong_share=0")


def steps_of(folder):
    return [record for record in records(folder) if "reward" in record]


@pytest.fixture
def trained(monkeypatch):
    """Of each step, what reached the trainer: whether a group moves anything, and its prompt."""
    seen = []
    step = tiny_run.TrainerActor.step

    def spy(self, batch, advantages, *rest):
        if advantages is not None:  # not the warm start
            groups = [np.flatnonzero(batch.prompt_index == p) for p in range(batch.num_prompts)]
            starts = batch.offsets[:-1]
            moved = [bool(advantages[starts[group]].any()) for group in groups]
            prompts = [tuple(batch.prompt(p).tolist()) for p in range(batch.num_prompts)]
            seen.append((moved, prompts))
        return step(self, batch, advantages, *rest)

    monkeypatch.setattr(tiny_run.TrainerActor, "step", spy)
    return seen


def test_groups_that_teach_nothing_are_replaced(run_grpo, trained):
    """R10: every step trains on as many groups as were asked for, and each moves something."""
    code, folder = run_grpo(*DAPO)
    assert code == 0
    assert [len(moved) for moved, _ in trained] == [10] * 4
    assert all(all(moved) for moved, _ in trained)
    steps = steps_of(folder)
    assert max(record["rollout/sampling_rounds"] for record in steps) > 1
    assert any(record["frac_reward_zero_std"] > 0 for record in steps)  # of all that was sampled
    assert len(set(trained[0][1])) == 10


def test_without_it_they_reach_the_trainer(run_grpo, trained):
    """The control."""
    run_grpo(*OPTIONS)
    assert not all(all(moved) for moved, _ in trained)


def test_the_number_of_rounds_is_bounded(run_grpo, trained):
    """R10: the step goes on with the groups it has."""
    code, folder = run_grpo(*DAPO, "--algorithm.max_sampling_rounds=1")
    assert code == 0
    assert [r["rollout/sampling_rounds"] for r in steps_of(folder)] == [1] * 4
    assert all(all(moved) for moved, _ in trained)
    assert 0 < min(len(moved) for moved, _ in trained) < 10


def test_nothing_to_learn_from_is_said(run_grpo, monkeypatch, capsys):
    monkeypatch.setattr(tiny_run, "repeats", lambda p, completions, r: [0.1] * len(completions))
    code, _ = run_grpo(*DAPO, "--algorithm.max_sampling_rounds=3")
    assert code == 1
    said = capsys.readouterr().err
    assert "step 1: in each of the 30 groups sampled, all rewards were equal" in said


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (tiny_run.LocalPool, "run_batch", 3),
        (tiny_run.LocalPool, "run_batch", 6),
        (tiny_run.TrainerActor, "step", 5),
        (tiny_run.TrainerActor, "save_checkpoint", 2),
    ],
)
def test_gone_on_with_it_draws_the_prompts_it_would_have_drawn(
    run_grpo, interrupt, overlap, owner, method, call
):
    """R8: how many were drawn depends on what was sampled, and is part of the checkpoint."""
    options = (*DAPO, f"--rollout.overlap={overlap}")
    _, folder = run_grpo(*options, output="undisturbed")
    rounds = [record["rollout/sampling_rounds"] for record in steps_of(folder)]
    assert max(rounds) > 1
    interrupt(owner, method, call)
    code, _ = run_grpo(*options, output="interrupted")
    assert code == 1
    code, resumed = run_grpo(*options, output="interrupted")
    assert code == 0
    assert outcome(resumed) == outcome(folder)


def test_a_completion_loses_reward_near_the_limit(run_grpo, monkeypatch):
    """The penalty goes into the advantages; the reported reward stays the task's own."""
    given = []
    concat = RewardTable.concat
    monkeypatch.setattr(
        RewardTable, "concat", staticmethod(lambda t: given.append(concat(t)) or given[-1])
    )
    _, plain = run_grpo("--steps=1", output="plain")
    _, shaped = run_grpo("--steps=1", "--algorithm.overlong_share=1", output="shaped")
    assert given[0].total == given[1].total
    before, after = steps_of(plain)[0], steps_of(shaped)[0]
    assert before["reward"] == after["reward"]
    assert before["rewards/overlong_penalty"] == 0 > after["rewards/overlong_penalty"]
    mean_length = after["completions/mean_length"]
    assert after["rewards/overlong_penalty"] == pytest.approx(-mean_length / 3)
    assert before["actor/grad_norm"] != after["actor/grad_norm"]


def likes_a(prompts, completions, rows):
    return [float("a" in completion) for completion in completions]


def upside_down(rewards, group_index, lengths):
    return -np.repeat(np.asarray(rewards, np.float32) - np.float32(0.5), lengths)


def test_functions_of_the_user_from_the_command_line(run_grpo):
    """Rewards instead of the task's, and an advantage per token instead of the preset's."""
    here = "test_dynamic_sampling"
    options = (f'--task.rewards=["{here}:likes_a"]', "--steps=30", "--rollout.group_size=8")
    _, folder = run_grpo(*options, output="liked")
    _, disliked = run_grpo(*options, f"--algorithm.advantages={here}:upside_down", output="not")
    assert "rewards/likes_a/mean" in steps_of(folder)[0]
    liked, avoided = ([r["reward"] for r in steps_of(f)] for f in (folder, disliked))
    assert liked[0] == avoided[0]
    assert np.mean(liked[-5:]) > np.mean(avoided[-5:]) + 0.4
