"""The loop, on the real trainer, gate and engine in this process."""

import json
import re
import signal
import threading

import numpy as np
import pytest
import tiny_run

from recipes import grpo
from recipes.algorithms import reinforce_pp_advantages
from recipes.algorithms.presets import PRESETS
from recipes.command_line import parse_config
from recipes.evaluation import evaluate
from recipes.sampling import token_advantages
from recipes.trainer_settings import trainer_config
from rollout import RolloutBatch, RolloutEngine, load_pretrained


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def training_records(folder):
    return [record for record in records(folder) if "reward" in record]


def without_times(record):
    timed = re.compile(r"timing_s|step_time|tokens_per_second|_s$")
    return {name: value for name, value in record.items() if not timed.search(name)}


def test_a_run_leaves_what_it_promises(run_grpo, capsys):
    code, folder = run_grpo("--evaluation.every=2", "--checkpoint.every=1", "--checkpoint.keep=2")
    assert code == 0
    assert capsys.readouterr().err == ""
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000003",
    ]
    report = (folder / "report.md").read_text()
    assert "3 of 3 steps" in report and "finished" in report
    assert report.count("| yes |") == 7 and "**NO**" not in report
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    evaluated = [record["step"] for record in records(folder) if "heldout/reward" in record]
    assert evaluated == [0, 2, 3]
    steps = training_records(folder)
    assert [record["rollout/policy_version"] for record in steps] == [0, 1, 2]
    for name in (
        "reward", "reward_std", "frac_reward_zero_std", "rewards/repeats/mean", "num_tokens",
        "completions/mean_length", "completions/clipped_ratio", "rollout/tokens_per_second",
        "rollout/prefix_hit_rate", "rollout/preemptions", "actor/pg_loss", "actor/pg_clipfrac",
        "actor/ppo_kl", "actor/grad_norm", "actor/lr", "entropy", "publication/wait_s",
        "timing_s/rollout", "timing_s/update", "timing_s/step",
    ):
        assert name in steps[0], name


def test_on_policy_is_exact_and_a_second_pass_is_not(run_grpo):
    """The first minibatch has ratio exactly 1; the control, a second pass over the batch, moves."""
    _, folder = run_grpo("--optimizer.num_iterations=2")
    for record in training_records(folder):
        assert record["sampling/importance_sampling_ratio/max"] == 1.0
        assert record["sampling/importance_sampling_ratio/min"] == 1.0
        assert record["sampling/sampling_logp_difference/max"] == 0.0
        assert record["actor/ppo_kl"] != 0.0


def test_equal_seeds_give_equal_runs(run_grpo):
    _, first = run_grpo(output="first")
    _, second = run_grpo(output="second")
    _, other = run_grpo("--seed=1", output="other")
    assert [without_times(r) for r in records(first)] == [without_times(r) for r in records(second)]
    assert [without_times(r) for r in records(first)] != [without_times(r) for r in records(other)]


@pytest.mark.parametrize("algorithm", PRESETS)
def test_it_learns(run_grpo, algorithm):
    """Warm start, then reinforcement: both raise the reward, the second on sampled prompts only."""
    _, folder = run_grpo(
        "--warm_start.steps=25",
        "--steps=40",
        f"--algorithm={algorithm}",
        "--critic.learning_rate=3e-3",  # of ppo alone
        "--rollout.prompts_per_step=16",
        "--rollout.group_size=8",
    )
    steps = training_records(folder)
    rewards = [record["reward"] for record in steps]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    supervised = [r for r in records(folder) if "warm_start/actor/pg_loss" in r]
    assert supervised[-1]["warm_start/actor/pg_loss"] < supervised[0]["warm_start/actor/pg_loss"]
    assert steps[0]["rollout/policy_version"] == 25


def test_all_rewards_equal_changes_nothing_and_is_no_nan(run_grpo, monkeypatch):
    """R12, R5: loss exactly 0, every group counted as zero-variance, weights untouched."""
    monkeypatch.setattr(tiny_run, "repeats", lambda p, completions, r: [0.1] * len(completions))
    code, folder = run_grpo()
    assert code == 0
    for record in training_records(folder):
        assert record["actor/pg_loss"] == 0.0 and record["actor/grad_norm"] == 0.0
        assert record["frac_reward_zero_std"] == 1.0
    assert all(value is not None for record in records(folder) for value in record.values())


