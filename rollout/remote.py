"""Waiting for Ray actors: every wait has a deadline, every failure names actor and phase."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ActorFailure(RuntimeError):
    """A remote actor did not do its part."""


class ActorDied(ActorFailure):
    """The actor's process is gone."""


class ActorTimeout(ActorFailure):
    """The actor did not answer in time; it may be hung."""


def wait_for(reference: Any, actor: str, phase: str, timeout_s: float) -> Any:
    """The result of one remote call. An error raised by the call comes through as itself.

    Raises `ActorDied` or `ActorTimeout`, which name `actor` and `phase`.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise ActorTimeout(
            f"{actor} did not finish {phase!r} within {timeout_s:.0f} s; it may hang or wait "
            "for a machine that has no room for it (see `ray status`)"
        ) from None
    except RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except RayActorError as error:
        raise ActorDied(f"{actor} died during {phase!r}: {_cause(error)}") from None


def _cause(error: Exception) -> str:
    """One line of Ray's report: its last, the exception itself, if the constructor raised; else
    its first, which says how the process ended."""
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "creation task" in lines[0] else lines[0]
