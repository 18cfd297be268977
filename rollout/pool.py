"""RolloutPool: `run_batch` over several rollout actors, with the results of one engine.

Seeds and sample indices are settled before dispatch, so which actor computes a prompt, or computes
it again after another died, changes no token.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from rollout.exactness import Exactness
from rollout.membership import ActorSource, Membership
from rollout.policy import WeightsError
from rollout.remote import (
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


TakePrompt = Callable[[int, list[Rollout]], None]
"""(place of a prompt in the batch, all its rollouts)"""


@dataclass(slots=True)
class _Share:
    """The prompts that one actor was given and has not handed back yet."""

    actor: RemoteActor
    run_id: int
    parts: Any  # Ray's generator of references
    open: dict[int, PromptTask]


class RolloutPool:
    """Dispatches prompts over actors. `actors` maps names to handles of `RolloutActor`s.

    batch_timeout_s: for one `run_batch`. The other settings are those of `Membership`: a lost
    actor is replaced; meanwhile, and if it cannot be, the others do its work. Batches and
    statistics may be asked for by any thread.
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
        self.members = Membership(
            actors, source, max_restarts, heartbeat_timeout_s, start_timeout_s
        )
        self._run_seed = run_seed
        self._batch_timeout_s = batch_timeout_s
        self._uid_lock = threading.Lock()
        self._run_ids = itertools.count()
        self.next_uid = 0
        """Numbers the prompts of a run, for seeds derived from `run_seed`. A loop of one's own that
        goes on with a run sets it to what it was."""

    @property
    def alive(self) -> list[str]:
        """Names of the actors that serve."""
        return list(self.members.serving)

    # ---------------------------------------------------------------- batches

    def run_batch(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        session_ids: Sequence[int] | None = None,
        on_finished: TakePrompt | None = None,
        **fields: Any,
    ) -> RolloutBatch:
        """Sample every prompt on some actor; rollouts in the order of the prompts, `n` of each.

        params and `fields` as in `RolloutEngine.run_batch`. session_ids: one per prompt; equal ones
        go to the same actor, in this call and in later ones while the same actors serve, so that
        the KV of a conversation's earlier turns is found again. Consecutive numbers spread evenly.
        on_finished: called with a prompt's place and all its rollouts as soon as they are there,
        once each, in any order, on this thread: it should be quick, and what it raises ends the
        call.

        Groups stay together and go out longest first. Of an actor that dies or hangs, what it has
        handed in stays, and the rest is computed by others, with the same tokens. Raises
        `ActorLost` when none is left, `ActorOutOfMemory` when one had no memory, `ActorTimeout`
        past the deadline, and what an actor raised.
        """
        settled = merged_params(params, fields)
        self.members.refill()
        with self._uid_lock:
            tasks = prompt_tasks(prompts, settled, self._run_seed, self.next_uid)
            self.next_uid += len(tasks)
        if session_ids is not None and len(session_ids) != len(tasks):
            raise ValueError(
                f"{len(session_ids)} session_ids for {len(tasks)} prompts; pass one per prompt"
            )
        results: dict[int, list[Rollout]] = {}

        def take(index: int, rollouts: list[Rollout]) -> None:
            results[index] = rollouts
            if on_finished is not None:
                on_finished(index, rollouts)

        deadline = time.monotonic() + self._batch_timeout_s
        shares: list[_Share] = []
        unsent = tasks
        try:
            while shares or unsent:
                shares += self._dispatch(unsent, session_ids, deadline)
                ray.wait([share.parts for share in shares], timeout=_POLL_S)
                unsent = self._gather(shares, take)
                self.members.look_after()
                if shares and time.monotonic() > deadline:
                    raise ActorTimeout(self._overdue(shares))
        except BaseException:
            for share in shares:  # nobody waits for these any more
                share.actor.handle.abort_run.remote(share.run_id)
            raise
        return RolloutBatch.from_rollouts([r for i in range(len(tasks)) for r in results[i]])

    def _gather(self, shares: list[_Share], take: TakePrompt) -> list[PromptTask]:
        """Take in what there is, close the shares that are done; prompts of actors now lost."""
        lost: list[PromptTask] = []
        for share in list(shares):
            try:
                if self._collect(share, take):
                    shares.remove(share)
                else:
                    share.actor.check("run_batch")
            except ActorOutOfMemory:
                raise
            except ActorLost as error:
                shares.remove(share)
                lost += share.open.values()
                self.members.lose(share.actor, error)
        return lost

    def _dispatch(
        self, tasks: Sequence[PromptTask], session_ids: Sequence[int] | None, deadline: float
    ) -> list[_Share]:
        """One message to each of the actors that serve, or to the first that comes."""
        if not tasks:
            return []
        self.members.wait_for_one(deadline)
        actors = self.members.serving
        shares = []
        for name, share in _share(tasks, list(actors), session_ids).items():
            run_id = next(self._run_ids)
            parts = actors[name].handle.run.remote(
                run_id,
                PackedPrompts.pack(share),
                self.members.min_version,
                self.members.stale_timeout_s,
            )
            shares.append(_Share(actors[name], run_id, parts, {t.prompt_index: t for t in share}))
        return shares

    def _collect(self, share: _Share, take: TakePrompt) -> bool:
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
                raise self.members.unreadable(share.actor.name, part)
            assert isinstance(part, FinishedPrompts)
            for index, rollouts in part.unpack().items():
                del share.open[index]
                take(index, rollouts)

    def _overdue(self, shares: Sequence[_Share]) -> str:
        late = ", ".join(f"{s.actor.name} ({len(s.open)} prompts)" for s in shares)
        return (
            f"run_batch did not end within {self._batch_timeout_s:.0f} s; still computing: {late}. "
            "They answer, so they may only need longer: raise call_timeout_s"
        )

    # ---------------------------------------------------------------- all actors

    def get_stats(self) -> list[dict[str, Any]]:
        """Every live actor's counters, with its name."""
        answers = self.members.ask("get_stats", 60.0)
        return [{"actor": name, **stats} for name, stats in answers.items()]

    def abort(self) -> None:
        """End all that is being sampled: `run_batch` returns, samples `aborted`, tokens kept."""
        self.members.ask("abort_run", 60.0, None)

    def release(self, *, in_flight: str = "refuse") -> None:
        """Every actor gives its KV memory back to the system; see `RolloutEngine.release`."""
        self.members.ask("release", self._batch_timeout_s, in_flight)

    def restore(self) -> None:
        """Every actor takes KV memory again; idempotent."""
        self.members.ask("restore", 60.0)

    def memory_uss(self) -> dict[str, int]:
        """Private memory of every live actor in bytes."""
        return self.members.ask("memory_uss", 60.0)

    def weights_echo(self, *, checksum: bool = False) -> dict[str, Any]:
        """What every live actor reads now; see `SharedGate.echo`."""
        return self.members.ask("weights_echo", self._batch_timeout_s, checksum)

    def probe(self) -> dict[str, tuple[int, Exactness]]:
        """`RolloutEngine.probe` of every live actor, now."""
        return self.members.ask("probe", 60.0)

    def attachments(self) -> dict[str, Any]:
        """Handles to the weights through every live actor."""
        return self.members.ask("attachment", 60.0)

    def close(self) -> None:
        """End the actors' processes."""
        self.members.close()


def _share(
    tasks: Sequence[PromptTask], names: Sequence[str], session_ids: Sequence[int] | None = None
) -> dict[str, list[PromptTask]]:
    """Those of a session to its actor, or, longest expected first, each to the least loaded one;
    shares keep the prompts' order."""
    shares: dict[str, list[PromptTask]] = {name: [] for name in names}
    if session_ids is not None:
        for task in tasks:
            shares[names[session_ids[task.prompt_index] % len(names)]].append(task)
    else:
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
