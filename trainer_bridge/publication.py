"""The gate between the engines that read the shared weights and the trainer that changes them.

    engine, once per scheduler step            trainer, one publication
      wait while a live writer announces         what can fail first: validate, data_ptr check, undo
      flock SHARED                               announce; flock EXCLUSIVE, with a timeout
        torn or poisoned? raise                    epoch, state, expected version
        version -> forward, sample                 ATTEMPT, WRITING, SEQ + 1
      unlock                                       update the parameters in place
                                                   VERSION and STABLE, SEQ + 1     <- commit point
                                                 unlock; withdraw; notify

The kernel drops the flock of a killed process while the words stay. Lock held: the writer is busy.
Lock free and words in the middle: it died there, and no one serves those weights. No message is
needed to find that out, and there is one copy and one commit word, so nothing has to be voted on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from threading import Lock, get_ident
from typing import TypeVar

from torch import nn

from rollout.policy import (
    FencedWriter,
    ReadOnlyWeights,
    UpdateBusy,
    WeightsError,
    check_version,
)
from trainer_bridge.arena import ArenaHandle, WeightArena
from trainer_bridge.control_page import ControlPage, State
from trainer_bridge.file_lock import FileLock
from trainer_bridge.gate_settings import GateSettings
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.receipt import PublicationReceipt, WeightsEcho
from trainer_bridge.step_reader import StepReader
from trainer_bridge.writer_lock import QuiesceTimeout, WriterLock

__all__ = [
    "Attachment",
    "ControlPage",
    "GateSettings",
    "PublicationReceipt",
    "QuiesceTimeout",
    "SharedGate",
    "State",
]

T = TypeVar("T")
Attachment = tuple[ArenaHandle, MemoryHandle]
"""Handles of the weights and of their gate, both through one process."""
_log = logging.getLogger(__name__)


class SharedGate:
    """`rollout.policy.WeightGate` over an arena that several processes map.

    Make the first with `create`, which is the trainer's; the others `attach` with its `handle()`.
    A gate belongs to the process that made it: after a fork the child attaches its own.
    """

    def __init__(
        self,
        arena: WeightArena,
        page: ControlPage,
        module: nn.Module | None,
        settings: GateSettings,
        synchronize: Callable[[], None] | None,
        notify: Callable[[int], None] | None,
    ) -> None:
        self.arena = arena
        self.page = page
        self.last_receipt: PublicationReceipt | None = None
        self._module = module
        self._undo = arena.writable and settings.wants_undo(arena.layout.total_bytes)
        self._synchronize = synchronize
        self._notify = notify
        self._epoch = page.epoch
        self._pid = os.getpid()
        self._mutex = Lock()
        self._lock = WriterLock(page, FileLock(arena.region.reopen()), settings)
        self._reader = StepReader(page, FileLock(arena.region.reopen()), settings)

    @classmethod
    def create(
        cls,
        arena: WeightArena,
        module: nn.Module | None = None,
        settings: GateSettings | None = None,
        synchronize: Callable[[], None] | None = None,
        notify: Callable[[int], None] | None = None,
    ) -> SharedGate:
        """The trainer's gate of a new arena. Nobody can read until `open`.

        `module`: its parameters must lie in the arena before and after every update.
        `synchronize`: waits for the device, inside the gate, before the version moves.
        `notify`: called with the new version after the gate is open again; a failure of it is
        logged and changes nothing.
        """
        page = ControlPage.create(_tag(arena), arena.region.backing)
        page.claim_epoch()
        return cls(arena, page, module, settings or GateSettings(), synchronize, notify)

    @classmethod
    def attach(
        cls,
        arena: WeightArena,
        handle: MemoryHandle,
        module: nn.Module | None = None,
        settings: GateSettings | None = None,
        synchronize: Callable[[], None] | None = None,
        notify: Callable[[int], None] | None = None,
    ) -> SharedGate:
        """A gate in another process: a rollout's over a read-only arena, a trainer's over a
        writable one. A new trainer incarnation calls `recover` before anything else."""
        page = ControlPage.attach(handle, _tag(arena), arena.writable)
        return cls(arena, page, module, settings or GateSettings(), synchronize, notify)

    def handle(self) -> MemoryHandle:
        """Pickleable, through this process's descriptor: any live process can give one."""
        return self.page.region.handle()

    def attachment(self) -> Attachment:
        """Through this process, whoever created the memory."""
        return self.arena.handle(), self.handle()

    def echo(self, checksum: bool = False) -> WeightsEcho:
        """What this process reads, while nobody writes. `ParameterLeftArena` if its module reads
        something else. `checksum` reads every byte."""
        with self.read() as version:
            self._require_bound()
            return WeightsEcho(
                version,
                len(self.arena.layout.entries),
                self.arena.region.nonce.hex(),
                self.arena.checksum() if checksum else None,
            )

    @property
    def version(self) -> int:
        """The live policy version. Never blocks."""
        return self.page.version

    @property
    def state(self) -> State:
        """As the words say now, without the lock: WRITING may be a running update."""
        return self.page.state

    def read(self) -> StepReader:
        """Hold the weights still and get their version, for one scheduler step.

        Shared between readers and reentrant. On a device, synchronize before leaving it. Raises
        `TornWeights`, `PoisonedWeights`, or `UpdateBusy` when an update lasts too long.
        """
        return self._reader

    def wait_until_whole(self, timeout_s: float) -> None:
        """Return when the weights can be read. Raises what `read` raises if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self.read():
                    return
            except WeightsError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    def open(self, policy_version: int = 0) -> None:
        """Publish the weights as they lie in the arena as the first version."""
        check_version(policy_version)
        self._require_writer()
        self._require_bound()
        with self._mutex:
            self._lock.acquire(f"the first publication, of policy version {policy_version},")
            try:
                if self.page.state is not State.INIT:
                    raise WeightsError(f"the gate is open already, at version {self.version}")
                self.page.open(policy_version)
            finally:
                self._leave()

    def write(
        self,
        version: int | None,
        update: Callable[[int], T],
        validate: Callable[[], None] | None = None,
    ) -> T:
        """Run `update(target)` while no one reads, and publish `target`. Returns its result.

        `version=None` is live + 1, or the next number never tried. `validate` runs before the
        readers are stopped and again before the commit. Before the update begins a failure changes
        nothing: ValueError, `UpdateBusy` (another update), `QuiesceTimeout`, `FencedWriter`,
        `ReadOnlyWeights`, `ParameterLeftArena`. If the update raises, its exception comes through,
        its number is burnt, and the old bits stand (`undo`) or the weights are poisoned.
        """
        if version is not None:
            check_version(version)
        self._require_writer()
        if not self._mutex.acquire(blocking=False):
            raise UpdateBusy("another thread of this process is updating the weights")
        try:
            return self._write(version, update, validate)
        finally:
            self._mutex.release()

    def recover(self, reload: Callable[[], None] | None = None) -> int:
        """Make this process the trainer, and torn or poisoned weights whole. Returns the version.

        Every earlier trainer is fenced off. Whole weights stay as they are and `reload` is not
        called. Otherwise `reload` rewrites every weight (and the caller's optimizer state) from a
        checkpoint; without it the caller vouches for the weights in memory. They become a number
        never tried before, for they need not be the weights of the last version. If `reload`
        raises, the weights stay torn.
        """
        self._require_writer()
        with self._mutex:
            self._lock.acquire("the recovery")
            try:
                self._epoch = self.page.claim_epoch()
                if not self.page.is_torn:
                    return self.page.version
                target = self.page.begin_recovery(self._pid)
                self._reader.updating_thread = get_ident()
                if reload is not None:
                    reload()
                self._require_bound()
                self._sync()
                self.page.commit(target)
                return target
            finally:
                self._leave()

    def check_write(self, version: int | None) -> None:
        """Raise what `write` would raise before it touches anything; changes nothing."""
        if version is not None:
            check_version(version)
        self._require_writer()
        self._require_possible(version)
        self._require_bound()

    def _require_possible(self, version: int | None) -> None:
        self._require_epoch()
        if self.page.state in (State.INIT, State.POISONED):
            self.page.require_stable()
        self._target(version)

    def close(self, unlink: bool = False) -> None:
        """Gives up the gate, not the arena. No step or update may be in flight here."""
        self._lock.close()
        self._reader.close()
        self.page.close(unlink)

    def _write(
        self,
        version: int | None,
        update: Callable[[int], T],
        validate: Callable[[], None] | None,
    ) -> T:
        expected = self.page.mark()
        self._require_possible(version)
        if validate is not None:
            validate()
        self._require_bound()
        undo = self.arena.take_undo() if self._undo else None

        wait_s = self._lock.acquire("the update")
        started = time.perf_counter()
        try:
            self._require_epoch()
            live = self.page.require_stable()
            if self.page.mark() != expected:
                raise UpdateBusy(
                    f"another process updated the weights meanwhile; the live version is {live}"
                )
            target = self._target(version)
            self.page.begin(target, self._pid)
            result = self._update(target, update, validate, undo)
            self.page.commit(target)
        finally:
            self._leave()
        self.last_receipt = PublicationReceipt(
            version=target,
            tensors=len(self.arena.layout.entries),
            bytes_copied=0 if undo is None else self.arena.layout.total_bytes,
            wait_s=wait_s,
            held_s=time.perf_counter() - started,
        )
        self._tell(target)
        return result

    def _update(
        self,
        target: int,
        update: Callable[[int], T],
        validate: Callable[[], None] | None,
        undo: Callable[[], None] | None,
    ) -> T:
        """Between begin and commit. Whatever is raised leaves the old weights, or poison."""
        self._reader.updating_thread = get_ident()
        try:
            result = update(target)
            self._require_bound()
            if validate is not None:
                validate()
            self._sync()
            return result
        except BaseException:
            self.page.poison()
            if undo is not None:
                undo()
                self._sync()
                self.page.restore()
            raise

    def _target(self, version: int | None) -> int:
        following = self.page.next_version
        if version is None:
            return following
        if version <= self.page.version:
            raise ValueError(
                f"policy_version {version} is not greater than the live version {self.page.version}"
            )
        if version < following:
            raise ValueError(
                f"policy_version {version} was attempted before by an update that failed; "
                f"the next free number is {following}"
            )
        return version

    def _leave(self) -> None:
        self._reader.updating_thread = 0
        self._lock.release()

    def _require_writer(self) -> None:
        if not self.arena.writable or not self.page.region.writable:
            raise ReadOnlyWeights("this process maps the weights read-only; the trainer updates")
        if os.getpid() != self._pid:
            raise WeightsError("this gate was opened before a fork(); attach one in the child")
        me = get_ident()
        if self._reader.holds(me) or self._reader.updating_thread == me:
            raise WeightsError(
                "the weights cannot be updated from inside a step, a policy snapshot or another "
                "update of the same thread; do it after that returns"
            )

    def _require_epoch(self) -> None:
        if self.page.epoch != self._epoch:
            raise FencedWriter(
                f"this trainer is incarnation {self._epoch}; incarnation {self.page.epoch} owns "
                f"the weights now. End this process, or call recover() to take them back"
            )

    def _require_bound(self) -> None:
        if self._module is not None:
            self.arena.check_bound(self._module)

    def _sync(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _tell(self, version: int) -> None:
        if self._notify is None:
            return
        try:
            self._notify(version)
        except Exception:
            _log.warning("policy version %d is live, but telling of it failed", version)


def _tag(arena: WeightArena) -> bytes:
    """Ties a control page to one arena."""
    return hashlib.blake2b(arena.region.nonce + arena.layout.digest(), digest_size=32).digest()
