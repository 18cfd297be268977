"""Presets: by name, as the trainer resolves them, through pickle, and with parts exchanged."""

import dataclasses
import pickle
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from recipes import plugins
from recipes.algorithms import ADVANTAGES, POLICY_LOSSES, gspo, token_weights
from recipes.algorithms.presets import PRESETS
from recipes.config import AlgorithmConfig, PpoConfig, RunConfig
from recipes.errors import RunError
from trainer_bridge.algorithm import resolve_algorithm

torch.set_num_threads(1)
LENGTHS = np.array([2, 4])
TOKENS = (
    torch.tensor([-0.1, -0.9, -2.0]), torch.tensor([-0.5, -1.0, -1.0]),
    torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 0, 1]),
)  # fmt: skip
RATIO_10 = (torch.tensor([10.0]).log(), torch.zeros(1), torch.ones(1), torch.tensor([0]))
AGGREGATIONS = {
    "grpo": "token_mean", "dr_grpo": "seq_mean_token_sum_norm", "dapo": "token_mean",
    "gspo": "seq_mean_token_mean", "cispo": "token_mean", "sapo": "seq_mean_token_mean",
    "rloo": "seq_mean_token_sum", "reinforce_pp": "token_mean", "ppo": "token_mean",
}  # fmt: skip


def configured_preset(config):
    return plugins.configured_preset(RunConfig(algorithm=config))


@pytest.mark.parametrize("name", [*PRESETS, "sft"])
def test_the_trainer_finds_it_by_name_and_it_travels(name):
    here = resolve_algorithm(name)
    there = pickle.loads(pickle.dumps(here))
    assert here.name == there.name == name
    assert torch.equal(here.policy_loss(*TOKENS).loss, there.policy_loss(*TOKENS).loss)
    np.testing.assert_array_equal(here.token_weights(LENGTHS), there.token_weights(LENGTHS))


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_those_of_the_paper(name):
    expected = token_weights(LENGTHS, AGGREGATIONS[name], max_completion_length=8)
    np.testing.assert_array_equal(PRESETS[name].algorithm(8).token_weights(LENGTHS), expected)


def test_the_command_line_offers_exactly_the_presets():
    assert get_args(get_type_hints(AlgorithmConfig)["name"]) == tuple(PRESETS)


def test_dapo_is_what_it_says():
    dapo = PRESETS["dapo"]
    assert dapo.dynamic_sampling and dapo.overlong_share == 0.2
    assert dapo.algorithm().policy_loss(*RATIO_10).loss.item() == pytest.approx(-1.28)


def test_a_configuration_sets_the_clipping():
    config = {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 2.0}
    for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo"):
        loss = configured_preset(AlgorithmConfig(name, **config)).algorithm().policy_loss
        log_ratio, old, one, index = RATIO_10
        assert loss(log_ratio, old, one, index).loss.item() == pytest.approx(-1.5)
        assert loss(log_ratio, old, -one, index).loss.item() == pytest.approx(2.0)
    capped = configured_preset(AlgorithmConfig("cispo", ratio_max=4.0)).algorithm().policy_loss
    assert capped(*RATIO_10).loss.item() == pytest.approx(-4 * np.log(10))


def test_an_option_that_the_loss_has_not_is_refused():
    """Not silently without effect."""
    for name, option, value in (
        ("cispo", "clip_low", 0.5), ("gspo", "dual_clip", 3), ("grpo", "ratio_max", 2)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"policy loss of {name} has no option {option}; it"):
            configured_preset(AlgorithmConfig(name, **{option: value}))


def own_loss(logprobs, old_logprobs, advantages, sequence_index, *, clip_low=0.0):
    return gspo(logprobs, old_logprobs, advantages + clip_low, sequence_index)


def own_advantages(rewards, group_index, lengths):
    return np.arange(len(rewards), dtype=np.float32)


def test_every_part_can_be_exchanged():
    here = "tests.recipes.algorithms.test_presets"
    config = AlgorithmConfig(
        "dapo", advantages=f"{here}:own_advantages", policy_loss=f"{here}:own_loss",
        aggregation="seq_mean_token_sum", correction="tis", clip_low=0.25,
        dynamic_sampling=False, overlong_share=0.5,
    )  # fmt: skip
    preset = configured_preset(config)
    assert preset.advantages is own_advantages
    assert (preset.dynamic_sampling, preset.overlong_share) == (False, 0.5)
    algorithm = pickle.loads(pickle.dumps(preset.algorithm()))
    expected = own_loss(*TOKENS, clip_low=0.25).loss
    assert torch.equal(algorithm.policy_loss(*TOKENS).loss, expected)
    assert algorithm.token_weights(LENGTHS)[0] == 0.5
    assert algorithm.correction.__name__ == "tis"
    ours = AlgorithmConfig(advantages="rloo", policy_loss="gspo")
    assert configured_preset(ours).advantages is ADVANTAGES["rloo"]
    assert configured_preset(ours).policy_loss is POLICY_LOSSES["gspo"]
    plain = configured_preset(AlgorithmConfig("dapo"))
    assert plain == PRESETS["dapo"]
    assert dataclasses.replace(plain, aggregation="token_mean") == plain


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("policy_loss", "ppo", r"must be one of clip, gspo.* or module:function, got 'ppo'"),
        ("advantages", "no_such:thing", "cannot be imported: .*no_such"),
        ("correction", "math:no_such", "math has no function 'no_such'"),
        ("advantages", "math:pi", "math has no function 'pi'"),
    ],
)
def test_what_cannot_be_found_is_named(field, value, message):
    with pytest.raises(RunError, match=f"algorithm.{field}.*{message}"):
        configured_preset(AlgorithmConfig(**{field: value}))


def test_another_name_is_refused():
    with pytest.raises(ValueError, match=r"algorithm must be one of grpo, .* or sft, got 'trpo'"):
        resolve_algorithm("trpo")


def test_ppo_has_a_dual_clip_and_a_critic():
    algorithm = PRESETS["ppo"].algorithm()
    log_ratio, old, one, index = RATIO_10
    assert algorithm.policy_loss(log_ratio, old, -one, index).loss.item() == pytest.approx(3.0)
    moved = (torch.tensor([2.0]), torch.zeros(1), torch.tensor([2.0]))
    assert algorithm.value_loss(*moved).loss.item() == pytest.approx(1.5**2 / 2)
    for clip, expected in ((1.0, 1 / 2), (None, 0.0)):
        run = RunConfig(algorithm=AlgorithmConfig("ppo"), ppo=PpoConfig(value_clip=clip))
        loss = pickle.loads(pickle.dumps(plugins.configured_preset(run).algorithm())).value_loss
        assert loss(*moved).loss.item() == pytest.approx(expected)
    assert all((PRESETS[name].value_loss is None) == (name != "ppo") for name in PRESETS)


def test_the_penalty_and_the_entropy_bonus_are_of_every_preset():
    for name in PRESETS:
        plain = configured_preset(AlgorithmConfig(name)).algorithm()
        assert plain.reference_penalty is None and plain.entropy_coefficient == 0
        both = AlgorithmConfig(name, beta=0.5, entropy_coefficient=0.25)
        algorithm = pickle.loads(pickle.dumps(configured_preset(both).algorithm()))
        penalty = algorithm.reference_penalty(torch.tensor([0.0]), torch.tensor([1.0]))
        assert penalty.loss.item() == pytest.approx(0.5 * (np.e - 2))
        assert algorithm.entropy_coefficient == 0.25
