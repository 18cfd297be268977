"""The configuration: every field explained, every mistake one sentence (F6)."""

import dataclasses
import re
from typing import get_type_hints

import pytest
import yaml

from recipes.algorithms.presets import PRESETS
from recipes.command_line import (
    DEFAULT_CONFIG,
    ConfigError,
    field_names,
    parse_config,
    write_config,
)
from recipes.config import RunConfig

CONFIGS = sorted(DEFAULT_CONFIG.parent.glob("*.yaml"))


def sections(config_class):
    hints = get_type_hints(config_class)
    return {name: t for name, t in hints.items() if dataclasses.is_dataclass(t)}


def test_no_arguments_is_the_embedded_run():
    assert parse_config([]) == parse_config(["--config", str(DEFAULT_CONFIG)])
    assert parse_config([]).model == "embedded"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_files_parse_and_start_with_their_command(path):
    config = parse_config(["--config", str(path)])
    assert config.name == path.stem
    head = path.read_text().split("name:")[0]
    assert f"python -m {PRESETS[config.algorithm.name].recipe}" in head
    assert all(line.startswith("#") for line in head.strip().splitlines())


def test_a_group_of_one_where_nothing_compares_groups():
    for options in (["--algorithm=ppo"], ["--algorithm=reinforce_pp"],
                    ["--algorithm.advantages=mine:advantages"]):  # fmt: skip
        config = parse_config([*options, "--rollout.group_size=1"])
        assert config.rollout.group_size == 1


def test_bounds_of_what_is_not_used_are_not_checked():
    """A large batch with a fixed penalty has nothing to do with the horizon of a steered one."""
    options = ["--algorithm=ppo", "--rollout.prompts_per_step=1024", "--rollout.group_size=16"]
    assert parse_config(options).ppo.kl_horizon == 10000


def test_the_recipe_of_one_algorithm_means_that_one(tmp_path):
    """Also with a file that names none."""
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\n")
    for program, name in (("recipes.ppo", "ppo"), ("recipes.grpo", "grpo")):
        config = parse_config(["--config", str(path)], program=program)
        assert (config.algorithm.name, config.steps) == (name, 7)
    assert parse_config(["--algorithm=dapo"], program="recipes.ppo").algorithm.name == "dapo"


def test_command_line_wins_over_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nrollout: {group_size: 4, temperature: 0.7}\n")
    config = parse_config(
        ["--config", str(path), "--rollout.group_size", "6", "--optimizer.betas", "[0.5, 0.6]"]
    )
    assert (config.steps, config.rollout.group_size, config.rollout.temperature) == (7, 6, 0.7)
    assert config.optimizer.betas == (0.5, 0.6)
    for field in (["--rollout.group_size", "6"], ["--rollout.group_size=6"]):
        config = parse_config([*field, "--config", str(path), "--steps=8"])
        assert (config.steps, config.rollout.group_size) == (8, 6), "wherever it stands"
    assert config.model == RunConfig().model, "a file replaces the default file, not adds to it"


