"""Another node of the running Ray on this machine: a raylet and an object store of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import ray

from tests.processes import descendants

RECORD = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / (
    "ray/ray_current_cluster"
)


class SecondNode:
    """Started as a user does, by `ray start --address`; gone after `kill`."""

    def __init__(self, num_gpus: int = 0) -> None:
        before = len(alive_nodes())
        self._command = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1",
                f"--num-gpus={num_gpus}",
                f"--address={ray.get_runtime_context().gcs_address}",
                f"--object-store-memory={100 << 20}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(alive_nodes()) == before:
            assert time.monotonic() < deadline, "the second node did not join"
            assert self._command.poll() is None, "`ray start` ended"
            time.sleep(0.1)
        _unlink_record()

    def kill(self) -> None:
        """All its processes at once, as when a machine goes down; returns when Ray has noticed."""
        if self._command.poll() is not None:
            return
        before = len(alive_nodes())
        for process in descendants(self._command.pid):
            with suppress(psutil.Error):
                process.kill()
        self._command.kill()
        self._command.wait()
        _unlink_record()  # it may have been written after the node had joined
        deadline = time.monotonic() + 60
        while len(alive_nodes()) == before:
            assert time.monotonic() < deadline, "Ray did not notice that the node is gone"
            time.sleep(0.1)


def _unlink_record() -> None:
    """`ray start` records the cluster for every `ray.init()` on this machine to find; other tests
    want one of their own."""
    RECORD.unlink(missing_ok=True)


def alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
