"""The words that say which policy version the shared weights are, and whether they are whole.

One 64-bit word per cache line, after the header of the region:

    EPOCH      trainer incarnation; a writer with another number is fenced off
    SEQ        odd while the weights are being changed
    LIVE       version << 8 | state, in one word so that no one can see half of a commit
    ATTEMPT    highest version number ever tried; never goes back
    INTENT     pid of a writer that waits for readers (a hint for fairness, nothing depends on it)
    UNTIL      when that hint lapses, in ns of CLOCK_MONOTONIC, which a host has only one of
    WRITER     pid of the process that changes the weights

Why plain stores are enough. `memoryview.cast("Q")` copies eight bytes of constant size, which the
compiler makes one load or store; the words are 64-byte aligned, and an aligned 8-byte access is
single-copy atomic on x86-64 and on AArch64: a word is never seen half-written. What must be
consistent *between* words and weights is only read under the flock. Releasing it and taking it are
an unlock and a lock of the same kernel spinlock, so all that the writer stored before it let go
(or was killed: a signal is delivered between instructions, and the exit releases the lock) is
visible to whoever gets the lock next, on weakly ordered ARM as well. Read without the lock are
only single words: the version, INTENT and UNTIL, and EPOCH before it is checked again.
"""

from __future__ import annotations

import time
from enum import IntEnum
from pathlib import Path

from rollout.policy import PoisonedWeights, TornWeights, WeightsError
from trainer_bridge.memory import HEADER_BYTES, MemoryHandle, MemoryRegion
from trainer_bridge.processes import is_alive

_WORDS_PER_LINE = 8
EPOCH, SEQ, LIVE, ATTEMPT, INTENT, UNTIL, WRITER = (n * _WORDS_PER_LINE for n in range(7))
_NUM_WORDS = 7 * _WORDS_PER_LINE
MAX_VERSION = (1 << 56) - 1


class State(IntEnum):
    INIT = 0  # no weights were published yet
    STABLE = 1
    WRITING = 2
    POISONED = 3  # an update raised and nothing could put the old bits back


