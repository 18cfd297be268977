"""Colocation: one trainer and its rollout actors, on one copy of the weights for each machine.

    with Colocation("path/to/hf/folder", rollout_actors=2) as run:
        batch = run.pool.run_batch(prompts, params)
        stats = run.trainer.step(batch, advantages, algorithm="grpo")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from rollout.actor import RolloutActor
from rollout.engine_config import EngineConfig
from rollout.exactness import Exactness
from rollout.model import DecoderConfig
from rollout.policy import WeightsError
from rollout.pool import RolloutPool
from rollout.remote import ActorDied, ActorFailure, ActorLost, RemoteActor, wait_for
from rollout.tokenizer import Tokenizer
from trainer_bridge.agreement import WeightsDiffer, check_same_bits, check_same_weights, described
from trainer_bridge.attach import attach_engine
from trainer_bridge.cluster import connect
from trainer_bridge.mirror_actor import PIECE_BYTES, MirrorActor
from trainer_bridge.mirrors import Mirrors
from trainer_bridge.placement import HOME, Placement, Reservation
from trainer_bridge.publication import Attachment
from trainer_bridge.receipt import WeightsEcho
from trainer_bridge.trainer_actor import TrainerActor, WeightsHandle
from trainer_bridge.trainer_config import TrainerConfig
from trainer_bridge.trainer_handle import TrainerHandle


class Colocation:
    """Starts the actors on entry, ends them on exit, and leaves no process or memory behind.

    model_folder: a Hugging Face folder. run_seed: from which the seeds of prompts without one are
    derived. start_timeout_s: for all actors together. call_timeout_s: for one training step or
    one batch of rollouts. Uses the Ray that runs (`RAY_ADDRESS`, `ray job submit`, an earlier
    `ray.init`), else starts one and ends it with the run.

    placement: how many nodes, and their GPUs; without it the driver's node alone. On further nodes
    the weights lie once more, in a mirror that follows every publication; an actor there samples
    nothing before it has.

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
        placement: Placement | None = None,
        run_seed: int = 0,
        checkpoint: str | Path | None = None,
        start_timeout_s: float = 180.0,
        call_timeout_s: float = 3600.0,
        heartbeat_timeout_s: float = 30.0,
        max_restarts: int = 10,
    ) -> None:
        self._folder = Path(model_folder).absolute()
        self._rollout_actors = rollout_actors
        self._placement = placement or Placement()
        if rollout_actors < self._placement.nodes:
            raise ValueError(
                f"rollout_actors must be at least {self._placement.nodes}, one for each node, "
                f"got {rollout_actors}"
            )
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
        self._room: Reservation
        self._mirrors = Mirrors(
            range(1, self._placement.nodes), self._start_mirror, self._snapshot,
            self._mirror_lost, self._check_pool, heartbeat_timeout_s, call_timeout_s,
        )  # fmt: skip
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
        self._owns_ray = connect()
        self._room = Reservation(self._placement, self._rollout_actors, self._start_timeout_s)
        self._start_everything(self._checkpoint)

    def _start_everything(self, checkpoint: str | Path | None) -> None:
        self._start_trainer(checkpoint, None)
        self.exactness = {"trainer": self._weights.exactness}
        self._start_pool()

    def _start_trainer(self, checkpoint: str | Path | None, attachment: Attachment | None) -> None:
        """A trainer process, on weights of its own or on those that `attachment` leads to."""
        threads = self._trainer_config.num_threads or os.cpu_count() or 1
        folder = None if checkpoint is None else str(Path(checkpoint).absolute())
        handle = self._room.trainer(TrainerActor, threads).remote(
            str(self._folder), self._trainer_config, self._engine_config, folder, attachment
        )
        actor = RemoteActor("trainer", handle, self._heartbeat_timeout_s)
        if hasattr(self, "trainer"):
            self.trainer.replace(actor)
        else:
            self.trainer = TrainerHandle(
                actor, self._call_timeout_s, self._check_pool, self._published
            )
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

    def node_of(self, name: str) -> int:
        """On which node of the placement a process is."""
        kind, _, number = name.rpartition("-")
        if kind == "rollout":
            return self._placement.node_of(int(number))
        return int(number) if kind == "mirror" else HOME

    # ---------------------------------------------------------------- for the pool (`ActorSource`)

    def start_actor(self, name: str) -> Any:
        """A new rollout process on the weights of its node, as they lie; None without the node."""
        node = self.node_of(name)
        if not self._room.has(node):
            return None
        ways = [way for peer, way in self._attachments.items() if self.node_of(peer) == node]
        mirror = self._mirrors.of_node(node)
        build = partial(
            attach_engine, self._weights, self._engine_config, ways, mirror=mirror,
            whole_within_s=self._start_timeout_s,
        )  # fmt: skip
        kind, threads = self._room.rollout(RolloutActor, node, self._engine_config.num_threads)
        return kind.remote(build, threads)

    def admit_actor(
        self, name: str, about: dict[str, Any], probes: Mapping[str, tuple[int, Exactness]]
    ) -> bool:
        """`ExactnessRefused` if a new actor computes other bits than those that serve; False if
        none of them has read the same weights."""
        self._attachments[name] = about["attachment"]
        return self._same_bits(name, *probes[name], probes)

    def check(self) -> None:
        """Look after what rollout actors depend on: the mirrors of their nodes."""
        self._mirrors.check()

    def unreadable(self, name: str, error: WeightsError) -> Exception:
        """The error to raise for weights that an actor cannot read. On another node than the
        trainer's, the mirror is ended, all that read it are lost, and new ones take their place."""
        node = self.node_of(name)
        if node == HOME:
            return error
        lost = ActorDied(f"{name} cannot read the mirror of its node: {error}")
        self._mirrors.lose(node, lost)
        return lost

    def _same_bits(
        self,
        name: str,
        version: int,
        exactness: Exactness,
        probes: Mapping[str, tuple[int, Exactness]],
    ) -> bool:
        """Hold a new process against those that serve and read the same version; False if none
        does. From then on it is listed under the bits that they started with."""
        peers = {peer: found for peer, found in probes.items() if peer != name}
        alike = {peer: found for peer, (its_version, found) in peers.items()
                 if its_version == version}  # fmt: skip
        if peers and not alike:
            return False
        check_same_bits({name: exactness, **alike})
        self.exactness[name] = exactness
        if alike and exactness.probe is not None:
            known = self.exactness[next(iter(alike))].probe
            if known is not None:
                probe = replace(exactness.probe, fingerprint=known.fingerprint)
                self.exactness[name] = replace(exactness, probe=probe)
        return True

    # ---------------------------------------------------------------- after a publication

    def _published(self) -> None:
        """The weights may have changed: other nodes follow, and sample nothing before they have."""
        if self._placement.nodes > 1:
            self.pool.members.min_version = self.trainer.policy_version
            self._mirrors.follow()

    def _snapshot(self) -> list[Any]:
        return self.trainer.snapshot(self._weights.arena.layout.total_bytes, PIECE_BYTES)

    def _start_mirror(self, node: int) -> Any:
        return self._room.actor(MirrorActor, node, 1).remote(self._weights.arena.layout)

    def _mirror_lost(self, node: int, error: ActorLost) -> None:
        """Whoever read that mirror has weights that nobody updates any more."""
        if not hasattr(self, "pool"):
            return
        for name, actor in self.pool.members.serving.items():
            if self.node_of(name) == node:
                self.pool.members.lose(actor, ActorDied(f"{name} lost its weights: {error}"))

    def _check_pool(self, phase: str = "") -> None:
        """While the trainer is waited for: a stopped rollout process may hold what it waits for."""
        if hasattr(self, "pool"):
            with suppress(ActorLost):  # the last one; the next batch says so
                self.pool.members.check()

    def restart_trainer(self, checkpoint: str | Path | None) -> int:
        """After `TrainerLost`, or to go back to a checkpoint: a new trainer on the weights that
        the rollout actors beside it still hold. Returns the policy version it published.

        checkpoint: what to go on from; None = from the beginning, the model folder. Weights and
        optimizer are those of the checkpoint whatever the old trainer left, under a version never
        used before. If no rollout actor of its node is left either, all start afresh.
        """
        self.trainer.kill()
        attachments: list[Attachment] = []
        with suppress(ActorLost):  # the last one is lost, too
            found = self.pool.attachments()
            attachments = [way for name, way in found.items() if self.node_of(name) == HOME]
        if not attachments:
            self.pool.close()
            self._mirrors.close()
            self._attachments.clear()
            self._start_everything(checkpoint)
        else:
            self._start_trainer(checkpoint, attachments[0])
            version = self.trainer.policy_version
            if not self._same_bits(
                "trainer", version, self._weights.exactness, self.pool.probe()
            ):
                raise ActorFailure(f"the new trainer published {version}, others read another one")
            self._published()
            self.pool.members.refill()
        return self.trainer.policy_version

    def verify_weights(self, *, checksum: bool = True) -> dict[str, WeightsEcho]:
        """What every process reads, said by itself; `WeightsDiffer` unless all read the same
        version, byte for byte, and in one memory on each node. Call it while no update runs.

        checksum: read and hash all bytes in every process; False compares version and memory.
        """
        self._mirrors.settle()
        echoes = {"trainer": self.trainer.weights_echo(checksum=checksum)}
        echoes |= self._mirrors.ask("weights_echo", self._call_timeout_s, checksum)
        echoes |= self.pool.weights_echo(checksum=checksum)
        check_same_weights(echoes, self.node_of)
        return echoes

    def confirm_publication(self, version: int) -> None:
        """Every rollout actor says that `version` is what it reads; `WeightsDiffer` if not."""
        self._mirrors.settle()
        echoes = self.pool.weights_echo()
        check_same_weights(echoes, self.node_of)
        for name, echo in echoes.items():
            if echo.version != version:
                raise WeightsDiffer(
                    f"policy version {version} was published, {name} reads {described(echo)}"
                )

    def memory(self) -> dict[str, int]:
        """Private memory (USS) of each process in bytes; the shared weights are not in it."""
        mirrors = self._mirrors.ask("get_stats", 60.0)
        return {
            "trainer": self.trainer.memory_uss(),
            **{name: stats["memory_uss"] for name, stats in mirrors.items()},
            **self.pool.memory_uss(),
        }

    def close(self) -> None:
        """End the actors, and Ray if it was started here. May be called twice."""
        if ray.is_initialized():
            if hasattr(self, "trainer"):
                self.trainer.kill()
            if hasattr(self, "pool"):
                self.pool.close()
            self._mirrors.close()
            if hasattr(self, "_room"):
                self._room.release()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False