def test_written_configuration_gives_the_same_run(tmp_path):
    config = parse_config(
        [
            "--algorithm=dapo", "--algorithm.dual_clip", "3", "--optimizer.minibatch_size", "32",
            '--task.rewards=["a:b", "c:d"]', "--algorithm.policy_loss", "my.module:loss",
        ]
    )  # fmt: skip
    assert config.algorithm.name == parse_config(["--algorithm", "dapo"]).algorithm.name == "dapo"
    assert config.task.rewards == ("a:b", "c:d")
    write_config(config, tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    sectioned = sections(RunConfig)
    for name in field_names(RunConfig):
        if name in sectioned:
            continue
        entry = re.search(rf"--{re.escape(name)} (\{{[^}}]*\}}|\S+)\s+(\w+)", text)
        assert entry is not None, f"{name} has no explanation"
        assert entry.group(2) != "type", f"{name} has no explanation"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.temprature", "1"], "'rollout.temprature' .* nearest one is 'rollout.temp"),
        (["--temperature=1"], "unknown field 'temperature' .* 'rollout.temperature'"),
        (["--rollout.temp", "1"], "unknown field 'rollout.temp' "),
        (["--steps", "many"], "steps: expected int, got many"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--seed=-1"], "seed must be at least 0, got -1"),
        (["--rollout.group_size", "1"], r"rollout.group_size must be at least 2 .*, got 1"),
        (
            ["--rollout.group_size=1", "--algorithm.name=reinforce_pp",
             "--algorithm.advantages=rloo"],
            r"at least 2 \(rloo compares the samples of a group\), got 1",
        ),
        (["--rollout.group_size=0", "--algorithm=ppo"], "group_size must be at least 1, got 0"),
        (["--algorithm=ppo", "--algorithm.advantages=grpo"], "advantages must be null for ppo"),
        (["--algorithm=ppo", "--algorithm.dynamic_sampling=true"], "null or false for ppo"),
        (
            ["--algorithm=ppo", "--steps=5", "--critic.warmup_steps=5"],
            r"steps must be at least 6 \(the policy is trained after critic.warmup_steps\), got 5",
        ),
        (
            ["--algorithm=ppo", "--ppo.kl_horizon=100", "--ppo.kl_target=0.1"],
            r"ppo.kl_horizon must be at least 128 \(the rollouts of a step\), got 100",
        ),
        (["--ppo.kl_target=0.1", "--ppo.kl_coefficient=0"], "kl_coefficient must be a positive"),
        (
            ["--algorithm=dapo", "--algorithm.advantages=reinforce_pp", "--rollout.group_size=1"],
            r"at least 2 \(dynamic sampling compares the samples of a group\), got 1",
        ),
        (["--algorithm.ref_model_sync_steps=2"], "is for a reference policy, and nothing here has"),
        (
            ["--algorithm=ppo", "--ppo.kl_coefficient=0", "--algorithm.ref_model_sync_steps=2"],
            "is for a reference policy, and nothing here has one",
        ),
        (["--ppo.lam=1.1"], r"ppo.lam must lie in \[0, 1\], got 1.1"),
        (["--critic.learning_rate=0"], "critic.learning_rate must be a positive number, got 0"),
        (["--algorithm.beta=-1"], "algorithm.beta must be at least 0, got -1"),
        (["--optimizer.learning_rate", "-1"], "optimizer.learning_rate must be a positive number"),
        (["--optimizer.learning_rate", ".nan"], "learning_rate must be a positive number, got nan"),
        (["--algorithm.name", "trpo"], r"algorithm.name: expected Literal\['grpo'.*, got trpo"),
        (["--algorithm.aggregation", "mean"], r"Literal\['token_mean', .*\] or null, got mean$"),
        (["--algorithm.dual_clip", "x"], "^algorithm.dual_clip: expected float or null, got x$"),
        (["--algorithm.dual_clip", "0.5"], "algorithm.dual_clip must be greater than 1"),
        (["--task.name", "chain_sum"], "model embedded knows only the characters"),
        (["--name", "a/b"], "name must be a plain folder name, got 'a/b'"),
        (["--config", "nowhere.yaml"], "no configuration file nowhere.yaml; the ready ones are"),
        (["--config"], "--config needs a file name"),
        (["steps=3"], "unrecognized arguments: steps=3"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse_config(arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rollout:\n  group_sise: 4\n", "'rollout.group_sise' in .*'rollout.group_size'"),
        ("- steps\n", r"must hold fields \(name: value\), got a list"),
        ("# steps: 3\n", r"must hold fields \(name: value\), got nothing"),
        ("steps: [1\n", "cannot read .* as YAML"),
        ("steps: x\n", "steps"),
        ("rollout: 3\n", "rollout in .* must hold fields of its own, got a int"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        parse_config(["--config", str(path)])
    assert "\n" not in str(error.value)


def test_shipped_files_hold_no_unknown_field():
    known = set(field_names(RunConfig))
    for path in CONFIGS:
        content = yaml.safe_load(path.read_text())
        for key, value in content.items():
            names = [f"{key}.{leaf}" for leaf in value] if isinstance(value, dict) else [key]
            assert known.issuperset(names)
