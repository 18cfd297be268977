"""What the kernel says about another process: is it alive, what is it called, is it stopped."""

from __future__ import annotations

_STATE_WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "in disk wait",
    "T": "stopped",
    "t": "traced",
    "Z": "dead, not yet reaped",
    "X": "dead",
}


def is_alive(pid: int) -> bool:
    """Whether `pid` can still run code. A zombie cannot: its locks are gone already."""
    stat = _stat(pid)
    return stat is not None and stat[1] not in "ZX"


def describe_process(pid: int) -> str:
    """For an error message: `process 4711 (python, stopped)`."""
    stat = _stat(pid)
    if stat is None:
        return f"process {pid} (gone)"
    name, state = stat
    return f"process {pid} ({name}, {_STATE_WORDS.get(state, state)})"


def _stat(pid: int) -> tuple[str, str] | None:
    """(command name, one-letter state), or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()[0]
