"""Presets: by name, as the trainer resolves them, and through pickle."""

import pickle

import numpy as np
import pytest
import torch

from recipes.algorithms import presets, token_weights
from trainer_bridge.algorithm import resolve_algorithm

torch.set_num_threads(1)
NAMED = ["grpo", "dr_grpo", "rloo", "sft"]
LENGTHS = np.array([2, 4])


@pytest.mark.parametrize("name", NAMED)
def test_the_trainer_finds_it_by_name(name):
    assert resolve_algorithm(name).name == name


@pytest.mark.parametrize("name", NAMED)
def test_it_travels_by_pickle(name):
    here = resolve_algorithm(name)
    there = pickle.loads(pickle.dumps(here))
    logprobs, old = torch.tensor([-0.1, -0.9, -2.0]), torch.tensor([-0.5, -1.0, -1.0])
    arguments = (logprobs, old, torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 0, 1]))
    assert torch.equal(here.policy_loss(*arguments).loss, there.policy_loss(*arguments).loss)
    np.testing.assert_array_equal(here.token_weights(LENGTHS), there.token_weights(LENGTHS))


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (presets.grpo(), "token_mean"),
        (presets.grpo(aggregation="seq_mean_token_mean"), "seq_mean_token_mean"),
        (presets.dr_grpo(max_completion_length=8), "seq_mean_token_sum_norm"),
        (presets.rloo(), "seq_mean_token_sum"),
        (presets.sft(), "token_mean"),
    ],
)
def test_weights_are_those_of_the_paper(algorithm, mode):
    expected = token_weights(LENGTHS, mode, max_completion_length=8)
    np.testing.assert_array_equal(algorithm.token_weights(LENGTHS), expected)


def test_a_configuration_sets_the_clipping():
    options = {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 2.0, "max_completion_length": 4}
    ratio = torch.tensor([10.0]).log()
    zeros, index = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    for name in ("grpo", "dr_grpo", "rloo"):
        loss = presets.named(name, **options).policy_loss
        assert loss(ratio, zeros, torch.ones(1), index).loss.item() == pytest.approx(-1.5)
        assert loss(ratio, zeros, -torch.ones(1), index).loss.item() == pytest.approx(2.0)
    assert presets.named("dr_grpo", **options).token_weights(LENGTHS)[0] == 1 / 8
    with pytest.raises(ValueError, match="algorithm must be grpo, dr_grpo or rloo, got 'ppo'"):
        presets.named("ppo", **options)
