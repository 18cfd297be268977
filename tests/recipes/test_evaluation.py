"""Held-out evaluation: greedy and by samples, counted by hand, on completions made up here."""

import json
import math
from dataclasses import asdict
from itertools import combinations
from types import SimpleNamespace

import pytest
import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from recipes.command_line import ConfigError, parse_config, write_config
from recipes.evaluation import Evaluation, evaluate, pass_at_k
from rollout import Rollout, RolloutBatch, RolloutEngine, load_pretrained

CORRECT = st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


class Characters:
    """A token per character."""

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Answers:
    """`run_batch` that knows what it will say: per prompt one greedy text, and the sampled ones.

    A text of "!" is a sample that ended in an error.
    """

    def __init__(self, greedy, sampled):
        self.greedy, self.sampled, self.asked = greedy, sampled, []

    def __call__(self, prompts, params):
        self.asked.append(params)
        texts = [[text] for text in self.greedy] if params.greedy else self.sampled
        return RolloutBatch.from_rollouts(
            [
                Rollout(
                    place, sample, prompt, [ord(c) for c in text], [0.0] * len(text),
                    [0.0] * len(text), (), "error" if text == "!" else "stop", None, None, None,
                    0, 1.0,
                )
                for place, prompt in enumerate(prompts)
                for sample, text in enumerate(texts[place][: params.n])
            ]
        )  # fmt: skip


def digits(prompts, completions, rows):
    """A completion is worth what it says; `?` cannot be scored."""
    return [None if completion == "?" else float(completion) for completion in completions]


def task(*names):
    rows = [{"prompt": f"{i}=", **({} if name is ... else {"task": name})}
            for i, name in enumerate(names)]  # fmt: skip
    return SimpleNamespace(name="digits", heldout=rows, rewards={"digits": digits})


def evaluated(run_batch, heldout, **options):
    return evaluate(run_batch, Characters(), heldout, max_tokens=1, **options)


@pytest.mark.parametrize(
    ("correct", "num_samples", "k", "expected"),
    [
        (0, 4, 1, 0.0),
        (1, 4, 1, 1 / 4),
        (1, 4, 2, 1 / 2),  # 3 of 6 pairs hold the one
        (2, 4, 2, 5 / 6),  # only one pair of 6 holds neither
        (3, 5, 2, 9 / 10),
        (3, 4, 2, 1.0),
        (4, 4, 4, 1.0),
        (1, 200, 100, 1 / 2),
        (1, 10**5, 10**4, 1 / 10),  # of binomials far beyond a float
    ],
)
def test_pass_at_k_in_numbers(correct, num_samples, k, expected):
    assert pass_at_k(correct, num_samples, k) == expected


