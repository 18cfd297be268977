"""TrainerActor: the process that owns the weights, the optimizer and the gate's writing side."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from rollout.engine_config import EngineConfig
from rollout.exactness import Exactness, settle
from rollout.model import Decoder, DecoderConfig, attention_for, load_weights, save_pretrained
from rollout.rollout_batch import RolloutBatch
from rollout.tokenizer import Tokenizer
from trainer_bridge.algorithm import Algorithm
from trainer_bridge.arena import ArenaHandle, ArenaLayout, WeightArena
from trainer_bridge.learner import Learner
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.publication import SharedGate
from trainer_bridge.trainer_config import TrainerConfig


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

    Made a Ray actor by `Colocation`, with `max_concurrency >= 2` so that it answers while it
    trains. Whatever reads or changes weights runs on one thread, so these calls take turns.
    engine: of its settings the trainer shares `operators`, `attention_backend` and `exact`.
    """

    def __init__(
        self, model_folder: str, config: TrainerConfig, engine: EngineConfig | None = None
    ) -> None:
        threads = config.num_threads or os.cpu_count() or 1
        self._trainer_thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, (threads,))
        self._folder = model_folder
        self._trainer_thread.submit(self._load, config, engine or EngineConfig()).result()

    def _load(self, config: TrainerConfig, engine: EngineConfig) -> None:
        model_folder = self._folder
        shape = DecoderConfig.from_folder(Path(model_folder))
        self._model = Decoder(shape, device="meta", operators=engine.operators)
        self._arena = WeightArena.create(ArenaLayout.for_module(self._model))
        self._arena.bind(self._model, requires_grad=True)
        load_weights(self._model, Path(model_folder))
        self._gate = SharedGate.create(self._arena, self._model)
        backend = attention_for(self._model, engine.attention_backend)
        exactness = settle(engine.exact, self._model, backend)
        self._gate.open()
        self._learner = Learner(self._model, self._gate, config, backend)
        self._weights = WeightsHandle(
            model_folder,
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
    ) -> dict[str, float]:
        """See `Learner.step`."""
        return self._trainer_thread.submit(
            self._learner.step, batch, advantages, algorithm
        ).result()

    def apply_weight_update(self, version: int | None, update: Callable[[Decoder], Any]) -> Any:
        """Run `update(model)` under the gate and publish; returns what it returns.

        Parameters must be changed in place. version: None = live + 1.
        """
        if not callable(update):
            raise TypeError(f"update must be callable, got {type(update).__name__}")

        def run(target: int) -> Any:
            with torch.no_grad():
                return update(self._model)

        return self._trainer_thread.submit(self._gate.write, version, run).result()

    def save_checkpoint(self, folder: str) -> int:
        """Write the weights as a Hugging Face folder; returns the version that was written."""

        def save() -> int:
            tokenizer = Tokenizer.from_folder(Path(self._folder))
            save_pretrained(self._model, Path(folder), tokenizer)
            return self._gate.version

        return self._trainer_thread.submit(save).result()

    def checksum(self) -> tuple[int, str]:
        """Version and hash of the weights' bytes, taken while no update runs."""
        return self._trainer_thread.submit(
            lambda: (self._gate.version, self._arena.checksum())
        ).result()

    def get_stats(self) -> dict[str, Any]:
        """Version, optimizer steps, size of the weights and of a publication."""
        return {
            "pid": os.getpid(),
            "policy_version": self._gate.version,
            "updates": self._learner.updates,
            "arena_bytes": self._arena.layout.total_bytes,
        }

    def memory_uss(self) -> int:
        """Bytes that only this process holds; the arena counts nowhere while it is shared."""
        return int(psutil.Process().memory_full_info().uss)
