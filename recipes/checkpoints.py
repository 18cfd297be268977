"""Checkpoints of a run: complete or absent, checked when they are read, the newest few kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import sentence
from rollout.model.files import flush_folder, sync_path

STATE_FILE = "lockstep_state.json"
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is complete: after `step` steps the weights were those of `policy_version`."""

    folder: Path
    step: int
    policy_version: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """`folder/step-000120`, one Hugging Face folder each.

    A checkpoint is written beside its final name, flushed to disk and renamed when complete, so a
    run killed half-way leaves the earlier ones and nothing that looks finished. `keep` newest
    remain. One writer per folder: leftovers of a killed run are removed before the next save.
    """

    folder: Path
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def write(self, step: int, state: Mapping[str, Any], save: Callable[[Path], int]) -> Path:
        """Save the weights after `step` steps, then prune. `save(path)` writes a Hugging Face
        folder and returns the policy version it wrote; beside it lies lockstep_state.json: the
        step, the policy version, `state`, and size and hash of every file.

        Saving a step that exists already with this state returns it unchanged; with another state
        (a warm start is all before step 1), or damaged, it is replaced. CheckpointError when
        writing fails, with the older checkpoints untouched and the half-written one removed.
        """
        final = self.folder.resolve() / f"step-{step:06d}"
        if final.exists() and _holds(final, state):
            return final
        unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put_back()
            for leftover in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(leftover)
            version = save(unfinished)
            content = {
                "step": step,
                "policy_version": version,
                "state": dict(state),
                "files": {
                    str(path.relative_to(unfinished)): _fingerprint(path)
                    for path in sorted(unfinished.rglob("*"))
                    if path.is_file()
                },
            }
            (unfinished / STATE_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")
            flush_folder(unfinished)
            if final.exists():
                final.rename(replaced)
            unfinished.rename(final)
            sync_path(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
            for old in self.existing()[: -self.keep]:
                shutil.rmtree(old)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._put_back()
            raise CheckpointError(
                f"cannot write checkpoint {final}: {sentence(error)}; earlier checkpoints are "
                "untouched, and --output chooses another folder"
            ) from error
        return final

    def existing(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if (p / STATE_FILE).is_file())

    def _put_back(self) -> None:
        """One that was to be replaced when the run was killed is the checkpoint still."""
        for replaced in self.folder.glob(f"{_REPLACED}*"):
            final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest that is what was written; a damaged one is told of and passed over.

        None if there is none at all; CheckpointError if all are damaged.
        """
        self._put_back()
        found = self.existing()
        for folder in reversed(found):
            try:
                return read_checkpoint(folder)
            except CheckpointError as error:
                if folder == found[0]:
                    raise
                warn(f"{error}; going on from an earlier one")
        return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check every byte of a checkpoint against what was written. CheckpointError names the file."""
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        for name, expected in content["files"].items():
            if _fingerprint(folder / name) != expected:
                raise CheckpointError(
                    f"{folder / name} is not what was written there; delete {folder} to go on "
                    "without it"
                )
        return Checkpoint(folder, content["step"], content["policy_version"], content["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {sentence(error)}; delete it to go on without it"
        ) from error


def _holds(folder: Path, state: Mapping[str, Any]) -> bool:
    """Whether it is undamaged and of this very state."""
    try:
        return bool(read_checkpoint(folder).state == json.loads(json.dumps(dict(state))))
    except CheckpointError:
        return False


def _fingerprint(path: Path) -> list[Any]:
    """Size in bytes and hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return [path.stat().st_size, digest.hexdigest()]
