"""First come first served, whoever asks again at once."""

from __future__ import annotations

import threading
import time

import pytest

from rollout.fair_lock import FairLock


def rounds_before_a_visitor(lock) -> int:
    """How often a loop that takes the lock again at once gets it before one visitor does."""
    rounds, served, asking = 0, threading.Event(), threading.Event()

    def visit() -> None:
        asking.set()
        with lock:
            served.set()

    visitor = threading.Thread(target=visit)
    with lock:
        visitor.start()
        asking.wait(10)
        time.sleep(0.05)  # the visitor waits now
    while not served.is_set() and rounds < 200:
        with lock:
            time.sleep(0.001)
            rounds += not served.is_set()
    visitor.join(10)
    return rounds


def test_a_visitor_is_served_next():
    assert rounds_before_a_visitor(FairLock()) == 0


def test_reentrant_and_exclusive():
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(50):
            with lock, lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] and not any(t.is_alive() for t in threads)


def test_an_interrupted_waiter_blocks_nobody(monkeypatch):
    lock = FairLock()

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    def wait_and_be_interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), lock:
            pass

    with lock:
        with monkeypatch.context() as patch:
            patch.setattr(lock._changed, "wait", interrupted)
            waiter = threading.Thread(target=wait_and_be_interrupted)
            waiter.start()
            waiter.join(10)
    with lock:
        pass
