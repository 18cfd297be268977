"""What a publication did, and what a process reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublicationReceipt:
    """Of the process that published.

    bytes_copied: by the undo copy, before the readers were stopped; nothing is ever sent to them.
    wait_s: for the readers' step boundary. held_s: inside the gate.
    """

    version: int
    tensors: int
    bytes_copied: int
    wait_s: float
    held_s: float


@dataclass(frozen=True, slots=True)
class WeightsEcho:
    """What one process reads, said by itself at a moment when no update ran.

    memory: names the physical memory; equal in all processes that map the same weights. checksum:
    of all their bytes as this process sees them, if it was asked for.
    """

    version: int
    tensors: int
    memory: str
    checksum: str | None