def test_prompts_scored_one_by_one_earn_the_same(run_grpo, monkeypatch):
    """Beside the rollouts: on another thread, once per prompt, whatever the order they end in."""
    calls, repeats = [], tiny_run.repeats

    def watched(prompts, completions, rows):
        calls.append((threading.current_thread() is threading.main_thread(), {*prompts}))
        return repeats(prompts, completions, rows)

    monkeypatch.setattr(tiny_run, "repeats", watched)
    _, together = run_grpo("--evaluation.every=0", output="together")
    assert [len(prompts) for _, prompts in calls[1:-1]] == [8, 8, 8]  # the first and last evaluate
    calls.clear()
    _, apart = run_grpo("--task.score_each_prompt=true", "--evaluation.every=0", output="apart")
    assert [(here, len(prompts)) for here, prompts in calls[1:-1]] == [(False, 1)] * 24
    first, second = ([without_times(r) for r in records(folder)] for folder in (together, apart))
    assert first == second
    monkeypatch.setattr(tiny_run, "repeats", lambda p, c, r: [float("nan")] * len(c))
    assert run_grpo("--task.score_each_prompt=true", output="broken")[0] == 1


def test_what_has_no_reward_is_not_trained_on(run_grpo, monkeypatch):
    """Not with a weight of 0 either: it would count in the mean over tokens, and in the KL."""
    trained = []
    step = tiny_run.TrainerActor.step

    def spy(self, batch, *rest):
        trained.append(len(batch))
        return step(self, batch, *rest)

    monkeypatch.setattr(tiny_run.TrainerActor, "step", spy)
    monkeypatch.setattr(
        tiny_run, "repeats",
        lambda p, texts, r: [None if i % 4 == 3 else float(len(t)) for i, t in enumerate(texts)],
    )  # fmt: skip
    code, folder = run_grpo("--algorithm.beta=0.1")
    assert code == 0 and trained == [24] * 3
    assert {r["rewards/unscored"] for r in training_records(folder)} == {8}


def test_advantages_of_tokens_and_of_rollouts_are_told_apart():
    """As many rollouts as chosen tokens, one of them empty: shapes alone do not tell."""
    batch = RolloutBatch.from_demonstrations(
        [[5]] * 4, [[1, 2], [3, 9], [4], []], [[True, True], [True, False], [True], []]
    )
    assert batch.response_lengths.tolist() == [2, 1, 1, 0]
    rewards = [1.0, 2.0, 4.0, None]
    per_token = token_advantages(reinforce_pp_advantages, rewards, batch)
    expected = (np.array([1, 1, 2, 4]) - 2) / np.std([1, 1, 2, 4], ddof=1)
    np.testing.assert_allclose(per_token, [*expected[:3], 0, expected[3]], rtol=1e-6)

    def per_rollout(rewards, group_index, lengths):
        return np.array([1, 2, 3, 4], np.float32)

    assert token_advantages(per_rollout, rewards, batch).tolist() == [1, 1, 2, 0, 3]
    with pytest.raises(ValueError, match=r"shape \(3,\) for 4 rollouts of 5 tokens"):
        token_advantages(lambda *_: np.zeros(3, np.float32), rewards, batch)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_cleanly_with_a_checkpoint(run_grpo, monkeypatch, capsys, number, code):
    """F5."""
    run_batch = tiny_run.LocalPool.run_batch
    calls = []

    def interrupted(self, prompts, params):
        calls.append(params)
        if len(calls) == 4:  # the evaluation before, then the third training step
            signal.raise_signal(number)
        return run_batch(self, prompts, params)

    monkeypatch.setattr(tiny_run.LocalPool, "run_batch", interrupted)
    exit_code, folder = run_grpo("--steps=50")
    assert exit_code == code
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert json.loads((checkpoint / "lockstep_state.json").read_text())["step"] == 2
    assert f"stopped by {signal.Signals(number).name}" in (folder / "report.md").read_text()
    load_pretrained(checkpoint)


def test_the_checkpoint_is_the_policy_that_was_evaluated(run_grpo):
    """The saved weights, loaded afresh, reproduce the last held-out reward of the run."""
    _, folder = run_grpo("--warm_start.steps=20", "--steps=2")
    model, tokenizer = load_pretrained(folder / "checkpoints" / "step-000002")
    pool = tiny_run.LocalPool(RolloutEngine(model, tokenizer, max_batch_size=16))
    again = evaluate(pool.run_batch, tokenizer, tiny_run.RepeatTask(), max_tokens=3)
    assert again.reward == records(folder)[-1]["heldout/reward"]
    assert again.reward > 1 / 8, "as good as an untrained policy shows nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model=/no/such/model"], "there is no model '/no/such/model'; give --model"),
        (["--task.name=chainsum"], "task.name must be one of embedded, calculator, chain_sum"),
        (["--task.name=tiny_run:nothing"], "tiny_run has no function 'nothing'"),
    ],
)
def test_a_wrong_start_is_one_sentence(run_grpo, capsys, options, message):
    """F6: exit code 1, the cause on stderr, and in the report."""
    code, folder = run_grpo(*options)
    error = capsys.readouterr().err
    assert code == 1
    assert len(error.strip().splitlines()) == 1 and message in error
    assert message in (folder / "report.md").read_text()
    assert "Traceback" in (folder / "error.txt").read_text()