@given(CORRECT, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(counts, data):
    correct, num_samples = counts
    k = data.draw(st.integers(1, num_samples))
    subsets = list(combinations([i < correct for i in range(num_samples)], k))
    assert pass_at_k(correct, num_samples, k) == sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize("counts", [(-1, 4, 1), (5, 4, 1), (1, 4, 0), (1, 4, 5)])
def test_pass_at_k_outside_its_range(counts):
    with pytest.raises(ValueError, match="got correct {}, num_samples {}, k {}".format(*counts)):
        pass_at_k(*counts)


def test_greedy_alone_samples_nothing():
    answers = Answers(["1", "0"], [])
    evaluation = evaluated(answers, task(..., ...))
    assert [(p.n, p.temperature, p.max_tokens) for p in answers.asked] == [(1, 0.0, 1)]
    assert evaluation.reward == 0.5 and evaluation.examples == (("0=", "1", 1.0), ("1=", "0", 0.0))
    assert evaluation.pass_rates == evaluation.tasks == {}
    assert evaluation.metrics().keys() == {
        "heldout/reward", "heldout/truncated_ratio", "heldout/rewards/digits/mean",
        "timing_s/evaluation",
    }  # fmt: skip


def test_samples_beside_the_greedy_score():
    answers = Answers(["1", "0"], ["1000", "1100"])
    evaluation = evaluated(
        answers, task(..., ...), num_samples=4, pass_at=(1, 2, 4), temperature=0.7
    )
    assert evaluation.pass_rates == {
        "pass@1": (1 / 4 + 2 / 4) / 2, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0,
    }  # fmt: skip
    assert [(p.n, p.temperature, p.max_tokens) for p in answers.asked] == [(1, 0, 1), (4, 0.7, 1)]
    metrics = evaluation.metrics()
    assert metrics["heldout/reward"] == metrics["heldout/rewards/digits/mean"] == 0.5
    assert metrics["heldout/pass@1"] == 3 / 8 and metrics["heldout/pass@4"] == 1.0
    assert evaluation.examples == (("0=", "1", 1.0), ("1=", "0", 0.0))


def test_the_noise_is_fixed():
    """Every evaluation asks for the same noise, whatever was sampled before; unless told to."""
    answers = Answers(["1"], ["1"])
    for options in ({}, {}, {"seed": 5}):
        evaluated(answers, task(...), num_samples=1, **options)
    assert [params.seed for params in answers.asked[1::2]] == [0, 0, 5]


def test_equal_weights_give_an_equal_evaluation(policy):
    """On the real engine, which has sampled other things in between; and samples do differ."""
    model, tokenizer = load_pretrained(policy)
    heldout = tiny_run.RepeatTask()
    found = []
    for prompts_before in (0, 3):
        pool = tiny_run.LocalPool(RolloutEngine(model, tokenizer, max_batch_size=16))
        if prompts_before:
            evaluate(pool.run_batch, tokenizer, heldout, max_tokens=3, num_prompts=prompts_before,
                     num_samples=1, seed=9)  # fmt: skip
        for seed in (0, 1):
            evaluation = evaluate(
                pool.run_batch, tokenizer, heldout, max_tokens=3, num_samples=8, pass_at=(1, 4),
                seed=seed,
            )  # fmt: skip
            found.append({**asdict(evaluation), "seconds": 0.0})
    assert found[:2] == found[2:]
    assert found[0]["pass_rates"] != found[1]["pass_rates"]
    assert found[0]["reward"] == found[1]["reward"]
    assert 0 < found[0]["pass_rates"]["pass@1"] < found[0]["pass_rates"]["pass@4"] < 1


def test_a_sample_is_right_from_the_threshold_on():
    answers = Answers(["0"], ["1235"])
    rates = [
        evaluated(answers, task(...), num_samples=4, pass_reward=reward).pass_rates["pass@1"]
        for reward in (1, 2, 2.5, 6)
    ]
    assert rates == [1.0, 0.75, 0.5, 0.0]


def test_what_was_not_scored_does_not_count():
    """`?` has no reward and `!` ended in an error: prompt 0 has two samples, prompt 1 three."""
    answers = Answers(["?", "1"], ["1?0!", "0?01"])
    evaluation = evaluated(answers, task(..., ...), num_samples=4, pass_at=(1, 2, 3, 4))
    assert evaluation.reward == 1.0
    assert evaluation.pass_rates == {
        "pass@1": (1 / 2 + 1 / 3) / 2, "pass@2": (1.0 + 2 / 3) / 2, "pass@3": 1.0,
    }  # fmt: skip


def test_nothing_scored_is_absent():
    evaluation = evaluated(Answers(["?"], ["??"]), task("sums"), num_samples=2)
    assert math.isnan(evaluation.reward)
    assert evaluation.pass_rates == {} and evaluation.tasks == {"sums": {}}
    assert evaluation.metrics().keys() == {"heldout/truncated_ratio", "timing_s/evaluation"}


def test_by_task():
    """Rows without a task count only in the whole."""
    answers = Answers(["1", "0", "1", "0"], ["11", "10", "00", "00"])
    evaluation = evaluated(
        answers, task("sums", 7, "sums", None), num_samples=2, pass_at=(1, 2)
    )
    assert evaluation.tasks == {
        "sums": {"reward": 1.0, "pass@1": 0.5, "pass@2": 0.5},
        "7": {"reward": 0.0, "pass@1": 0.5, "pass@2": 1.0},
    }
    metrics = evaluation.metrics()
    assert metrics["heldout/reward"] == 0.5 and metrics["heldout/pass@1"] == 3 / 8
    assert metrics["heldout/sums/reward"] == 1.0 and metrics["heldout/7/pass@2"] == 1.0
    assert {type(value) for value in metrics.values()} == {float}


def test_only_the_first_prompts():
    answers = Answers(["1", "0", "0"], ["1", "0", "0"])
    evaluation = evaluated(answers, task("a", "b", "c"), num_samples=1, num_prompts=2)
    assert evaluation.num_prompts == 2 and evaluation.tasks.keys() == {"a", "b"}
    assert evaluation.pass_rates == {"pass@1": 0.5}


@pytest.mark.parametrize("pass_at", [(0,), (1, 3)])
def test_more_than_was_sampled_is_refused(pass_at):
    answers = Answers(["1"], ["11"])
    with pytest.raises(ValueError, match=r"pass_at must lie in 1\.\.num_samples \(2\)"):
        evaluated(answers, task(...), num_samples=2, pass_at=pass_at)
    assert not answers.asked


def test_through_a_checkpoint():
    evaluation = evaluated(Answers(["1"], ["10"]), task("sums"), num_samples=2, pass_at=(1, 2))
    assert Evaluation.from_dict(json.loads(json.dumps(asdict(evaluation)))) == evaluation


def test_a_checkpoint_of_before_there_were_samples():
    evaluation = evaluated(Answers(["1"], []), task(...))
    stored = json.loads(json.dumps(asdict(evaluation)))
    del stored["pass_rates"], stored["tasks"]
    assert Evaluation.from_dict(stored) == evaluation


def test_configured(tmp_path):
    """Also through `config.yaml`, which knows no tuples."""
    config = parse_config(["--evaluation.samples=8", "--evaluation.pass_at=[1, 4, 8]"])
    assert (config.evaluation.samples, config.evaluation.pass_at) == (8, (1, 4, 8))
    write_config(config, tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config
    assert parse_config([]).evaluation.samples == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["samples=-1"], "evaluation.samples must be at least 0, got -1"),
        (["samples=2", "pass_at=[1, 4]"], r"samples must be at least 4 \(the last of pass_at\)"),
        (["pass_at=[4, 1]"], r"pass_at must be strictly ascending numbers, got \[4, 1\]"),
        (["pass_at=[2, 2]"], r"pass_at must be strictly ascending numbers, got \[2, 2\]"),
        (["pass_at=[]"], r"pass_at must be strictly ascending numbers, got \[\]"),
        (["pass_at=[0, 1]"], "evaluation.pass_at must be at least 1, got 0"),
        (["temperature=0"], "evaluation.temperature must be a positive number, got 0"),
        (["pass_reward=.nan"], "evaluation.pass_reward must be a number, got nan"),
    ],
)
def test_configured_wrongly(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_config([f"--evaluation.{argument}" for argument in arguments])
