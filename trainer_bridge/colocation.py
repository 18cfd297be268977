"""Colocation: one trainer and its rollout actors on one machine, on one copy of the weights.

    with Colocation("path/to/hf/folder", rollout_actors=2) as run:
        batch = run.pool.run_batch(prompts, params)
        stats = run.trainer.step(batch, advantages, algorithm="grpo")
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.actor import RolloutActor
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig
from rollout.exactness import Exactness, ExactnessRefused, alike
from rollout.model import Decoder, DecoderConfig
from rollout.policy import WeightsError
from rollout.pool import RolloutPool
from rollout.remote import ActorFailure, ActorLost, RemoteActor, wait_for
from rollout.tokenizer import Tokenizer
from trainer_bridge.arena import WeightArena
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.publication import Attachment, SharedGate
from trainer_bridge.receipt import WeightsEcho
from trainer_bridge.trainer_actor import TrainerActor, WeightsHandle
from trainer_bridge.trainer_config import TrainerConfig
from trainer_bridge.trainer_handle import TrainerHandle


class WeightsDiffer(WeightsError):
    """Processes of one run do not read the same weights."""


class Colocation:
    """Starts the actors on entry, ends them on exit, and leaves no process or memory behind.

    model_folder: a Hugging Face folder. run_seed: from which the seeds of prompts without one are
    derived. start_timeout_s: for all actors together. call_timeout_s: for one training step or
    one batch of rollouts. Uses the Ray that runs (`RAY_ADDRESS`, `ray job submit`, an earlier
    `ray.init`), else starts one and ends it with the run.

    checkpoint: a folder that `TrainerHandle.save_checkpoint` wrote, to go on from.
    heartbeat_timeout_s: silence after which an actor counts as hung and is killed. max_restarts:
    rollout actors started again in place of lost ones, in all; beyond, the others go on alone.

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
        checkpoint: str | Path | None = None,
        start_timeout_s: float = 180.0,
        call_timeout_s: float = 3600.0,
        heartbeat_timeout_s: float = 30.0,
        max_restarts: int = 10,
    ) -> None:
        if rollout_actors < 1:
            raise ValueError(f"rollout_actors must be at least 1, got {rollout_actors}")
        self._folder = Path(model_folder).absolute()
        self._rollout_actors = rollout_actors
        self._trainer_config = trainer or TrainerConfig()
        self._engine_config = engine or EngineConfig()
        self._run_seed = run_seed
        self._checkpoint = checkpoint
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._max_restarts = max_restarts
        self._weights: WeightsHandle
        self._attachments: dict[str, Attachment] = {}  # by rollout actor: ways to the weights
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
        self._start_everything(self._checkpoint)

    def _start_everything(self, checkpoint: str | Path | None) -> None:
        self._start_trainer(checkpoint, None)
        self.exactness = {"trainer": self._weights.exactness}
        self._start_pool()

    def _start_trainer(self, checkpoint: str | Path | None, attachment: Attachment | None) -> None:
        """A trainer process, on weights of its own or on those that `attachment` leads to."""
        threads = self._trainer_config.num_threads or os.cpu_count() or 1
        folder = None if checkpoint is None else str(Path(checkpoint).absolute())
        handle = self._remote(TrainerActor, threads).remote(
            str(self._folder), self._trainer_config, self._engine_config, folder, attachment
        )
        actor = RemoteActor("trainer", handle, self._heartbeat_timeout_s)
        if hasattr(self, "trainer"):
            self.trainer.replace(actor)
        else:
            self.trainer = TrainerHandle(actor, self._call_timeout_s, self._check_pool)
        self._weights = wait_for(
            handle.weights.remote(), "trainer", "load the model", self._start_timeout_s,
            self._check_pool,
        )  # fmt: skip

    def _start_pool(self) -> None:
        actors = {
            name: self.start_actor(name)
            for name in (f"rollout-{index}" for index in range(self._rollout_actors))
        }
        try:
            ready = {name: actor.describe.remote() for name, actor in actors.items()}
            for name, reference in ready.items():
                about = wait_for(reference, name, "attach to the weights", self._start_timeout_s)
                self.exactness[name] = about["exactness"]
                self._attachments[name] = about["attachment"]
            check_same_bits(self.exactness)
            self.pool = RolloutPool(
                actors,
                run_seed=self._run_seed,
                batch_timeout_s=self._call_timeout_s,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                source=self,
                max_restarts=self._max_restarts,
                start_timeout_s=self._start_timeout_s,
            )
        except BaseException:
            for actor in actors.values():
                ray.kill(actor)
            raise

    def start_actor(self, name: str) -> Any:
        """A new rollout process on the weights as they lie; for the pool (`ActorSource`)."""
        cores = os.cpu_count() or 1
        threads = self._engine_config.num_threads or max(1, cores // self._rollout_actors)
        ways = list(self._attachments.values())
        build = partial(attach_engine, self._weights, self._engine_config, ways)
        return self._remote(RolloutActor, threads).remote(build, threads)

    def admit_actor(self, name: str, actor: Any, about: dict[str, Any]) -> None:
        """`ExactnessRefused` if a new actor computes other bits than those that serve."""
        self._attachments[name] = about["attachment"]
        for _ in range(5):
            probed = wait_for(actor.probe.remote(), name, "probe", self._start_timeout_s)
            if self._same_bits(name, *probed):
                return
        raise ActorFailure(f"{name} could not be compared with others: the weights kept changing")

    def _same_bits(self, name: str, version: int, exactness: Exactness) -> bool:
        """Hold a new process against those that serve, on the same weights; False if the weights
        changed meanwhile. From then on it is listed under the bits that they started with."""
        peers = {peer: found for peer, found in self.pool.probe().items() if peer != name}
        for peer, (its_version, its_exactness) in peers.items():
            if its_version != version:
                return False
            check_same_bits({name: exactness, peer: its_exactness})
        self.exactness[name] = exactness
        if peers and exactness.probe is not None:
            known = self.exactness[next(iter(peers))].probe
            if known is not None:
                probe = replace(exactness.probe, fingerprint=known.fingerprint)
                self.exactness[name] = replace(exactness, probe=probe)
        return True

    def _check_pool(self, phase: str = "") -> None:
        """While the trainer is waited for: a stopped rollout process may hold what it waits for."""
        if hasattr(self, "pool"):
            with suppress(ActorLost):  # the last one; the next batch says so
                self.pool.members.check()

    def _remote(self, kind: type, threads: int) -> Any:
        """`kind` as a Ray actor on this node, where the arena lies.

        No logical CPUs are reserved: trainer and engines take turns on the same cores. OpenMP
        workers therefore sleep while they wait: where cores are contended, spinning ones made a
        training step seven times as slow (scripts/bench/NOTES.md).
        """
        here = ray.get_runtime_context().get_node_id()
        return ray.remote(kind).options(
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={
                "env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            },
        )

    def restart_trainer(self, checkpoint: str | Path | None) -> int:
        """After `TrainerLost`, or to go back to a checkpoint: a new trainer on the weights that
        the rollout actors still hold. Returns the policy version it published.

        checkpoint: what to go on from; None = from the beginning, the model folder. Weights and
        optimizer are those of the checkpoint whatever the old trainer left, under a version never
        used before. If no rollout actor is left either, all start afresh.
        """
        self.trainer.kill()
        attachments: list[Attachment] = []
        with suppress(ActorLost):  # the last one is lost, too
            attachments = list(self.pool.attachments().values())
        if not attachments:
            self.pool.close()
            self._attachments.clear()
            self._start_everything(checkpoint)
        else:
            self._start_trainer(checkpoint, attachments[0])
            version = self.trainer.policy_version
            if not self._same_bits("trainer", version, self._weights.exactness):
                raise ActorFailure(f"the new trainer published {version}, others read another one")
            self.pool.members.refill()
        return self.trainer.policy_version

    def verify_weights(self, *, checksum: bool = True) -> dict[str, WeightsEcho]:
        """What every process reads, said by itself; `WeightsDiffer` unless all read the same
        version in the same memory, byte for byte. Call it while no update runs.

        checksum: read and hash all bytes in every process; False compares version and memory.
        """
        echoes = {"trainer": self.trainer.weights_echo(checksum=checksum)}
        echoes |= self.pool.weights_echo(checksum=checksum)
        check_same_weights(echoes)
        return echoes

    def confirm_publication(self, version: int) -> None:
        """Every rollout actor says that `version` is what it reads; `WeightsDiffer` if not."""
        echoes = self.pool.weights_echo()
        check_same_weights(echoes)
        for name, echo in echoes.items():
            if echo.version != version:
                raise WeightsDiffer(
                    f"policy version {version} was published, {name} reads {_described(echo)}"
                )

    def memory(self) -> dict[str, int]:
        """Private memory (USS) of each process in bytes; the shared weights are not in it."""
        return {"trainer": self.trainer.memory_uss(), **self.pool.memory_uss()}

    def close(self) -> None:
        """End the actors, and Ray if it was started here. May be called twice."""
        if ray.is_initialized():
            if hasattr(self, "trainer"):
                self.trainer.kill()
            if hasattr(self, "pool"):
                self.pool.close()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


def check_same_weights(echoes: Mapping[str, WeightsEcho]) -> None:
    """`WeightsDiffer` unless all say the same."""
    first = next(iter(echoes), "")
    for name, echo in echoes.items():
        if echo != echoes[first]:
            raise WeightsDiffer(
                f"{name} reads {_described(echo)}, {first} {_described(echoes[first])}"
            )


def _described(echo: WeightsEcho) -> str:
    return (
        f"policy version {echo.version}, {echo.tensors} tensors in memory {echo.memory[:8]}"
        + (f", checksum {echo.checksum}" if echo.checksum else "")
    )


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


def attach_engine(
    weights: WeightsHandle,
    config: EngineConfig,
    ways: Sequence[Attachment] = (),
    whole_within_s: float = 120.0,
) -> RolloutEngine:
    """An engine in this process on the trainer's weights, mapped read-only; nothing is copied.

    ways: handles through other processes that have the weights, should the trainer be gone. Waits
    at most `whole_within_s` for weights that are torn: another trainer may be about to mend them.
    """
    folder = Path(weights.model_folder)
    shape = DecoderConfig.from_folder(folder)
    model = Decoder(shape, device="meta", operators=weights.operators)
    arena, gate_handle = _first_way([(weights.arena, weights.gate), *ways])
    arena.bind(model, requires_grad=False)
    gate = SharedGate.attach(arena, gate_handle, model)
    gate.wait_until_whole(whole_within_s)
    settings = asdict(config)
    del settings["num_threads"], settings["operators"]
    settings["attention_backend"] = weights.attention_backend
    return RolloutEngine(model, Tokenizer.from_folder(folder), gate=gate, **settings)


def _first_way(ways: Sequence[Attachment]) -> tuple[WeightArena, MemoryHandle]:
    """The weights through the first process that still has them."""
    for arena, gate in ways[:-1]:
        with suppress(WeightsError):
            return WeightArena.attach(arena), gate
    arena, gate = ways[-1]
    return WeightArena.attach(arena), gate