def test_a_wrong_configuration_is_exit_code_2(capsys):
    assert grpo.main(["--rollout.temprature=1"]) == 2
    assert "nearest one is 'rollout.temperature'" in capsys.readouterr().err


def test_a_full_disk_at_a_checkpoint(run_grpo, monkeypatch, capsys):
    """F6: one sentence, exit code 1, the earlier checkpoint kept."""
    def save(self, folder):
        if "000002" in folder:
            raise OSError(28, "No space left on device")
        return original(self, folder)

    original = tiny_run.TrainerActor.save_checkpoint
    monkeypatch.setattr(tiny_run.TrainerActor, "save_checkpoint", save)
    code, folder = run_grpo("--checkpoint.every=1")
    error = capsys.readouterr().err
    assert code == 1
    assert "step-000002: No space left on device" in error and "--output" in error
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000001"]


def test_a_broken_reward_names_function_and_sample(run_grpo, monkeypatch, capsys):
    """R3."""
    def broken(prompts, completions, rows):
        return [0.0] * (len(completions) - 1) + [float("nan")]

    monkeypatch.setattr(tiny_run, "repeats", broken)
    code, _ = run_grpo()
    assert code == 1
    assert "reward function 'repeats': reward of sample 15 is nan" in capsys.readouterr().err


def test_warm_start_without_demonstrations(run_grpo, capsys):
    code, _ = run_grpo("--warm_start.steps=1", "--task.name=tiny_run:load_untaught")
    assert code == 1
    assert "has no demonstrations; set warm_start.steps to 0" in capsys.readouterr().err


def test_unusable_samples_stay_out_of_the_update(run_grpo, monkeypatch):
    """R4, R6: with mask_truncated only completions that ended by themselves are trained on."""
    seen = []
    step = tiny_run.TrainerActor.step

    def spy(self, batch, advantages, *rest):
        seen.append(set(batch.finish_reasons))
        assert len(advantages) == batch.num_tokens
        return step(self, batch, advantages, *rest)

    monkeypatch.setattr(tiny_run.TrainerActor, "step", spy)
    run_grpo(output="all")
    assert any("length" in reasons for reasons in seen)
    seen.clear()
    code, _ = run_grpo("--algorithm.mask_truncated=true", output="masked")
    assert code == 0
    assert set().union(*seen) == {"stop"}


def test_samples_to_read_and_pass_at_k(run_grpo):
    """Of each logged step the best and the worst, as they went to the trainer; pass@k beside the
    greedy score, in the metrics and in what a checkpoint keeps."""
    code, folder = run_grpo(
        "--logging.samples_every=2", "--logging.samples_per_step=3", "--steps=4",
        "--evaluation.samples=4", "--evaluation.pass_at=[1, 4]", "--algorithm.mask_truncated=true",
    )  # fmt: skip
    assert code == 0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [2, 2, 2, 4, 4, 4]
    for sample in samples:
        letter = sample["prompt"][1]
        assert sample["reward"] == float(sample["completion"].startswith(letter))
        assert sample["rewards"] == {"repeats": sample["reward"]}
        assert (sample["advantage"] is None) == (sample["finish_reason"] == "length")
        ((version, start, end),) = sample["versions"]
        assert (version, start, end) == (sample["step"] - 1, 0, sample["num_tokens"])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [(r["heldout/pass@1"], r["heldout/pass@4"]) for r in metrics if "heldout/pass@4" in r]
    assert len(rates) == 2 and all(0 < one < four <= 1 for one, four in rates)


@pytest.mark.parametrize(("algorithm", "policy_steps"), [("grpo", 10), ("ppo", 7)])
def test_the_schedule_spans_the_whole_run(algorithm, policy_steps):
    """The steps that change the policy: those of the critic alone are none."""
    config = parse_config(
        [
            "--warm_start.steps=5", "--steps=10", "--rollout.prompts_per_step=4",
            "--rollout.group_size=4", "--optimizer.minibatch_size=6",
            "--optimizer.num_iterations=2", "--optimizer.lr_schedule=linear",
            f"--algorithm={algorithm}", "--critic.warmup_steps=3",
        ]
    )  # fmt: skip
    trainer = trainer_config(config, PRESETS[algorithm])
    assert trainer.total_steps == 5 + policy_steps * 3 * 2
    assert (trainer.critic is None) == (trainer.reference is False) == (algorithm == "grpo")
