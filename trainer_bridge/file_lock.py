"""A kernel `flock` that belongs to one process and vanishes with it."""

from __future__ import annotations

import fcntl
import os
import weakref

from rollout.policy import WeightsError

_SHARED = fcntl.LOCK_SH | fcntl.LOCK_NB
_EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB


class FileLock:
    """`flock` on a file description of its own.

    The kernel ties a flock to the *open file description*. Two FileLocks on one file therefore
    exclude each other even inside one process, whereas the threads that use one FileLock do not
    exclude each other: their owner keeps a mutex beside it. A forked child would share the
    description, hence the lock; a FileLock must be opened after the fork.

    Owns `fd`. When the process dies, however it dies, the kernel drops the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def try_shared(self) -> bool:
        """Take the lock beside other shared holders; False when someone holds it exclusively."""
        return self._try(_SHARED)

    def try_exclusive(self) -> bool:
        """Take the lock alone; False when anyone else holds it."""
        return self._try(_EXCLUSIVE)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def holders(self) -> list[int]:
        """Processes that hold the lock now, as the kernel lists them; empty if it does not say."""
        stat = os.fstat(self._fd)
        file_id = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        try:
            with open("/proc/locks", encoding="ascii") as file:
                rows = [line.split() for line in file]
        except OSError:
            return []
        # 1: FLOCK  ADVISORY  READ 4711 00:01:4 0 EOF      (a waiter has "->" as its second column)
        return sorted(
            {int(row[4]) for row in rows if row[1:2] == ["FLOCK"] and row[5:6] == [file_id]}
        )

    def close(self) -> None:
        """Drops the lock if it is held. Idempotent."""
        self._fd = -1
        self._close()

    def _try(self, operation: int) -> bool:
        try:
            fcntl.flock(self._fd, operation)
        except BlockingIOError:
            return False
        except ValueError:
            raise WeightsError("this gate was closed; attach a new one") from None
        return True
