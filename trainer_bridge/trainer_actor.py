"""TrainerActor: the process that owns the weights, the optimizer and the gate's writing side."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from rollout.engine_config import EngineConfig
from rollout.exactness import Exactness, settle
from rollout.model import Decoder, DecoderConfig, attention_for, load_weights, save_pretrained
from rollout.process_identity import ProcessIdentity, end_on_sigterm
from rollout.rollout_batch import RolloutBatch
from rollout.tokenizer import Tokenizer
from trainer_bridge.algorithm import Algorithm
from trainer_bridge.arena import ArenaHandle, ArenaLayout, WeightArena
from trainer_bridge.gate_settings import GateSettings
from trainer_bridge.learner import Learner
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.publication import Attachment, SharedGate
from trainer_bridge.receipt import WeightsEcho
from trainer_bridge.token_columns import TokenColumns
from trainer_bridge.trainer_config import TrainerConfig
from trainer_bridge.trainer_state import read_trainer_state, write_trainer_state

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightsHandle:
    """All a rollout actor needs to read the trainer's weights. Pickleable, a few kilobytes.

    operators, attention_backend: the names of those the trainer computes with; whoever computes
    with others has other bits.
    """

    model_folder: str
    arena: ArenaHandle
    gate: MemoryHandle
    operators: str
    attention_backend: str
    exactness: Exactness


class TrainerActor:
    """Loads a model folder straight into a new arena and trains it there.

    Made a Ray actor by `Colocation`, with `max_concurrency >= 4` so that it answers while it
    trains. Whatever reads or changes weights runs on one thread, so these calls take turns.
    engine: of its settings the trainer shares `operators`, `attention_backend` and `exact`.

    checkpoint: a folder that `save_checkpoint` wrote, to go on from; None = from the model folder.
    attachment: the handles of an arena that outlived its trainer (`RolloutActor.attachment`). This
    trainer takes it over: the old one is fenced off, the weights become those of the checkpoint in
    place, under a version never used, and whoever reads them goes on reading.
    """

    def __init__(
        self,
        model_folder: str,
        config: TrainerConfig,
        engine: EngineConfig | None = None,
        checkpoint: str | None = None,
        attachment: Attachment | None = None,
    ) -> None:
        end_on_sigterm()
        threads = config.num_threads or os.cpu_count() or 1
        self._trainer_thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, (threads,))
        self._folder = model_folder
        self._doing = "loading the model"
        self._allowed: dict[int, threading.Event] = {}
        self._trainer_thread.submit(
            self._load, config, engine or EngineConfig(), checkpoint, attachment
        ).result()

    def _load(
        self,
        config: TrainerConfig,
        engine: EngineConfig,
        checkpoint: str | None,
        attachment: Attachment | None,
    ) -> None:
        folder = Path(self._folder)
        self._model = Decoder(
            DecoderConfig.from_folder(folder), device="meta", operators=engine.operators
        )
        settings = GateSettings(undo=config.undo)
        if attachment is None:
            self._arena = WeightArena.create(ArenaLayout.for_module(self._model))
            self._arena.bind(self._model, requires_grad=True)
            self._gate = SharedGate.create(self._arena, self._model, settings)
        else:
            self._arena = WeightArena.attach(attachment[0], writable=True)
            self._arena.bind(self._model, requires_grad=True)
            self._gate = SharedGate.attach(self._arena, attachment[1], self._model, settings)
        backend = attention_for(self._model, engine.attention_backend)
        self._learner = Learner(self._model, self._gate, config, backend)
        state = None if checkpoint is None else read_trainer_state(Path(checkpoint))

        def reload() -> None:
            load_weights(self._model, folder if checkpoint is None else Path(checkpoint))
            self._learner.load_state_dict(None if state is None else state.learner)

        if attachment is None:
            reload()
            exactness = settle(engine.exact, self._model, backend)
            self._gate.open(0 if state is None else state.policy_version)
        else:
            whole = self._gate.version
            if self._gate.recover(reload) == whole:
                self._gate.write(None, lambda target: reload())
            exactness = settle(engine.exact, self._model, backend)
        self._weights = WeightsHandle(
            self._folder,
            self._arena.handle(),
            self._gate.handle(),
            self._model.operators.name,
            backend.name,
            exactness,
        )

    def weights(self) -> WeightsHandle:
        """What `attach_engine` needs; valid while this process lives."""
        return self._weights

    def step(
        self,
        batch: RolloutBatch,
        advantages: NDArray[np.float32] | None,
        algorithm: Algorithm | str,
        columns: TokenColumns | None = None,
        hold: int | None = None,
    ) -> dict[str, float]:
        """See `Learner.step`. hold: the weights change only after `allow_update` of that number."""
        if hold is None:
            return self._run("step", self._learner.step, batch, advantages, algorithm, columns)
        allowed = self._allowed.setdefault(hold, threading.Event())

        def wait() -> None:
            self._doing = "waiting for the rollouts"
            allowed.wait()
            self._doing = "busy with step"

        try:
            return self._run(
                "step", self._learner.step, batch, advantages, algorithm, columns, wait
            )
        finally:
            self._allowed.pop(hold, None)

    def allow_update(self, hold: int) -> None:
        """Rollouts of the old weights have ended: the step that holds may change them."""
        self._allowed.setdefault(hold, threading.Event()).set()

    def score_tokens(self, batch: RolloutBatch) -> TokenColumns:
        """What reference policy and critic say of the batch's tokens."""
        return self._run("score_tokens", self._learner.score_tokens, batch)

    def reset_from_policy(self, *names: str) -> None:
        """See `Learner.reset_from_policy`."""
        self._run("reset_from_policy", self._learner.reset_from_policy, *names)

    def apply_weight_update(self, version: int | None, update: Callable[[Decoder], Any]) -> Any:
        """Run `update(model)` under the gate and publish; returns what it returns.

        Parameters must be changed in place. version: None = live + 1.
        """
        if not callable(update):
            raise TypeError(f"update must be callable, got {type(update).__name__}")

        def run(target: int) -> Any:
            with torch.no_grad():
                return update(self._model)

        return self._run("apply_weight_update", self._gate.write, version, run)

    def save_checkpoint(self, folder: str) -> int:
        """Write a Hugging Face folder that holds, beside weights and tokenizer, all that training
        goes on from (`trainer_state.pt`); returns the version that was written.

        Raises what a reader of torn or poisoned weights gets: such are never saved.
        """

        def save() -> int:
            tokenizer = Tokenizer.from_folder(Path(self._folder))
            with self._gate.read() as version:
                save_pretrained(self._model, Path(folder), tokenizer)
                write_trainer_state(Path(folder), version, self._learner.state_dict())
            return version

        return self._run("save_checkpoint", save)

    def snapshot(self, piece_bytes: int) -> Iterator[int | NDArray[np.uint8]]:
        """The version and then all bytes of the weights, in pieces, for the mirrors of other nodes.

        Ray copies each piece as it comes; updates wait meanwhile, readers do not.
        """
        with self._gate.read() as version:
            yield version
            yield from self._arena.pieces(piece_bytes)

    def weights_echo(self, checksum: bool) -> WeightsEcho:
        """What this process reads and trains: `SharedGate.echo`."""
        return self._run("weights_echo", self._gate.echo, checksum)

    def heartbeat(self) -> str:
        """Answered at once by a process that is alive."""
        return (
            f"{self._doing}, {self._learner.updates} updates, policy version "
            f"{self._gate.version}, at {time.strftime('%H:%M:%S')}"
        )

    def process_identity(self) -> ProcessIdentity:
        """Which process this is, for whoever may have to end it."""
        return ProcessIdentity.of_this()

    def get_stats(self) -> dict[str, Any]:
        """Version, optimizer steps, size of the weights and of a publication."""
        return {
            "pid": os.getpid(),
            "policy_version": self._gate.version,
            "updates": self._learner.updates,
            "arena_bytes": self._arena.layout.total_bytes,
        }

    def _run(self, name: str, work: Callable[..., T], *arguments: Any) -> T:
        """`work` on the trainer's thread, after what was asked for before."""

        def named() -> T:
            self._doing = f"busy with {name}"
            try:
                return work(*arguments)
            finally:
                self._doing = f"idle after {name}"

        return self._trainer_thread.submit(named).result()

    def memory_uss(self) -> int:
        """Bytes that only this process holds; the arena counts nowhere while it is shared."""
        return int(psutil.Process().memory_full_info().uss)
