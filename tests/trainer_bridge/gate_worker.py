"""Real processes on one arena, told what to do through a pipe. Used by the tests beside it.

Every tensor of a published version is filled with that version's number: a reader that finds two
numbers has seen torn weights.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from trainer_bridge.arena import ArenaHandle, WeightArena
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.publication import GateSettings, SharedGate
from trainer_bridge.receipt import WeightsEcho

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "trainer_bridge.publication"])
REPLY_S = 30.0


def fill(arena: WeightArena, value: float) -> None:
    for entry in arena.layout.entries:
        arena.tensor(entry.name).fill_(value)


def values(arena: WeightArena) -> set[float]:
    """The distinct numbers in the arena, read tensor by tensor."""
    found: set[float] = set()
    for entry in arena.layout.entries:
        low, high = torch.aminmax(arena.tensor(entry.name))
        found |= {float(low), float(high)}
    return found


class DyingWords:
    """The words of a control page whose owner is SIGKILLed just before its n-th store."""

    def __init__(self, words: MutableSequence[int], fatal_store: int) -> None:
        self.words = words
        self.stores = 0
        self.fatal_store = fatal_store

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.stores += 1
        if self.stores == self.fatal_store:
            os.kill(os.getpid(), signal.SIGKILL)
        self.words[index] = value


def serve(
    pipe: Connection,
    arena_handle: ArenaHandle,
    gate_handle: MemoryHandle,
    writable: bool,
    settings: GateSettings,
) -> None:
    """Answers one command after another; an exception is answered as (class name, message)."""
    torch.set_num_threads(1)
    arena = WeightArena.attach(arena_handle, writable)
    gate = SharedGate.attach(arena, gate_handle, settings=settings)
    worker = Worker(pipe, arena, gate)
    pipe.send("attached")
    while True:
        name, *arguments = pipe.recv()
        if name == "quit":
            return
        try:
            pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


@dataclass
class Worker:
    pipe: Connection
    arena: WeightArena
    gate: SharedGate

    def handles(self) -> tuple[ArenaHandle, MemoryHandle]:
        return self.arena.handle(), self.gate.handle()

    def step(self) -> tuple[int, set[float]]:
        with self.gate.read() as version:
            return version, values(self.arena)

    def hold(self) -> str:
        """Inside one step until the next message comes."""
        with self.gate.read():
            self.pipe.send("holding")
            self.pipe.recv()
        return "released"

    def loop(self, guarded: bool, step_s: float) -> tuple[list[float], int, set[int]]:
        """Steps until the next message: (when each ended, torn ones, versions seen)."""
        torn, steps, versions = 0, list[float](), set[int]()
        self.pipe.send("looping")
        while not self.pipe.poll():
            if guarded:
                with self.gate.read() as version:
                    found = values(self.arena)
                    time.sleep(step_s)
            else:
                version, found = self.gate.version, values(self.arena)
                found = found if len(found) > 1 else {float(version)}
            steps.append(time.monotonic())
            versions.add(version)
            torn += found != {float(version)}
        self.pipe.recv()
        return steps, torn, versions

    def checksum(self) -> str:
        with self.gate.read():
            return self.arena.checksum()

    def echo(self) -> WeightsEcho:
        return self.gate.echo(checksum=True)

    def write(self, version: int | None = None) -> int:
        return self.gate.write(version, self._fill)

    def write_slowly(self) -> int:
        """Fills half of the tensors, says "half-way" and goes on at the next message."""
        return self.gate.write(None, self._fill_with_a_pause)

    def write_dying(self, fatal_store: int) -> int:
        self.gate.page._words = DyingWords(self.gate.page._words, fatal_store)  # type: ignore
        return self.gate.write(None, self._fill)

    def recover(self, value: float) -> int:
        return self.gate.recover(lambda: fill(self.arena, value))

    def stray_write(self) -> None:
        self.arena.tensor(self.arena.layout.entries[0].name).fill_(7.0)

    def _fill(self, target: int) -> int:
        fill(self.arena, target)
        return target

    def _fill_with_a_pause(self, target: int) -> int:
        names = [entry.name for entry in self.arena.layout.entries]
        for name in names[: len(names) // 2]:
            self.arena.tensor(name).fill_(target)
        self.pipe.send("half-way")
        self.pipe.recv()
        return self._fill(target)


class WorkerProcess:
    """The parent's end of a `Worker`."""

    def __init__(
        self,
        arena_handle: ArenaHandle,
        gate_handle: MemoryHandle,
        writable: bool = False,
        settings: GateSettings | None = None,
    ) -> None:
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, arena_handle, gate_handle, writable, settings or GateSettings())
        self.process: BaseProcess = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.reply() == "attached"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, *command: object) -> None:
        self.pipe.send(command)

    def reply(self) -> Any:
        assert self.pipe.poll(REPLY_S), "the worker does not answer"
        return self.pipe.recv()

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.reply()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.join()

    def close(self) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
        self.process.join()
        self.pipe.close()


StartWorker = Callable[..., WorkerProcess]
