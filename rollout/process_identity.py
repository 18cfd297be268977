"""Which process on which host: so that a supervisor ends the one that is meant, or none."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


def boot_id() -> str:
    """Names this host, and one run of its kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> int:
    """Process numbers mean the same only within one."""
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told from a later one with the same number. Pickleable.

    host: the kernel's boot id. started: seconds since the epoch.
    """

    host: str
    pid_namespace: int
    pid: int
    started: float

    @staticmethod
    def of_this() -> ProcessIdentity:
        return ProcessIdentity(
            boot_id(), pid_namespace(), os.getpid(), psutil.Process().create_time()
        )

    def kill(self, grace_s: float = 2.0) -> None:
        """SIGKILL, which ends stopped processes too, unless it ends by itself within `grace_s`;
        returns when it is gone.

        Does nothing where it cannot: on another host, and for a process that has ended.
        """
        if (self.host, self.pid_namespace) != (boot_id(), pid_namespace()):
            return
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if process.create_time() != self.started:
                return
            try:
                process.wait(grace_s)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(10)
