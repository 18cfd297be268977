"""Colocation: one trainer and its rollout actors on one machine, on one copy of the weights.

    with Colocation("path/to/hf/folder", rollout_actors=2) as run:
        batch = run.pool.run_batch(prompts, params)
        stats = run.trainer.step(batch, advantages, algorithm="grpo")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.actor import RolloutActor
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig
from rollout.exactness import Exactness, ExactnessRefused, alike
from rollout.model import Decoder, DecoderConfig
from rollout.pool import RolloutPool
from rollout.remote import wait_for
from rollout.rollout_batch import RolloutBatch
from rollout.tokenizer import Tokenizer
from trainer_bridge.algorithm import Algorithm
from trainer_bridge.arena import WeightArena
from trainer_bridge.publication import SharedGate
from trainer_bridge.trainer_actor import TrainerActor, WeightsHandle
from trainer_bridge.trainer_config import TrainerConfig


class TrainerHandle:
    """The trainer actor as an object: calls wait, with a deadline that names the phase."""

    name = "trainer"

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s

    def step(
        self,
        batch: RolloutBatch,
        advantages: NDArray[np.float32] | None,
        algorithm: Algorithm | str = "grpo",
    ) -> dict[str, float]:
        """Forward, backward, `apply_weight_update`; metrics. See `Learner.step`."""
        return self._call("step", batch, advantages, algorithm)  # type: ignore[no-any-return]

    def apply_weight_update(self, version: int | None, update: Callable[[Decoder], Any]) -> Any:
        """Run `update(model)` in the trainer, in place, and publish. See `TrainerActor`."""
        return self._call("apply_weight_update", version, update)

    def save_checkpoint(self, folder: str) -> int:
        """Write the weights as a Hugging Face folder; returns the version that was written."""
        return self._call("save_checkpoint", str(folder))  # type: ignore[no-any-return]

    def get_stats(self) -> dict[str, Any]:
        return self._call("get_stats")  # type: ignore[no-any-return]

    def memory_uss(self) -> int:
        return self._call("memory_uss")  # type: ignore[no-any-return]

    @property
    def policy_version(self) -> int:
        return int(self.get_stats()["policy_version"])

    def _call(self, method: str, *arguments: Any) -> Any:
        reference = getattr(self._actor, method).remote(*arguments)
        return wait_for(reference, self.name, method, self._timeout_s)


class Colocation:
    """Starts the actors on entry, ends them on exit, and leaves no process or memory behind.

    model_folder: a Hugging Face folder. run_seed: from which the seeds of prompts without one are
    derived. start_timeout_s: for all actors together. call_timeout_s: for one training step or
    one batch of rollouts. Uses the Ray that runs (`RAY_ADDRESS`, `ray job submit`, an earlier
    `ray.init`), else starts one and ends it with the run.

    exactness: what trainer and actors have settled, by name. Where the mode is on, they have also
    shown each other the same bits (`ExactnessRefused` otherwise).
    """

    def __init__(
        self,
        model_folder: str | Path,
        rollout_actors: int = 2,
        trainer: TrainerConfig | None = None,
        engine: EngineConfig | None = None,
        *,
        run_seed: int = 0,
        start_timeout_s: float = 180.0,
        call_timeout_s: float = 3600.0,
    ) -> None:
        if rollout_actors < 1:
            raise ValueError(f"rollout_actors must be at least 1, got {rollout_actors}")
        self._folder = Path(model_folder).absolute()
        self._rollout_actors = rollout_actors
        self._trainer_config = trainer or TrainerConfig()
        self._engine_config = engine or EngineConfig()
        self._run_seed = run_seed
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._handles: list[Any] = []
        self._owns_ray = False
        # Wrong folders fail here, before anything is started.
        DecoderConfig.from_folder(self._folder)
        self.tokenizer = Tokenizer.from_folder(self._folder)
        self.trainer: TrainerHandle
        self.pool: RolloutPool
        self.exactness: dict[str, Exactness] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._owns_ray = True
            ray.init(include_dashboard=False, logging_level="ERROR")
        cores = os.cpu_count() or 1
        trainer = self._remote(TrainerActor, self._trainer_config.num_threads or cores).remote(
            str(self._folder), self._trainer_config, self._engine_config
        )
        self._handles.append(trainer)
        weights = wait_for(
            trainer.weights.remote(), "trainer", "load the model", self._start_timeout_s
        )
        self.trainer = TrainerHandle(trainer, self._call_timeout_s)
        self.exactness = {"trainer": weights.exactness}
        threads = self._engine_config.num_threads or max(1, cores // self._rollout_actors)
        build = partial(attach_engine, weights, self._engine_config)
        actors: dict[str, Any] = {}
        for index in range(self._rollout_actors):
            actor = self._remote(RolloutActor, threads).remote(build, threads)
            self._handles.append(actor)
            actors[f"rollout-{index}"] = actor
        ready = {name: actor.describe.remote() for name, actor in actors.items()}
        for name, reference in ready.items():
            about = wait_for(reference, name, "attach to the weights", self._start_timeout_s)
            self.exactness[name] = about["exactness"]
        check_same_bits(self.exactness)
        self.pool = RolloutPool(
            actors, run_seed=self._run_seed, batch_timeout_s=self._call_timeout_s
        )

    def _remote(self, kind: type, threads: int) -> Any:
        """`kind` as a Ray actor on this node, where the arena lies.

        No logical CPUs are reserved: trainer and engines take turns on the same cores. OpenMP
        workers therefore sleep while they wait: where cores are contended, spinning ones made a
        training step seven times as slow (scripts/bench/NOTES.md).
        """
        here = ray.get_runtime_context().get_node_id()
        return ray.remote(kind).options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={
                "env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            },
        )

    def memory(self) -> dict[str, int]:
        """Private memory (USS) of each process in bytes; the shared weights are not in it."""
        return {"trainer": self.trainer.memory_uss(), **self.pool.memory_uss()}

    def close(self) -> None:
        """End the actors, and Ray if it was started here. May be called twice."""
        if ray.is_initialized():
            for actor in self._handles:
                ray.kill(actor)
        self._handles.clear()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


def check_same_bits(exactness: Mapping[str, Exactness]) -> None:
    """`ExactnessRefused` if processes whose mode is on have probed the same weights to other
    bits."""
    groups = alike(exactness)
    if len(groups) > 1:
        sides = " and ".join("{" + ", ".join(names) + "}" for names in groups)
        raise ExactnessRefused(
            f"{sides} compute the same probe on the same weights to different bits: their "
            "machines, compilers or libraries differ. Run them on equal machines, or with "
            "EngineConfig(exact=False)"
        )


def attach_engine(weights: WeightsHandle, config: EngineConfig) -> RolloutEngine:
    """An engine in this process on the trainer's weights, mapped read-only; nothing is copied."""
    folder = Path(weights.model_folder)
    shape = DecoderConfig.from_folder(folder)
    model = Decoder(shape, device="meta", operators=weights.operators)
    arena = WeightArena.attach(weights.arena)
    arena.bind(model, requires_grad=False)
    gate = SharedGate.attach(arena, weights.gate, model)
    settings = asdict(config)
    del settings["num_threads"], settings["operators"]
    settings["attention_backend"] = weights.attention_backend
    return RolloutEngine(model, Tokenizer.from_folder(folder), gate=gate, **settings)
