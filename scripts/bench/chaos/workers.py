"""The processes that are killed: a trainer and rollouts, made of the product's own parts.

Each answers commands through a pipe; what happens in between is `("fault", point, action)`.
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from recipes import checkpoints
from recipes.checkpoints import Checkpoints
from rollout import Decoder, RolloutEngine, WeightsError
from rollout.actor import RolloutActor
from rollout.transport import PackedPrompts
from scripts.bench.chaos.faults import (
    Fault,
    FaultPoints,
    SafeSender,
    put_on_reader,
    put_on_writer,
    switch_protocol_off,
)
from scripts.bench.chaos.oracle import model_config, write_weights
from trainer_bridge.arena import WeightArena
from trainer_bridge.publication import Attachment, GateSettings, SharedGate

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "scripts.bench.chaos.workers"])

@dataclass(frozen=True)
class WorkerSettings:
    """attach_fault: strikes before the process has attached. guarded: False for the control."""

    attachment: Attachment
    seed: int
    guarded: bool
    attach_fault: Fault | None
    undo: bool
    checkpoints: Path


def attach(settings: WorkerSettings, points: FaultPoints, writable: bool) -> tuple[Any, Any]:
    """(model, gate) on the shared weights."""
    points.arm(settings.attach_fault)
    arena = WeightArena.attach(settings.attachment[0], writable)
    points.reached("attaching")
    model = Decoder(model_config(), device="meta")
    arena.bind(model, requires_grad=writable)
    gate_settings = GateSettings(
        quiesce_timeout_s=0.6, reader_timeout_s=1.0, intent_lease_s=0.1, undo=settings.undo
    )
    gate = SharedGate.attach(arena, settings.attachment[1], model, gate_settings)
    points.reached("attaching")
    if not settings.guarded:
        switch_protocol_off(gate)
    return model, gate


def serve_rollouts(pipe: Connection, settings: WorkerSettings) -> None:
    """`RolloutActor` itself, on a pipe in place of Ray."""
    torch.set_num_threads(1)
    send = SafeSender(pipe)
    points = FaultPoints(lambda point, action: send("fault", point, action))
    engines: list[RolloutEngine] = []

    def build() -> RolloutEngine:
        model, gate = attach(settings, points, writable=False)
        engine = RolloutEngine(
            model, gate=gate, max_batch_size=8, max_seq_len=160, exact=False, block_size=8
        )
        put_on_reader(points, gate, engine._core._runner)
        engines.append(engine)
        return engine

    try:
        actor = RolloutActor(build, 1)
    except WeightsError:  # whoever led to the weights has died: another way next time
        return
    send("ready", actor.attachment())
    while True:
        message = pipe.recv()
        if message[0] == "quit":
            return
        _, run_id, prompts, fault = message
        assert isinstance(prompts, PackedPrompts)
        points.arm(fault)
        try:
            for part in actor.run(run_id, prompts):
                if isinstance(part, WeightsError):
                    raise part
                send("part", run_id, part.unpack())
            engines[0].check_integrity()
            send("done", run_id)
        except Exception as error:
            send("failed", run_id, type(error).__name__, str(error))
        points.arm(None)


def serve_trainer(pipe: Connection, settings: WorkerSettings) -> None:
    """The writer's side: recover, update, write checkpoints."""
    torch.set_num_threads(1)
    send = SafeSender(pipe)
    points = FaultPoints(lambda point, action: send("fault", point, action))
    try:
        model, gate = attach(settings, points, writable=True)
    except WeightsError:
        return
    put_on_writer(points, gate)
    trainer = _Trainer(model, gate, settings, points)
    send("ready", gate.attachment())
    while True:
        name, fault, *arguments = pipe.recv()
        if name == "quit":
            return
        points.arm(fault)
        try:
            send("done", name, getattr(trainer, name)(*arguments))
        except Exception as error:
            send("failed", name, type(error).__name__, str(error))
        points.arm(None)


@dataclass
class _Trainer:
    model: Decoder
    gate: SharedGate
    settings: WorkerSettings
    points: FaultPoints

    def _write(self, version: int) -> int:
        write_weights(
            self.model, self.settings.seed, version, lambda: self.points.reached("mid-update")
        )
        return version

    def recover(self) -> int:
        def reload() -> None:
            self._write(self.gate.page.attempt)

        return self.gate.recover(reload)

    def update(self) -> int:
        return self.gate.write(None, self._write)

    def checkpoint(self, step: int) -> int:
        """Through the recipe's own writer; struck at its rename too."""

        def save(folder: Path) -> int:
            folder.mkdir()
            tensors = {name: p.detach() for name, p in self.model.named_parameters()}
            with self.gate.read() as version:
                self.points.reached("checkpoint half written")
                save_file(tensors, str(folder / "model.safetensors"))
                self.points.reached("checkpoint half written")
            return version

        flush = checkpoints.flush_folder

        def flush_and_strike(folder: Path) -> None:
            flush(folder)
            self.points.reached("checkpoint before rename")

        checkpoints.flush_folder = flush_and_strike
        try:
            Checkpoints(self.settings.checkpoints, keep=3).write(step, {}, save)
        finally:
            checkpoints.flush_folder = flush
        self.points.reached("checkpoint after rename")
        return step


def make_prompts(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """A few prompts and their output lengths."""
    prompts = [[rng.randrange(2, 96) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    return prompts, [rng.choice([4, 16, 60, 100]) for _ in prompts]


