"""Alarms: each kind of broken number is said when it begins, and only then."""

import pytest
import tiny_run

from recipes.alarms import Alarms

GOOD = {
    "sampling/importance_sampling_ratio/min": 1.0,
    "sampling/importance_sampling_ratio/max": 1.0,
    "sampling/sampling_logp_difference/max": 0.0,
    "frac_reward_zero_std": 0.5,
    "rollout/truncated_ratio": 0.5,
}


def test_silence_on_good_numbers():
    assert Alarms(on_policy=True).check(1, GOOD) == []
    assert Alarms(on_policy=True).check(1, {}) == []


RATIO, DIFFERENCE = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{RATIO}/max": 1.0 + 2**-23}, "ratio of the first minibatch is 1.0000001, not 1"),
        ({f"{RATIO}/min": 0.5}, "ratio of the first minibatch is 0.5, not 1"),
        ({f"{DIFFERENCE}/max": 1e-7}, "differ by 1e-07 in a log-prob, not by 0"),
        ({f"{DIFFERENCE}/max": float("nan")}, "differ by nan"),
        ({"frac_reward_zero_std": 1.0}, "in no group do the rewards differ"),
        ({"rollout/truncated_ratio": 0.75}, "75% of the completions ran into"),
    ],
)
def test_each_kind_is_said_when_it_begins(change, said):
    alarms = Alarms(on_policy=True)
    bad = GOOD | change
    (sentence,) = alarms.check(3, bad)
    assert sentence.startswith("ALARM, step 3: ") and said in sentence
    assert alarms.check(4, bad) == alarms.check(5, GOOD) == []
    assert len(alarms.check(6, bad)) == 1


def test_off_policy_a_ratio_is_no_fault():
    """`rollout.overlap`, or exactness not promised: only what concerns the data is left."""
    bad = GOOD | {"sampling/importance_sampling_ratio/max": 2.0, "frac_reward_zero_std": 1.0}
    (sentence,) = Alarms(on_policy=False).check(1, bad)
    assert "in no group" in sentence


def test_a_broken_run_says_so_and_a_whole_one_does_not(run_grpo, monkeypatch, capsys):
    run_grpo(output="whole")
    assert "minibatch is" not in capsys.readouterr().out
    step = tiny_run.TrainerActor.step

    def on_other_logprobs(self, batch, *arguments):
        batch.logprobs[0] += 0.25
        return step(self, batch, *arguments)

    monkeypatch.setattr(tiny_run.TrainerActor, "step", on_other_logprobs)
    run_grpo(output="broken")
    printed = capsys.readouterr().out
    assert printed.count("ALARM, step 1: the importance ratio of the first minibatch is") == 1
    assert printed.count("ALARM, step 1: engine and trainer differ by 0.25 in a log-prob") == 1


def test_equal_rewards_are_no_alarm_where_groups_are_not_compared():
    alike = GOOD | {"frac_reward_zero_std": 1.0}
    assert Alarms(on_policy=True, compares_groups=False).check(1, alike) == []
    assert len(Alarms(on_policy=True).check(1, alike)) == 1
