"""RolloutPool: `run_batch` over several rollout actors, with the results of one engine.

Seeds and sample indices are settled before dispatch, so which actor computes a prompt, or computes
it again after another died, changes no token.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from rollout.exactness import Exactness
from rollout.policy import WeightsError
from rollout.remote import (
    ActorDied,
    ActorFailure,
    ActorLost,
    ActorOutOfMemory,
    ActorTimeout,
    RemoteActor,
    result_of,
)
from rollout.request import PromptTask, Rollout, prompt_tasks
from rollout.rollout_batch import RolloutBatch
from rollout.sampling import SamplingParams, merged_params
from rollout.transport import FinishedPrompts, PackedPrompts

DEFAULT_TOKENS_GUESS = 256
_POLL_S = 0.25
_log = logging.getLogger(__name__)


class ActorSource(Protocol):
    """Where a pool gets actors in place of those it loses."""

    def start_actor(self, name: str) -> Any:
        """The handle of a new `RolloutActor`; its process may still be starting."""

    def admit_actor(self, name: str, actor: Any, about: dict[str, Any]) -> None:
        """Raise if this new actor, which describes itself so, must not serve."""


@dataclass(slots=True)
class _Share:
    """The prompts that one actor was given and has not handed back yet."""

    actor: RemoteActor
    run_id: int
    parts: Any  # Ray's generator of references
    open: dict[int, PromptTask]


@dataclass(frozen=True, slots=True)
class _Joining:
    actor: RemoteActor
    description: Any
    deadline: float


class RolloutPool:
    """Dispatches prompts over actors. `actors` maps names to handles of `RolloutActor`s.

    batch_timeout_s: for one `run_batch`. heartbeat_timeout_s: silence after which an actor counts
    as hung; it is killed then, since a stopped process may hold the weights' lock. source: starts
    another actor for one that was lost, at most `max_restarts` times in all; meanwhile, and
    without one, the others do its work.

    Membership is guarded by a lock: batches, statistics and `check` may come from any thread.
    """

    def __init__(
        self,
        actors: dict[str, Any],
        *,
        run_seed: int = 0,
        batch_timeout_s: float = 3600.0,
        heartbeat_timeout_s: float = 30.0,
        source: ActorSource | None = None,
        max_restarts: int = 10,
        start_timeout_s: float = 180.0,
    ) -> None:
        if not actors:
            raise ValueError("a pool needs at least one rollout actor")
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._actors = {name: self._watched(name, handle) for name, handle in actors.items()}
        self._run_seed = run_seed
        self._batch_timeout_s = batch_timeout_s
        self._start_timeout_s = start_timeout_s
        self._source = source
        self._restarts_left = max_restarts
        self._joining: dict[str, _Joining] = {}
        self._missing: list[str] = []
        self._lock = threading.RLock()
        self._run_ids = itertools.count()
        self.next_uid = 0
        """Numbers the prompts of a run, for seeds derived from `run_seed`; part of a checkpoint."""
        self.min_version = 0
        """Actors that read older weights refuse to sample."""
        self.losses: list[ActorLost] = []
        self.restarts = 0

    @property
    def alive(self) -> list[str]:
        """Names of the actors that serve."""
        with self._lock:
            return list(self._actors)

    # ---------------------------------------------------------------- batches

    def run_batch(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> RolloutBatch:
        """Sample every prompt on some actor; rollouts in the order of the prompts, `n` of each.

        params and `fields` as in `RolloutEngine.run_batch`.

        Groups stay together and go out longest first. Of an actor that dies or hangs, what it has
        handed in stays, and the rest is computed by others, with the same tokens. Raises
        `ActorLost` when none is left, `ActorOutOfMemory` when one had no memory, `ActorTimeout`
        past the deadline, and what an actor raised.
        """
        settled = merged_params(params, fields)
        with self._lock:
            self.refill()
            tasks = prompt_tasks(prompts, settled, self._run_seed, self.next_uid)
            self.next_uid += len(tasks)
        results: dict[int, list[Rollout]] = {}
        deadline = time.monotonic() + self._batch_timeout_s
        shares: list[_Share] = []
        unsent = tasks
        try:
            while shares or unsent:
                shares += self._dispatch(unsent, deadline)
                ray.wait([share.parts for share in shares], timeout=_POLL_S)
                unsent = self._gather(shares, results)
                self._welcome()
                if shares and time.monotonic() > deadline:
                    raise ActorTimeout(self._overdue(shares))
        except BaseException:
            for share in shares:  # nobody waits for these any more
                share.actor.handle.abort_run.remote(share.run_id)
            raise
        return RolloutBatch.from_rollouts([r for i in range(len(tasks)) for r in results[i]])

    def _gather(
        self, shares: list[_Share], results: dict[int, list[Rollout]]
    ) -> list[PromptTask]:
        """Take in what there is, close the shares that are done; prompts of actors now lost."""
        lost: list[PromptTask] = []
        for share in list(shares):
            try:
                if self._collect(share, results):
                    shares.remove(share)
                else:
                    share.actor.check("run_batch")
            except ActorOutOfMemory:
                raise
            except ActorLost as error:
                shares.remove(share)
                lost += share.open.values()
                self._lose(share.actor, error)
        return lost

    def _dispatch(self, tasks: Sequence[PromptTask], deadline: float) -> list[_Share]:
        """One message to each of the actors that serve, or to the first that comes."""
        if not tasks:
            return []
        self._wait_for_one(deadline)
        with self._lock:
            actors = dict(self._actors)
        shares = []
        for name, share in _share(tasks, list(actors)).items():
            run_id = next(self._run_ids)
            parts = actors[name].handle.run.remote(
                run_id, PackedPrompts.pack(share), self.min_version
            )
            shares.append(_Share(actors[name], run_id, parts, {t.prompt_index: t for t in share}))
        return shares

    def _collect(self, share: _Share, results: dict[int, list[Rollout]]) -> bool:
        """Take in what the actor has handed out; True when that is everything."""
        while True:
            ready, _ = ray.wait([share.parts], timeout=0)
            if not ready:
                return False
            try:
                reference = next(share.parts)
            except StopIteration:
                if share.open:
                    raise ActorFailure(
                        f"{share.actor.name} ended run_batch without {len(share.open)} prompts"
                    ) from None
                return True
            except RayActorError as error:
                raise share.actor.death("run_batch", error) from None
            part = result_of(reference, share.actor.name, "run_batch")
            if isinstance(part, WeightsError):
                raise part
            assert isinstance(part, FinishedPrompts)
            for index, rollouts in part.unpack().items():
                del share.open[index]
                results[index] = rollouts

    def _overdue(self, shares: Sequence[_Share]) -> str:
        late = ", ".join(f"{s.actor.name} ({len(s.open)} prompts)" for s in shares)
        return (
            f"run_batch did not end within {self._batch_timeout_s:.0f} s; still computing: {late}. "
            "They answer, so they may only need longer: raise call_timeout_s"
        )

    # ---------------------------------------------------------------- membership

    def check(self) -> None:
        """Ask for heartbeats, drop actors that are dead or hung, take in those that have started.

        Never raises for a lost actor while another is left.
        """
        with self._lock:
            for actor in list(self._actors.values()):
                try:
                    actor.check("a check of the pool")
                except ActorLost as error:
                    self._lose(actor, error)
            self._welcome()

    def _lose(self, actor: RemoteActor, error: ActorLost) -> None:
        """Drop an actor, end its process, start another in its place if that is allowed. Raises
        `error` if nobody is left."""
        with self._lock:
            if self._actors.get(actor.name) is not actor:
                return  # another thread saw it first
            del self._actors[actor.name]
            self.losses.append(error)
            self._missing.append(actor.name)
            actor.kill()
            self.refill()
            _log.warning("%s; %s serve, %s start again", error, self.alive, list(self._joining))
            if not self._actors and not self._joining:
                raise error

    def refill(self) -> None:
        """Start the actors that are missing, as far as restarts are left. Does not wait."""
        with self._lock:
            while self._missing and self._source is not None and self._restarts_left > 0:
                name = self._missing.pop()
                self._restarts_left -= 1
                actor = self._watched(name, self._source.start_actor(name))
                description = actor.handle.describe.remote()
                deadline = time.monotonic() + self._start_timeout_s
                self._joining[name] = _Joining(actor, description, deadline)

    def _welcome(self) -> None:
        """Take in the actors that have started and may serve; those that cannot are missing."""
        with self._lock:
            for name, joining in list(self._joining.items()):
                ready, _ = ray.wait([joining.description], timeout=0)
                if not ready and time.monotonic() < joining.deadline:
                    continue
                del self._joining[name]
                try:
                    if not ready:
                        raise ActorTimeout(f"it did not start in {self._start_timeout_s:.0f} s")
                    self._admit(joining.actor, result_of(joining.description, name, "start again"))
                    self.restarts += 1
                except Exception as error:
                    joining.actor.kill()
                    self._missing.append(name)
                    _log.warning("%s could not be started again: %s", name, error)

    def _admit(self, actor: RemoteActor, about: dict[str, Any]) -> None:
        if self._source is not None:
            self._source.admit_actor(actor.name, actor.handle, about)
        if about["policy_version"] < self.min_version:
            raise ActorFailure(
                f"{actor.name} reads policy version {about['policy_version']}, "
                f"{self.min_version} is wanted"
            )
        self._actors[actor.name] = actor

    def _wait_for_one(self, deadline: float) -> None:
        """Until an actor serves; `ActorDied` when none will."""
        while not self._actors:
            with self._lock:
                if not self._joining:
                    self.refill()
                pending = [joining.description for joining in self._joining.values()]
            if not pending:
                why = f"; the last one: {self.losses[-1]}" if self.losses else ""
                raise ActorDied(f"no rollout actor is left{why}")
            if time.monotonic() > deadline:
                raise ActorTimeout("no rollout actor has started again in time")
            ray.wait(pending, timeout=_POLL_S)
            self._welcome()

    def _watched(self, name: str, handle: Any) -> RemoteActor:
        return RemoteActor(name, handle, self._heartbeat_timeout_s)

    # ---------------------------------------------------------------- all actors

    def get_stats(self) -> list[dict[str, Any]]:
        """Every live actor's counters, with its name."""
        return [{"actor": name, **stats} for name, stats in self._ask("get_stats", 60.0).items()]

    def abort(self) -> None:
        """End all that is being sampled: `run_batch` returns, samples `aborted`, tokens kept."""
        self._ask("abort_run", 60.0, None)

    def release(self, *, in_flight: str = "refuse") -> None:
        """Every actor gives its KV memory back to the system; see `RolloutEngine.release`."""
        self._ask("release", self._batch_timeout_s, in_flight)

    def restore(self) -> None:
        """Every actor takes KV memory again; idempotent."""
        self._ask("restore", 60.0)

    def memory_uss(self) -> dict[str, int]:
        """Private memory of every live actor in bytes."""
        return self._ask("memory_uss", 60.0)

    def weights_echo(self, *, checksum: bool = False) -> dict[str, Any]:
        """What every live actor reads now; see `SharedGate.echo`."""
        return self._ask("weights_echo", self._batch_timeout_s, checksum)

    def probe(self) -> dict[str, tuple[int, Exactness]]:
        """`RolloutEngine.probe` of every live actor, now."""
        return self._ask("probe", 60.0)

    def attachments(self) -> dict[str, Any]:
        """Handles to the weights through every live actor."""
        return self._ask("attachment", 60.0)

    def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """The answers of all actors by name; one that is lost meanwhile is left out."""
        with self._lock:
            actors = list(self._actors.values())
        calls = [(actor, getattr(actor.handle, method).remote(*arguments)) for actor in actors]
        answers = {}
        for actor, reference in calls:
            try:
                answers[actor.name] = actor.call(method, reference, timeout_s)
            except ActorOutOfMemory:
                raise
            except ActorLost as error:
                self._lose(actor, error)
        return answers

    def close(self) -> None:
        """End the actors' processes."""
        with self._lock:
            for actor in [*self._actors.values(), *(j.actor for j in self._joining.values())]:
                with suppress(Exception):
                    ray.kill(actor.handle)
            self._actors.clear()
            self._joining.clear()


def _share(tasks: Sequence[PromptTask], names: Sequence[str]) -> dict[str, list[PromptTask]]:
    """Longest expected first, each to the least loaded actor; shares keep the prompts' order."""
    shares: dict[str, list[PromptTask]] = {name: [] for name in names}
    load = [(0, rank, name) for rank, name in enumerate(names)]
    for task in sorted(tasks, key=_expected_tokens, reverse=True):
        tokens, rank, name = heapq.heappop(load)
        shares[name].append(task)
        heapq.heappush(load, (tokens + _expected_tokens(task), rank, name))
    for share in shares.values():
        share.sort(key=lambda task: task.prompt_index)
    return {name: share for name, share in shares.items() if share}


def _expected_tokens(task: PromptTask) -> int:
    new = task.params.max_tokens or DEFAULT_TOKENS_GUESS
    return len(task.token_ids) + task.params.n * new
