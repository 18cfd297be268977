"""What a process holds."""

import gc
from pathlib import Path


def own_memory() -> int:
    """Bytes of memory that belong to no file.

    Not USS: that counts the code of shared libraries too, for as long as nobody else maps it, so
    that it jumps when another process of the machine loads torch, or ends.
    """
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kibibytes = {name: int(size) for name, size, _ in map(str.split, lines)}
    return (kibibytes["Pss_Anon:"] + kibibytes["Pss_Shmem:"]) * 1024
