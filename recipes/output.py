"""The folder a run writes to."""

from __future__ import annotations

import time
from pathlib import Path

from recipes.command_line import write_config
from recipes.config import GrpoConfig
from recipes.errors import RunError, sentence


def prepare_output(config: GrpoConfig) -> Path:
    """Create the run's folder, write `config.yaml` into it, and return its absolute path.

    Without `output` a new folder runs/<name>-<time> is taken. RunError when the folder already
    holds a run (nothing of it is touched) or cannot be written.
    """
    folder = Path(config.output) if config.output else _fresh(config.name)
    if (folder / "metrics.jsonl").exists():
        raise RunError(f"{folder} already holds a run; choose another folder with --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")
    except OSError as error:
        raise RunError(
            f"cannot write to the output folder {folder}: {sentence(error)}; "
            "choose another folder with --output"
        ) from error
    return folder.resolve()


def _fresh(name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
    return next(Path("runs") / c for c in candidates if not (Path("runs") / c).exists())
