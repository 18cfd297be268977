"""Which process on which host: so that a supervisor ends the one that is meant, or none; and how
an actor's process ends."""

from __future__ import annotations

import os
import signal
import threading
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


def end_on_sigterm() -> None:
    """SIGTERM, by which Ray ends actors, ends this process at once, as SIGKILL would.

    Ray's own handler raises SystemExit in whatever Python code the main thread is in; if that is a
    callback of the garbage collector, an orderly end prints a traceback. Nothing here is left to be
    put in order: memory and locks outlive a SIGKILL as well. For constructors of actors, which run
    in the main thread; does nothing in another.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
