"""Reads a configuration from a YAML file and the command line, with errors of one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from recipes.algorithms.presets import PRESETS
from recipes.config import RunConfig

CONFIGS = Path(__file__).parent / "configs"
DEFAULT_CONFIG = CONFIGS / "grpo_embedded.yaml"

_WRONG_TYPE = re.compile(
    r'Parser key "(.+?)": Expected an? (?:typing\.)?(.+?)\. Got value: (.+)', re.DOTALL
)
_WRONG_OR_NULL = re.compile(
    r'Parser key "(.+?)": .* Errors: - Expected an? (?:typing\.)?(.+?)(?:\. Got value.*?)? '
    r"- Expected a NoneType.* Given value: (.+)"
)
_OPTIONS_BESIDE_FIELDS = ("config", "help", "print_config", "dry-run")


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one sentence naming the field."""


def parse_config(
    arguments: Sequence[str],
    default_config: Path = DEFAULT_CONFIG,
    program: str = "recipes.grpo",
) -> RunConfig:
    """`[--config FILE] [--field value ...]` to a checked configuration.

    default_config: the file without `--config`; fields on the command line win over files, before
    or after which they stand, and later files over earlier ones.
    program: the module that `--help` names.
    `--algorithm NAME` is short for `--algorithm.name NAME`.
    `--help` and `--print_config` print and raise SystemExit(0). ConfigError for a missing or
    unreadable file, an unknown field (naming the nearest one) and a value out of range.
    """
    files, options = _split(_in_full(arguments))
    known = list(field_names(RunConfig))
    for path in files:
        _check_file(path, known)
    # Files first: the parser lets whatever comes later win, wherever it comes from.
    arguments = [f"--config={path}" for path in files or [default_config]] + options
    for argument in arguments:
        if argument.startswith("--"):
            _check_name(argument[2:].split("=")[0], known, "the command line", option=True)
    parser = _parser(program)
    try:
        parsed = parser.parse_args(arguments)
        values = parser.instantiate(parsed)
        return RunConfig(**{f.name: values[f.name] for f in dataclasses.fields(RunConfig)})
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(_one_sentence(error)) from None


def write_config(config: RunConfig, path: Path) -> None:
    """The whole configuration as YAML; `--config` on that file gives the same run again."""
    path.write_text(
        yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), encoding="utf-8"
    )


def field_names(config_class: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of every field, sections included, in order."""
    hints = get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
        name = f"{prefix}{item.name}"
        yield name
        if dataclasses.is_dataclass(hints[item.name]):
            yield from field_names(hints[item.name], f"{name}.")


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"python -m {program}",
        description="Train a policy by reinforcement learning on shared weights.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these fields")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what memory and time the run would take, and whether it fits; load nothing",
    )
    parser.add_class_arguments(RunConfig)
    by_name = [name for name, preset in PRESETS.items() if preset.recipe == program]
    if len(by_name) == 1:  # a recipe of one algorithm
        parser.set_defaults({"algorithm.name": by_name[0]})
    return parser


def _in_full(arguments: Sequence[str]) -> list[str]:
    return [
        f"--algorithm.name{a.removeprefix('--algorithm')}"
        if a == "--algorithm" or a.startswith("--algorithm=")
        else a
        for a in arguments
    ]


def _split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files that `--config` names, in order, and all other arguments."""
    files, others = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            name = next(rest, None)
            if name is None:
                raise ConfigError("--config needs a file name after it")
            files.append(Path(name))
        elif argument.startswith("--config="):
            files.append(Path(argument.removeprefix("--config=")))
        else:
            others.append(argument)
    return files, others


def _check_file(path: Path, known: Sequence[str]) -> None:
    if not path.is_file():
        ready = sorted(os.path.relpath(p) for p in CONFIGS.glob("*.yaml"))
        raise ConfigError(f"no configuration file {path}; the ready ones are {', '.join(ready)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path} as YAML: {_one_sentence(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold fields (name: value), got {_kind(content)}")
    for name, value in _nested(content):
        _check_name(name, known, str(path))
        if any(field.startswith(f"{name}.") for field in known) and not isinstance(value, dict):
            raise ConfigError(f"{name} in {path} must hold fields of its own, got {_kind(value)}")


def _nested(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _nested(value, f"{prefix}{key}.")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _check_name(name: str, known: Sequence[str], where: str, option: bool = False) -> None:
    if name in known or (option and name in _OPTIONS_BESIDE_FIELDS):
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    by_leaf = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    raise ConfigError(
        f"unknown field {name!r} in {where}; the nearest one is {(by_leaf or nearest)[0]!r}"
    )


def _one_sentence(error: Exception) -> str:
    text = " ".join(str(error).replace("<class '", "").replace("'>", "").split())
    wrong_type = _WRONG_TYPE.fullmatch(text)
    if wrong_type:
        return "{}: expected {}, got {}".format(*wrong_type.groups())
    wrong_or_null = _WRONG_OR_NULL.fullmatch(text)
    if wrong_or_null:
        return "{}: expected {} or null, got {}".format(*wrong_or_null.groups())
    return text
