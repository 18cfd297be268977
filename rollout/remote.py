"""Waiting for Ray actors: every wait has a deadline, every failure names actor and phase."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError


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
        raise ActorDied(f"{actor} died during {phase!r}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
