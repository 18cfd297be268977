"""What one publication did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublicationReceipt:
    """`bytes_copied` counts the undo copy; without one it is 0."""

    version: int
    tensors: int
    bytes_copied: int
    wait_s: float  # for the readers' step boundary
    update_s: float  # inside the gate
