"""RolloutActor: a process that owns one engine, its scheduler and its KV, on shared weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

import psutil
import torch

from rollout.engine import RolloutEngine
from rollout.exactness import Exactness
from rollout.open_batch import OpenBatch
from rollout.policy import WeightsError
from rollout.process_identity import ProcessIdentity, end_on_sigterm
from rollout.transport import FinishedPrompts, PackedPrompts

PART_S = 0.25
"""How often finished prompts leave an actor that still computes others."""


class StaleWeights(WeightsError):
    """The weights this actor reads are older than the version it was asked to sample with."""


class RolloutActor:
    """A shell around `RolloutEngine`, made a Ray actor by whoever starts it (`ray.remote`).

    build_engine: called once in the actor's process; attaches to the weights. num_threads: CPU
    threads of this process. Give it `max_concurrency >= 4`: each `run` occupies one of Ray's
    threads, and the other calls, heartbeats first, must be answered meanwhile.

    All computing is done on one scheduler thread, whichever of Ray's threads asks: OpenMP keeps a
    team of workers, and malloc an arena, for every thread that ever computed.
    """

    def __init__(self, build_engine: Callable[[], RolloutEngine], num_threads: int) -> None:
        end_on_sigterm()
        self._scheduler_thread = ThreadPoolExecutor(
            1, "scheduler", torch.set_num_threads, (num_threads,)
        )
        self._engine = self._scheduler_thread.submit(build_engine).result()
        self._runs: dict[int, OpenBatch] = {}

    def run(
        self, run_id: int, prompts: PackedPrompts, min_version: int = 0, wait_s: float = 0.0
    ) -> Iterator[FinishedPrompts | WeightsError]:
        """Sample every prompt; whole prompts are handed out while others are still computed.

        A Ray streaming generator: what was handed out survives this process. run_id: for
        `abort_run`. If the weights cannot be read, the last thing handed out is why (so that Ray
        does not log it where nobody waits any more): `StaleWeights` if the live version is still
        below `min_version` after `wait_s`, `TornWeights`, `PoisonedWeights`, `UpdateBusy`.
        """
        try:
            deadline = time.monotonic() + wait_s
            while self._engine.policy_version < min_version and time.monotonic() < deadline:
                time.sleep(0.001)
            if self._engine.policy_version < min_version:
                raise StaleWeights(
                    f"asked for rollouts of policy version {min_version} or later, but the "
                    f"weights here are version {self._engine.policy_version}"
                )
            yield from self._parts(run_id, prompts)
        except WeightsError as error:
            yield error

    def _parts(self, run_id: int, prompts: PackedPrompts) -> Iterator[FinishedPrompts]:
        batch = self._runs[run_id] = self._engine.open_batch(prompts.unpack())
        try:
            computing = self._scheduler_thread.submit(batch.compute)
            while not wait_for_futures([computing], PART_S).done:
                if rollouts := batch.take_finished():
                    yield FinishedPrompts.pack(rollouts)
            computing.result()
            if rollouts := batch.take_rest():
                yield FinishedPrompts.pack(rollouts)
        finally:
            del self._runs[run_id]

    def abort_run(self, run_id: int | None) -> None:
        """End the prompts of one run, of all for None, as `aborted`, tokens kept."""
        for number, batch in list(self._runs.items()):
            if run_id in (None, number):
                batch.abort()

    def heartbeat(self) -> str:
        """Answered at once by a process that is alive."""
        stats = self._engine.get_stats()
        return (
            f"{stats['steps']} steps done, {stats['requests_running']} requests running, "
            f"{stats['requests_waiting']} waiting, policy version {stats['policy_version']}, "
            f"at {time.strftime('%H:%M:%S')}"
        )

    def process_identity(self) -> ProcessIdentity:
        """Which process this is, for whoever may have to end it."""
        return ProcessIdentity.of_this()

    def describe(self) -> dict[str, Any]:
        """Who this is, what it reads and promises: answered as soon as the engine is ready."""
        return {
            "pid": os.getpid(),
            "policy_version": self._engine.policy_version,
            "backend": self._engine.backend_name,
            "exactness": self._engine.exactness,
            "attachment": self.attachment(),
        }

    def probe(self) -> tuple[int, Exactness]:
        """`RolloutEngine.probe`: for processes that compare what they compute."""
        return self._engine.probe()

    def attachment(self) -> Any:
        """Handles to the weights and their gate through this process, whoever created them; None
        where a gate of one process guards them."""
        gate: Any = self._engine.gate
        return gate.attachment() if hasattr(gate, "attachment") else None

    def weights_echo(self, checksum: bool) -> Any:
        """What this process reads: `SharedGate.echo`."""
        return self._engine.gate.echo(checksum)  # type: ignore[attr-defined]

    def get_stats(self) -> dict[str, Any]:
        """The engine's counters; answered while a batch runs."""
        return self._engine.get_stats()

    def release(self, in_flight: str) -> None:
        """`RolloutEngine.release`."""
        self._engine.release(in_flight=in_flight)

    def restore(self) -> None:
        """`RolloutEngine.restore`."""
        self._engine.restore()

    def memory_uss(self) -> int:
        """Bytes that only this process holds; the shared weights are not among them."""
        return int(psutil.Process().memory_full_info().uss)
