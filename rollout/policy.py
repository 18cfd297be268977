"""Policy versions and the gate that guards the weights they name.

A *gate* stands between everyone who reads the shared weights (one scheduler step at a time) and
the one who mutates them. It owns the version number: a step learns its version from the gate it
reads under, so a token can only ever be tagged with the version that produced it.

`LocalGate` serves one process. `trainer_bridge.publication.SharedGate` keeps the same protocol
across processes on a shared control page. The engine knows only `WeightGate`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class WeightsError(RuntimeError):
    """The weights cannot be read or written now; the message says why and what to do."""


class PoisonedWeights(WeightsError):
    """An update raised half-way and could not be undone; `recover()` is the only way on."""


class TornWeights(WeightsError):
    """A writer died inside its update: the weights are neither the old nor the new ones."""


class UpdateBusy(WeightsError):
    """Another update holds the gate, or readers did not leave it in time; nothing was changed."""


class FencedWriter(WeightsError):
    """A newer trainer incarnation owns the weights; this one may no longer write."""


class ReadOnlyWeights(WeightsError):
    """This process maps the weights read-only; only the trainer may update them."""


class ParameterLeftArena(WeightsError):
    """A parameter no longer lies where the engines read it (`.data` re-bound, copied, moved)."""


class WeightGate(Protocol):
    """The contract between readers and the writer of one set of weights."""

    @property
    def version(self) -> int:
        """The live policy version. Monotone. Never blocks."""

    def read(self) -> AbstractContextManager[int]:
        """Hold the weights still and yield their version. Shared between readers.

        Held for one scheduler step, never longer. Raises `TornWeights` or `PoisonedWeights`.
        """

    def write(
        self,
        version: int | None,
        update: Callable[[int], T],
        validate: Callable[[], None] | None = None,
    ) -> T:
        """Run `update(target_version)` alone and publish `target_version` when it returns.

        `version=None` means live + 1 (or the next number never attempted), decided under the
        lock; an explicit one must be greater than the live one. `validate` runs under the lock
        before and after `update`: raising before it leaves everything as it was, raising after it
        counts as a failure of the update. Returns what `update` returned.
        """

    def check_write(self, version: int | None) -> None:
        """Raise what `write` would raise before it touches anything; changes nothing."""

    def recover(self, reload: Callable[[], None] | None = None) -> int:
        """Leave the poisoned or torn state: `reload` rewrites every weight. Returns the version."""


def check_version(version: object) -> int:
    """`version` as an int; a bool, a negative or anything that is not an int is a ValueError."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"policy_version must be a non-negative int, got {version!r}")
    return version


class LocalGate:
    """`WeightGate` for one process: a readers-writer lock with a version.

    `take_undo`, when given, is called before each update and returns a function that puts the old
    bits back; with it a failing update leaves the old weights and version, without it the gate is
    poisoned until `recover()`. A number once attempted is never used again.
    """

    def __init__(
        self,
        policy_version: int = 0,
        take_undo: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._version = check_version(policy_version)
        self._attempted = self._version
        self._take_undo = take_undo
        self._mutex = threading.Lock()  # `with` on it is atomic, on a Condition it is not
        self._condition = threading.Condition(self._mutex)
        self._readers: dict[int, int] = {}  # thread id -> depth
        self._writer: int | None = None
        self._poison: str | None = None

    @property
    def version(self) -> int:
        return self._version

    @contextmanager
    def read(self) -> Iterator[int]:
        me = threading.get_ident()
        depth = self._readers.get(me, 0)
        try:
            with self._mutex:
                if self._writer == me:
                    raise RuntimeError("the engine cannot run a step from inside an update")
                while self._writer is not None and not depth:
                    self._condition.wait()
                self._raise_if_poisoned()
                self._readers[me] = depth + 1
            yield self._version
        finally:  # back to what it was, wherever it was interrupted
            with self._mutex:
                self._readers[me] = depth
                if not depth:
                    del self._readers[me]
                self._condition.notify_all()

    def write(
        self,
        version: int | None,
        update: Callable[[int], T],
        validate: Callable[[], None] | None = None,
    ) -> T:
        me = threading.get_ident()
        self.check_write(version)
        with self._mutex:
            while self._writer is not None:
                self._condition.wait()
            self._raise_if_poisoned()
            target = self._target(version)
            if validate is not None:
                validate()
            self._writer = me  # holds back new readers while the present ones leave
        try:
            with self._mutex:
                while self._readers:
                    self._condition.wait()
                self._attempted = target
            return self._run(target, update, validate)
        finally:
            with self._mutex:
                self._writer = None
                self._condition.notify_all()

    def check_write(self, version: int | None) -> None:
        if version is not None:
            check_version(version)
        me = threading.get_ident()
        if me in self._readers or self._writer == me:
            raise RuntimeError(
                "apply_weight_update was called from inside a policy snapshot or another "
                "update of the same thread; call it after that returns"
            )
        self._raise_if_poisoned()
        self._target(version)

    def _target(self, version: int | None) -> int:
        if version is None:
            return self._attempted + 1
        if version <= self._version:
            raise ValueError(
                f"policy_version {version} is not greater than the live version {self._version}"
            )
        if version <= self._attempted:
            raise ValueError(
                f"policy_version {version} was attempted before by an update that failed; "
                f"the next free number is {self._attempted + 1}"
            )
        return version

    def _run(
        self, target: int, update: Callable[[int], T], validate: Callable[[], None] | None
    ) -> T:
        undo = self._take_undo() if self._take_undo is not None else None
        try:
            result = update(target)
            if validate is not None:
                validate()
        except BaseException as error:
            self._poison = (
                f"the update to policy version {target} raised {type(error).__name__}: "
                f"{error}; the weights may be half-written. Reload them and call recover()"
            )
            if undo is not None:
                undo()
                self._poison = None  # only now are the old bits back
            raise
        self._version = target
        return result

    def recover(self, reload: Callable[[], None] | None = None) -> int:
        """`reload` rewrites every weight; the version that comes live is a number never used.

        Without `reload` the caller vouches for the weights as they lie in memory.
        """
        me = threading.get_ident()
        with self._mutex:
            if me in self._readers or self._writer == me:
                raise RuntimeError(
                    "recover() was called from inside a policy snapshot or an update of the same "
                    "thread; call it after that returns"
                )
            while self._writer is not None or self._readers:
                self._condition.wait()
            if self._poison is None:
                return self._version
            if reload is not None:
                reload()
            self._attempted += 1
            self._version = self._attempted
            self._poison = None
            return self._version

    def _raise_if_poisoned(self) -> None:
        if self._poison is not None:
            raise PoisonedWeights(self._poison)  # a new one: each grows its own traceback
