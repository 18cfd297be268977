"""MirrorActor: the process that keeps a copy of the weights on a node without the trainer."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rollout.process_identity import ProcessIdentity, end_on_sigterm
from trainer_bridge.arena import WeightArena
from trainer_bridge.gate_settings import GateSettings
from trainer_bridge.layout import ArenaLayout
from trainer_bridge.publication import Attachment, SharedGate, State
from trainer_bridge.receipt import WeightsEcho

PIECE_BYTES = 64 << 20
"""Weights travel between nodes in pieces of this size."""


class MirrorActor:
    """The trainer's weights for the processes of another node: an arena of the same layout behind
    a gate of its own. Its readers cannot tell it from the trainer's.

    The version is the trainer's and so are the bytes: a mirror never trains and never makes up a
    number. If it dies half-way in a copy, its readers see `TornWeights`, as of a dead trainer; who
    supervises it then starts another one on an arena of its own.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        end_on_sigterm()
        self._arena = WeightArena.create(layout)
        self._gate = SharedGate.create(self._arena, settings=GateSettings(undo=False))
        self._doing = "waiting for the first weights"

    def publish(self, version: int, *pieces: NDArray[np.uint8]) -> int:
        """Take in the trainer's weights of `version`; returns the version that is read here.

        pieces: all bytes of the arena, in order. They are here when this is called, so readers are
        stopped for the time of a copy within this machine. Older versions are left alone.
        """
        self._doing = f"publishing policy version {version}"
        if self._gate.state is State.INIT:
            self._arena.fill(pieces)
            self._gate.open(version)
        elif version > self._gate.version:
            self._gate.write(version, lambda _: self._arena.fill(pieces))
        self._doing = f"idle at policy version {self._gate.version}"
        return self._gate.version

    def attachment(self) -> Attachment:
        """Handles to the mirror and its gate, valid on this node."""
        return self._gate.attachment()

    def weights_echo(self, checksum: bool) -> WeightsEcho:
        """What lies here: `SharedGate.echo`."""
        return self._gate.echo(checksum)

    def heartbeat(self) -> str:
        """Answered at once by a process that is alive."""
        return f"{self._doing}, at {time.strftime('%H:%M:%S')}"

    def process_identity(self) -> ProcessIdentity:
        """Which process this is, for whoever may have to end it."""
        return ProcessIdentity.of_this()

    def get_stats(self) -> dict[str, Any]:
        """Process, version, and private memory in bytes; the mirror is not in it."""
        uss = int(psutil.Process().memory_full_info().uss)
        return {"pid": os.getpid(), "policy_version": self._gate.version, "memory_uss": uss}
