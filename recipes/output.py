"""The folder a run writes to, new or gone on with."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.command_line import ConfigError, parse_config, write_config
from recipes.config import RunConfig
from recipes.errors import RunError, sentence

_MAY_CHANGE = (
    "name", "output", "resume", "trainer_restarts", "evaluation", "checkpoint", "logging",
    "rollout.actors", "rollout.nodes", "rollout.restarts", "rollout.heartbeat_timeout",
    "rollout.max_batch_size",
)  # fmt: skip
"""Fields that change no weight and no token: a run may go on with others."""


def prepare_output(config: RunConfig) -> Path:
    """Create the run's folder, write `config.yaml` into it, and return its absolute path.

    Without `output` a new folder runs/<name>-<time> is taken. A folder that holds a run is taken
    only with `resume`, and with the settings that the run was started with. RunError otherwise
    (nothing in it is touched), or when the folder cannot be written.
    """
    folder = Path(config.output) if config.output else _fresh(config.name)
    if holds_run(folder):
        if not config.resume:
            raise RunError(
                f"{folder} already holds a run; choose another folder with --output, or go on "
                "with it by --resume auto"
            )
        _check_same_run(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")
    except OSError as error:
        raise RunError(
            f"cannot write to the output folder {folder}: {sentence(error)}; "
            "choose another folder with --output"
        ) from error
    return folder.resolve()


def holds_run(folder: Path) -> bool:
    """Whether a run has begun there."""
    return (folder / "metrics.jsonl").exists()


def _check_same_run(folder: Path, config: RunConfig) -> None:
    try:
        former = parse_config(["--config", str(folder / "config.yaml")])
    except ConfigError as error:
        raise RunError(f"cannot go on with {folder}: {error}") from error
    before, now = _flat(asdict(former)), _flat(asdict(config))
    may_change = list(_MAY_CHANGE)
    if config.optimizer.lr_schedule == former.optimizer.lr_schedule == "constant":
        may_change.append("steps")
    for name, value in before.items():
        if now[name] != value and not any(f"{name}.".startswith(f"{m}.") for m in may_change):
            raise RunError(
                f"{folder} holds a run with {name} = {value}, now it is {now[name]}: going on "
                "would be neither run; keep the setting, or choose another folder with --output"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


def _fresh(name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
    return next(Path("runs") / c for c in candidates if not (Path("runs") / c).exists())
