"""The Ray that a run works on: one that runs already, or one of its own."""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import ray

log = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 5.0


def connect() -> bool:
    """Use the Ray that this process is part of, that `RAY_ADDRESS` names or that `ray start` has
    recorded on this machine, else start one. Returns whether this process has to shut it down.

    `ray.init` would do the same, but try for a quarter of an hour to reach a cluster that is gone:
    the record outlives a `ray start` that was killed.

    Raises ConnectionError if nothing answers at `RAY_ADDRESS`, or Ray does not start.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = _address()
    try:
        ray.init(address=address, include_dashboard=False, logging_level="ERROR")
    except Exception as error:
        own = _temporary_folder() / "ray"
        raise ConnectionError(
            f"Ray did not start: {_said(error)}. It needs room in {own} (RAY_TMPDIR names another "
            f"place) and in /dev/shm, and writes its logs to {own / 'session_latest' / 'logs'}"
        ) from error
    return True


def _address() -> str | None:
    """For `ray.init`; None = as it finds it."""
    wanted = os.environ.get("RAY_ADDRESS")
    if wanted:
        if not _answers(wanted):
            raise ConnectionError(
                f"RAY_ADDRESS is {wanted}, and nothing answers there. Start that cluster with "
                "`ray start --head`, correct the address, or unset it to run without a cluster"
            )
        return None
    record = _temporary_folder() / "ray" / "ray_current_cluster"
    with suppress(OSError):
        recorded = record.read_text().strip()
        if recorded and not _answers(recorded):
            log.warning(
                "nothing answers at %s, the Ray cluster that %s names: starting one for this run",
                recorded, record,
            )  # fmt: skip
            return "local"
    return None


def _answers(address: str) -> bool:
    """Whether somebody listens there; True for what has no port to ask ("local", "auto")."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN_S).close()
    except OSError:
        return False
    return True


def _said(error: Exception) -> str:
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    return where + (getattr(error, "strerror", None) or str(error)).rstrip(". ")


def _temporary_folder() -> Path:
    """Where Ray keeps its own (the rules of `ray.init`)."""
    named = os.environ.get("RAY_TMPDIR")
    if not named and sys.platform.startswith("linux"):
        named = os.environ.get("TMPDIR")
    return Path(named or "/tmp")
