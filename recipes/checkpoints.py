"""Checkpoints of a run: complete or absent, the newest few kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import sentence

STATE_FILE = "lockstep_state.json"
_UNFINISHED = ".unfinished-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Saves `folder/step-000120` by `save(path)`, which writes a Hugging Face folder and returns
    the policy version it wrote.

    A checkpoint is written beside its final name and renamed when complete, so a run killed
    half-way leaves the earlier ones and nothing that looks finished. `keep` newest remain.
    One writer per folder: leftovers of a killed run are removed before the next save.
    """

    folder: Path
    save: Callable[[Path], int]
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def write(self, step: int, state: Mapping[str, Any]) -> Path:
        """Save the weights after `step` steps, then prune. Beside them lies lockstep_state.json:
        the step, the policy version and `state`.

        Saving a step that exists already returns it unchanged. CheckpointError when writing
        fails, with the older checkpoints untouched and the half-written one removed.
        """
        final = self.folder.resolve() / f"step-{step:06d}"
        if final.exists():
            return final
        unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(leftover)
            version = self.save(unfinished)
            content = {"step": step, "policy_version": version, **state}
            (unfinished / STATE_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")
            unfinished.rename(final)
            for old in self.existing()[: -self.keep]:
                shutil.rmtree(old)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"cannot write checkpoint {final}: {sentence(error)}; earlier checkpoints are "
                "untouched, and --output chooses another folder"
            ) from error
        return final

    def existing(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if (p / STATE_FILE).is_file())
