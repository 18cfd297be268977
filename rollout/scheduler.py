"""Planning, torch-free: which requests compute how many tokens in the next step.

One plan per step under a token budget. Running requests first, oldest first; then waiting ones
are admitted, first come first served. Out of blocks, the newest running request is preempted: its
KV is dropped, its tokens stay, and it goes back to the head of the queue.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from kvcache import KVCacheManager
from rollout.request import Request, RequestStatus
from rollout.stopping import check_stop


class Scheduled(NamedTuple):
    """One entry of a plan: `request` computes its next `num_new_tokens` tokens."""

    request: Request
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step computes the request's last token, so that one is sampled."""
        return self.num_new_tokens == self.request.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled for one request; `token` is None where the logits were not finite."""

    token: int | None
    logprob: float
    sampling_logprob: float


class Scheduler:
    """Owns the queues and each request's blocks. Not thread-safe: the engine serialises calls."""

    def __init__(
        self,
        kv: KVCacheManager[int],
        max_batch_size: int,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if max_num_batched_tokens < max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_batch_size ({max_batch_size}): every running request needs a token a step"
            )
        self._kv = kv
        self._max_batch_size = max_batch_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: Counter[str] = Counter()
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request that has been checked to fit."""
        self.waiting.append(request)

    def plan(self, version: int) -> list[Scheduled]:
        """The next step under policy version `version`. Takes blocks and publishes their keys.

        Never empty while `has_work`: one request alone always fits.
        """
        plan, budget, preempted = self._plan_running()
        if preempted:
            return plan
        while (
            self.waiting
            and budget
            and len(self.running) < self._max_batch_size
            and self._kv.num_free_blocks
        ):
            request = self.waiting[0]
            cached = self._kv.begin(request.request_id, request.tokens, version)
            new = min(len(request.tokens) - cached, budget)
            if not self._kv.grow(request.request_id, cached + new):
                self._kv.free(request.request_id)
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = cached
            if request.sealed:
                self._kv.seal(request.request_id)
            self.running.append(request)
            budget -= new
            self._schedule(plan, request, new)
        return plan

    def _plan_running(self) -> tuple[list[Scheduled], int, bool]:
        plan: list[Scheduled] = []
        budget, preempted = self._max_num_batched_tokens, False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            new = min(request.num_uncomputed_tokens, budget)
            total = request.num_computed_tokens + new
            while not self._kv.grow(request.request_id, total):
                preempted = True
                if self._preempt_newest() is request:
                    return plan, budget, preempted
            budget -= new
            self._schedule(plan, request, new)
            index += 1
        return plan, budget, preempted

    def _schedule(self, plan: list[Scheduled], request: Request, new: int) -> None:
        """Published now, before it is computed: the same step's later admissions may share it."""
        self._kv.publish(request.request_id, request.tokens, request.num_computed_tokens + new)
        plan.append(Scheduled(request, new))

    def _preempt_newest(self) -> Request:
        request = self.running.pop()
        self._requeue(request)
        self.preemptions += 1
        return request

    def _requeue(self, request: Request) -> None:
        self._kv.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)

    def commit(
        self, plan: list[Scheduled], sampled: list[Sampled], version: int
    ) -> list[Request]:
        """Take a step's results, in the order of the plan's sampling entries; returns the ended."""
        ended, rows = [], iter(sampled)
        for entry in plan:
            request, samples = entry.request, entry.samples
            request.num_computed_tokens += entry.num_new_tokens
            if not samples:
                continue
            row = next(rows)
            if row.token is None:
                request.fail(
                    "error",
                    "non_finite_logits",
                    f"the model's logits at position {len(request.tokens)} are not finite under "
                    f"policy version {version}; the tokens so far are kept",
                )
                ended.append(request)
                continue
            request.append(row.token, row.logprob, row.sampling_logprob, version)
            if check_stop(request, self._eos_token_ids):
                ended.append(request)
        if ended:
            for request in ended:
                self._finish(request)
            self.running = [r for r in self.running if not r.finished]
        return ended

    def _finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        if request.status is RequestStatus.RUNNING:
            self._kv.free(request.request_id)
        request.status = RequestStatus.FINISHED
        self.finished[request.finish_reason] += 1

    def reject(self, request: Request, reason: str, message: str) -> None:
        """End a request that never entered the queue."""
        request.fail("rejected", reason, message)
        self._finish(request)

    def abort(self, requests: list[Request]) -> None:
        """End waiting or running requests as `aborted`, tokens kept; ended ones are left alone."""
        for request in requests:
            if not request.finished:
                request.finish_reason = "aborted"
                self._finish(request)
        self.running = [r for r in self.running if not r.finished]
        self.waiting = deque(r for r in self.waiting if not r.finished)

    def requeue_running(self) -> None:
        """Drop all KV and put the running requests back at the head: new weights, same tokens."""
        while self.running:
            self._requeue(self.running.pop())

    def seal_running(self) -> None:
        """Running requests go on with the KV they have, and never publish a block again."""
        for request in self.running:
            request.sealed = True
            self._kv.seal(request.request_id)

    def abandon(self, plan: list[Scheduled]) -> None:
        """A step failed: take back the keys of blocks it never computed, and start over.

        Whoever matched such a block in the same plan counts it as computed, so all KV goes.
        """
        for request, _ in plan:
            if request.status is RequestStatus.RUNNING:
                self._kv.unpublish_from(request.request_id, request.num_computed_tokens)
        self.requeue_running()
