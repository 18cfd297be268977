"""Files of a model folder: JSON, folders that appear whole or not at all, and their errors."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CheckpointError(RuntimeError):
    """A model folder cannot be read or written; one sentence says which file and why."""


class UnsupportedModel(CheckpointError):
    """The files are sound, but what they describe is not computed here."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if it is missing, unreadable, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON (damaged or cut off?): {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(target: Path, replace: bool = True) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` when the block ends, or vanishes if it raises.

    Everything is flushed to disk before the rename, so `target` is never half written; a crash at
    the very moment of a replacement leaves the old folder beside it as `.name….retired`. When
    `target` exists, `replace=True` puts the new folder in its place (what the new one lacks stays,
    except weight files), and `replace=False` keeps the existing one and discards the new. OSError
    inside the block (disk full, read-only) becomes a CheckpointError naming `target`.
    """
    target = Path(os.path.realpath(target))
    staging = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        flush_folder(staging)
        _publish(staging, target, replace)
        sync_path(target.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"{target} could not be written ({reason}); what stood there before is unchanged"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, target: Path, replace: bool) -> None:
    if not target.exists():
        try:
            staging.rename(target)
            return
        except OSError:
            if not target.is_dir():
                raise
    if not replace:
        return
    retired = staging.with_suffix(".retired")
    target.rename(retired)
    try:
        staging.rename(target)
    except OSError:
        retired.rename(target)
        raise
    for entry in retired.iterdir():
        if not (target / entry.name).exists() and ".safetensors" not in entry.name:
            entry.rename(target / entry.name)
    shutil.rmtree(retired, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """All that lies in the folder is on the disk when this returns."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    """One file, or the names in one folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
