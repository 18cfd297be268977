"""Functions that a configuration names: one of ours, or `module:function`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from recipes.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, clipped_value_loss
from recipes.algorithms.presets import PRESETS, Preset
from recipes.config import RunConfig
from recipes.errors import RunError, sentence

_SHARED = ("aggregation", "dynamic_sampling", "overlong_share", "beta", "entropy_coefficient")
"""Fields of the configuration that are fields of a preset as they are."""


def named_function(
    field: str, name: str, own: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """`own[name]`, or what `module:function` leads to. RunError naming `field` if there is none.

    The module must be importable where the run starts: a file of the current folder is.
    """
    if name in own:
        return own[name]
    module_name, _, function_name = name.partition(":")
    if not function_name:
        choices = f"one of {', '.join(own)} or " if own else ""
        raise RunError(f"{field} must be {choices}module:function, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RunError(f"{field} {name!r} cannot be imported: {sentence(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RunError(f"{field} {name!r}: {module_name} has no function {function_name!r}")
    found: Callable[..., Any] = function
    return found


def configured_preset(run: RunConfig) -> Preset:
    """The preset with what the configuration changes in it. ValueError for a loss option that its
    loss has not, RunError for a function that cannot be found."""
    config = run.algorithm
    preset = PRESETS[config.name]
    if config.policy_loss is not None:
        loss = named_function("algorithm.policy_loss", config.policy_loss, POLICY_LOSSES)
        preset = dataclasses.replace(preset, policy_loss=loss)
    changes: dict[str, Any] = {
        name: value
        for name in _SHARED
        if (value := getattr(config, name)) is not None
    }
    if config.advantages is not None:
        changes["advantages"] = named_function(
            "algorithm.advantages", config.advantages, ADVANTAGES
        )
    if config.correction is not None:
        changes["correction"] = named_function(
            "algorithm.correction", config.correction, CORRECTIONS
        )
    if preset.value_loss is clipped_value_loss:
        changes["value_loss"] = partial(clipped_value_loss, clip_range=run.ppo.value_clip)
    options = {
        name: value
        for name in ("clip_low", "clip_high", "dual_clip", "ratio_max")
        if (value := getattr(config, name)) is not None
    }
    return dataclasses.replace(preset, **changes).with_loss_options(**options)
