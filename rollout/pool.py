"""RolloutPool: `run_batch` over several rollout actors, with the results of one engine.

Seeds and sample indices are settled before dispatch, so which actor computes a prompt, or computes
it again after another died, changes no token.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import ray

from rollout.remote import ActorDied, wait_for
from rollout.request import PromptTask, Rollout, prompt_tasks
from rollout.rollout_batch import RolloutBatch
from rollout.sampling import SamplingParams, merged_params
from rollout.transport import PackedPrompts

DEFAULT_TOKENS_GUESS = 256


class RolloutPool:
    """Dispatches prompts over actors. `actors` maps names to handles of `RolloutActor`s."""

    def __init__(
        self, actors: dict[str, Any], *, run_seed: int = 0, batch_timeout_s: float = 3600.0
    ) -> None:
        if not actors:
            raise ValueError("a pool needs at least one rollout actor")
        self._actors = dict(actors)
        self._run_seed = run_seed
        self._batch_timeout_s = batch_timeout_s
        self._next_uid = 0

    @property
    def alive(self) -> list[str]:
        """Names of the actors that have not been seen dead."""
        return list(self._actors)

    def run_batch(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> RolloutBatch:
        """Sample every prompt on some actor; rollouts in the order of the prompts, `n` of each.

        params and `fields` as in `RolloutEngine.run_batch`.

        Groups stay together and go out longest first, one message per actor. The prompts of an
        actor that dies are computed by the others, with the same tokens. Raises `ActorDied` when
        none is left, `ActorTimeout` past the deadline.
        """
        tasks = prompt_tasks(
            prompts, merged_params(params, fields), self._run_seed, self._next_uid
        )
        self._next_uid += len(tasks)
        results: list[Rollout] = []
        while tasks:
            shares = _share(tasks, list(self._actors))
            references = {
                name: self._actors[name].run.remote(PackedPrompts.pack(share))
                for name, share in shares.items()
            }
            tasks = []
            for name, reference in references.items():
                share = shares[name]
                try:
                    batch = wait_for(reference, name, "run_batch", self._batch_timeout_s)
                except ActorDied:
                    del self._actors[name]
                    if not self._actors:
                        raise
                    tasks += share
                    continue
                results += [
                    dataclasses.replace(r, prompt_index=share[r.prompt_index].prompt_index)
                    for r in batch
                ]
        results.sort(key=lambda r: r.prompt_index)  # stable: samples of a prompt keep their order
        return RolloutBatch.from_rollouts(results)

    def get_stats(self) -> list[dict[str, Any]]:
        """Every live actor's counters, with its name."""
        actors = list(self._actors.items())  # run_batch in another thread may drop a dead one
        calls = {name: actor.get_stats.remote() for name, actor in actors}
        return [
            {"actor": name, **wait_for(call, name, "get_stats", 60.0)}
            for name, call in calls.items()
        ]

    def release(self, *, in_flight: str = "refuse") -> None:
        """Every actor gives its KV memory back to the system; see `RolloutEngine.release`."""
        actors = list(self._actors.items())
        calls = {name: actor.release.remote(in_flight) for name, actor in actors}
        for name, call in calls.items():
            wait_for(call, name, "release", self._batch_timeout_s)

    def restore(self) -> None:
        """Every actor takes KV memory again; idempotent."""
        calls = {name: actor.restore.remote() for name, actor in list(self._actors.items())}
        for name, call in calls.items():
            wait_for(call, name, "restore", 60.0)

    def memory_uss(self) -> dict[str, int]:
        """Private memory of every live actor in bytes."""
        calls = {name: actor.memory_uss.remote() for name, actor in self._actors.items()}
        return {name: wait_for(call, name, "memory_uss", 60.0) for name, call in calls.items()}

    def close(self) -> None:
        """End the actors' processes."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()


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
