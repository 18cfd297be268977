"""One piece of memory that several processes of a host map.

    file offset 0            4096
    | magic nonce tag  ...   | payload ...                                      |

The default backing is a memfd: it has no name in any file system, so nothing is left behind when
every process is killed, and /dev/shm's size does not matter. Others reach it through
`/proc/<pid>/fd/<n>` of any process that has it open, which is why every attached process can hand
out a handle of its own. A file in a chosen folder serves processes that do not see each other's
/proc (separate PID namespaces). Private memory cannot be shared at all.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.policy import WeightsError
from rollout.process_identity import boot_id, pid_namespace

HEADER_BYTES = 4096
_MAGIC = b"LOCKSTP1"
_HEADER = struct.Struct("<8s16s32s")
TAG_BYTES = 32


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Where a region can be found, and how to tell that it is the one meant. Pickleable.

    Valid while process `pid` lives (memfd) or the file exists (`path`).
    """

    host: str  # boot id of the kernel
    pid_namespace: int
    pid: int
    fd: int
    path: str | None
    inode: int
    size: int
    nonce: bytes


class MemoryRegion:
    """A mapping with a header. Make one with `create` or `attach`; close it when done."""

    def __init__(
        self, fd: int, path: str | None, mapping: mmap.mmap, writable: bool, backing: str
    ) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.writable = writable
        self.backing = backing
        self._fd = fd
        self._path = path
        self._finalizer: Callable[[], object] | None = None
        if fd >= 0:
            self._finalizer = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, payload_bytes: int, tag: bytes, backing: str | Path) -> MemoryRegion:
        """`backing`: "memfd", "private", or an existing folder in which to make a file.

        All of it is allocated here, so that a lack of memory is this error and not a SIGBUS later.
        """
        if payload_bytes < 1:
            raise ValueError(f"payload_bytes must be positive, got {payload_bytes}")
        if len(tag) != TAG_BYTES:
            raise ValueError(f"tag must have {TAG_BYTES} bytes, got {len(tag)}")
        size = HEADER_BYTES + payload_bytes
        if backing == "private":
            region = cls(-1, None, mmap.mmap(-1, size), True, "private")
        else:
            fd, path = _new_memfd() if backing == "memfd" else _new_file(Path(backing))
            try:
                os.posix_fallocate(fd, 0, size)
                if path is None:
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
            except OSError as error:
                os.close(fd)
                if path is not None:
                    os.unlink(path)
                raise WeightsError(
                    f"cannot allocate {size} bytes of shared memory in {path or 'a memfd'}: "
                    f"{error.strerror}"
                ) from error
            region = cls(fd, path, mapping, True, str(backing))
        region.mapping[: _HEADER.size] = _HEADER.pack(_MAGIC, secrets.token_bytes(16), tag)
        return region

    @classmethod
    def attach(cls, handle: MemoryHandle, tag: bytes, writable: bool) -> MemoryRegion:
        """Map a region of another process; PROT_READ alone unless `writable`.

        Every field of the handle is checked: a pid or a descriptor number that was used again for
        something else is refused, not mapped.
        """
        if handle.host != boot_id():
            raise WeightsError(
                "the shared memory lies on another host; a node needs an arena of its own"
            )
        if handle.path is None and handle.pid_namespace != pid_namespace():
            raise WeightsError(
                "the shared memory belongs to another PID namespace (container), where /proc does "
                "not reach; create the arena with backing=<a folder both sides mount>"
            )
        where = handle.path or f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(where, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(
                f"cannot open the shared memory at {where}: {error.strerror}; if process "
                f"{handle.pid} is gone, ask another attached process for its handle"
            ) from error
        try:
            mapping = _checked_mapping(fd, handle, tag, writable, where)
        except BaseException:
            os.close(fd)
            raise
        backing = "memfd" if handle.path is None else str(Path(handle.path).parent)
        return cls(fd, handle.path, mapping, writable, backing)

    @property
    def mapping(self) -> mmap.mmap:
        """Header and payload."""
        if self._mapping is None:
            raise WeightsError("this shared memory was closed here; attach it again")
        return self._mapping

    @property
    def nonce(self) -> bytes:
        _, nonce, _ = _HEADER.unpack_from(self.mapping)
        return bytes(nonce)

    def handle(self) -> MemoryHandle:
        """Names *this* process's descriptor: the region outlives the process that made it."""
        if self._fd < 0:
            raise WeightsError(
                "private or closed memory has no handle; create it with backing='memfd' to share it"
            )
        stat = os.fstat(self._fd)
        return MemoryHandle(
            host=boot_id(),
            pid_namespace=pid_namespace(),
            pid=os.getpid(),
            fd=self._fd,
            path=self._path,
            inode=stat.st_ino,
            size=stat.st_size,
            nonce=self.nonce,
        )

    def reopen(self) -> int:
        """A new file description on the same file, for a lock of its own. The caller owns it."""
        if self._fd < 0:
            raise WeightsError("private or closed memory cannot be locked between processes")
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self, unlink: bool = False) -> None:
        """Idempotent. `unlink` removes the file of a folder backing; only its creator should.

        The memory is given up, not unmapped: `torch.frombuffer` keeps the mapping alive but does
        not count as an export of it, so unmapping it here would pull it from under live tensors.
        It goes with the last of them.
        """
        if self._finalizer is not None:
            self._finalizer()
        self._fd = -1
        self._mapping = None
        if unlink and self._path is not None:
            Path(self._path).unlink(missing_ok=True)


def _new_memfd() -> tuple[int, None]:
    return os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), None


def _new_file(folder: Path) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(prefix="lockstep-", suffix=".arena", dir=folder)
    except OSError as error:
        raise WeightsError(
            f"backing must be 'memfd', 'private' or a writable folder, got {str(folder)!r}: "
            f"{error.strerror}"
        ) from error


def _checked_mapping(
    fd: int, handle: MemoryHandle, tag: bytes, writable: bool, where: str
) -> mmap.mmap:
    stat = os.fstat(fd)
    if (stat.st_ino, stat.st_size) != (handle.inode, handle.size):
        raise WeightsError(f"{where} is no longer the shared memory that the handle names")
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    mapping = mmap.mmap(fd, handle.size, mmap.MAP_SHARED, access)
    magic, nonce, its_tag = _HEADER.unpack_from(mapping)
    if (magic, nonce) != (_MAGIC, handle.nonce):
        mapping.close()
        raise WeightsError(f"{where} is no longer the shared memory that the handle names")
    if its_tag != tag:
        mapping.close()
        raise WeightsError(f"the shared memory at {where} was made for another layout")
    return mapping
