"""Memory of several processes: what they share counts once."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time

import psutil

from scripts.bench.memory import INTERVAL_S, PeakMemory, family

SIZE = 64 << 20


def touch(shared: mmap.mmap, own: int, ready, done) -> None:  # type: ignore[no-untyped-def]
    shared[:: mmap.PAGESIZE]
    kept = bytearray(own)
    ready.set()
    done.wait()
    del kept


def test_shared_pages_count_once_and_the_highest_remains() -> None:
    """Three processes that map the same 64 MiB and have 32 MiB of their own each."""
    context = multiprocessing.get_context("fork")
    shared = mmap.mmap(-1, SIZE)
    shared.write(b"x" * SIZE)
    done, ready = context.Event(), [context.Event() for _ in range(3)]
    children = [
        context.Process(target=touch, args=(shared, SIZE // 2, flag, done)) for flag in ready
    ]
    with PeakMemory(lambda: family(os.getpid())) as peak:
        time.sleep(2 * INTERVAL_S)
        alone = peak.bytes
        for child in children:
            child.start()
        for flag in ready:
            flag.wait()
        time.sleep(3 * INTERVAL_S)
        assert {p.pid for p in family(os.getpid())} >= {child.pid for child in children}
        together = peak.bytes
        done.set()
        for child in children:
            child.join()
        assert peak.bytes >= together, "what was the highest stays so"
        peak.reset()
        time.sleep(3 * INTERVAL_S)
        assert 0 < peak.bytes < together - SIZE
    assert 1.2 * SIZE < together - alone < 2.5 * SIZE  # 3 · 32 MiB, not 3 · 96
    assert psutil.Process().is_running()