class ControlPage:
    """Reads and moves the words. It takes no lock: its owner holds the flock where noted.

    Only a trainer maps it writable; in a rollout process a store to it is a crash.
    """

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        with memoryview(region.mapping) as whole:
            self._words = whole[HEADER_BYTES : HEADER_BYTES + 8 * _NUM_WORDS].cast("Q")

    @classmethod
    def create(cls, tag: bytes, backing: str | Path = "memfd") -> ControlPage:
        """All zero: state INIT, epoch 0. `tag` (32 bytes) names the arena it belongs to."""
        return cls(MemoryRegion.create(8 * _NUM_WORDS, tag, backing))

    @classmethod
    def attach(cls, handle: MemoryHandle, tag: bytes, writable: bool = False) -> ControlPage:
        return cls(MemoryRegion.attach(handle, tag, writable))

    @property
    def epoch(self) -> int:
        return self._words[EPOCH]

    @property
    def sequence(self) -> int:
        return self._words[SEQ]

    @property
    def version(self) -> int:
        return self._words[LIVE] >> 8

    @property
    def state(self) -> State:
        return State(self._words[LIVE] & 0xFF)

    @property
    def attempt(self) -> int:
        return self._words[ATTEMPT]

    @property
    def intent_pid(self) -> int:
        return self._words[INTENT]

    @property
    def writer_pid(self) -> int:
        return self._words[WRITER]

    @property
    def next_version(self) -> int:
        """Live + 1, or the next number that no update ever tried."""
        return max(self._words[ATTEMPT], self._words[LIVE] >> 8) + 1

    @property
    def is_torn(self) -> bool:
        """Under the lock (shared or exclusive): the weights are not whole."""
        return self._words[LIVE] & 0xFF != State.STABLE or bool(self._words[SEQ] & 1)

    def mark(self) -> tuple[int, int]:
        """Changes with every begin, commit, restore and poison: for compare-and-set."""
        return self._words[LIVE], self._words[SEQ]

    def require_stable(self) -> int:
        """Under the lock: the live version, or the error that says why there is none."""
        live = self._words[LIVE]
        if live & 0xFF == State.STABLE and not self._words[SEQ] & 1:
            return live >> 8
        raise self._refusal()

    def _refusal(self) -> WeightsError:
        state, attempt = self.state, self.attempt
        if state is State.INIT:
            return WeightsError("no weights were published yet; the trainer must open the gate")
        if state is State.POISONED:
            return PoisonedWeights(
                f"the update to policy version {attempt} raised half-way and the weights may be "
                f"half-written; the trainer must reload them and call recover()"
            )
        return TornWeights(
            f"process {self.writer_pid} ended inside its update to policy version {attempt}; the "
            f"weights are half-written until a trainer reloads them and calls recover()"
        )

    def announced_writer(self) -> int:
        """The pid of a live writer whose announcement has not lapsed, else 0."""
        pid = self._words[INTENT]
        if not pid or time.monotonic_ns() >= self._words[UNTIL]:
            return 0
        # Behind a file the writer may live in another PID namespace: only the lease is sure then.
        return pid if self.region.backing != "memfd" or is_alive(pid) else 0

    # The writer's moves, in the order of the words.

    def announce(self, pid: int, until_ns: int) -> None:
        """Without the lock. Readers let `pid` go first until then."""
        self._words[UNTIL] = until_ns
        self._words[INTENT] = pid

    def withdraw(self, pid: int) -> None:
        """Without the lock. Leaves the hint of another writer alone."""
        if self._words[INTENT] == pid:
            self._words[INTENT] = 0

    def begin(self, version: int, pid: int) -> None:
        """Under the exclusive lock, before the first byte of a weight changes."""
        if not self._words[ATTEMPT] < version <= MAX_VERSION:
            raise ValueError(
                f"version must lie in {self._words[ATTEMPT] + 1}..{MAX_VERSION}, got {version}"
            )
        self._words[ATTEMPT] = version
        self._words[WRITER] = pid
        self._set_state(State.WRITING)
        self._words[SEQ] += 1

    def commit(self, version: int) -> None:
        """After the last byte of a weight changed. The last store is the commit point."""
        self._words[LIVE] = version << 8 | State.STABLE
        self._words[SEQ] += 1
        self._words[WRITER] = 0

    def restore(self) -> None:
        """The old bits are back: the old version stands, the attempted number stays burnt."""
        self._set_state(State.STABLE)
        self._words[SEQ] += 1
        self._words[WRITER] = 0

    def poison(self) -> None:
        """SEQ stays odd; only `begin_recovery` and `commit` lead on."""
        self._set_state(State.POISONED)

    def open(self, version: int) -> None:
        """Under the exclusive lock, from INIT: the weights are whole and are `version`."""
        self._words[ATTEMPT] = version
        self._words[LIVE] = version << 8 | State.STABLE

    def claim_epoch(self) -> int:
        """Under the exclusive lock. From here on every earlier trainer is fenced off."""
        self._words[EPOCH] += 1
        return self._words[EPOCH]

    def begin_recovery(self, pid: int) -> int:
        """Under the exclusive lock, of torn weights. Burns the attempted number, opens the next."""
        version = self.next_version
        self._words[ATTEMPT] = version
        self._words[WRITER] = pid
        self._set_state(State.WRITING)
        self._words[SEQ] |= 1
        return version

    def close(self, unlink: bool = False) -> None:
        """The words go on reading as they were."""
        shared, self._words = self._words, memoryview(bytearray(self._words)).cast("Q")
        shared.release()
        self.region.close(unlink)

    def _set_state(self, state: State) -> None:
        self._words[LIVE] = self._words[LIVE] & ~0xFF | state
