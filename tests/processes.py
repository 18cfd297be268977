"""Processes while they come and go: each may end between two questions."""

from __future__ import annotations

import psutil


def title(process: psutil.Process) -> str:
    """What its command line begins with, which Ray sets for its own; empty when it is gone."""
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Of that process, or of this one; none when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def actors_of(pid: int | None = None) -> list[psutil.Process]:
    """Those that compute for a run of ours."""
    return [p for p in descendants(pid) if title(p).startswith(("ray::Trainer", "ray::Rollout"))]
