"""Planning, torch-free: which requests compute how many tokens in the next step.

One plan per step under a token budget. Running requests first, oldest first; then waiting ones
are admitted, first come first served. Out of blocks, the newest running request is preempted: its
KV is dropped, its tokens stay, and it goes back to the head of the queue.

The running requests are rows of a `RunningBatch`. What happens to all of them in every step is
arithmetic on its columns; a request is looked at by itself when it comes, crosses into a new
block, completes one, may have ended, or leaves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from kvcache import NEVER, KVCacheManager
from rollout.request import Request, RequestStatus
from rollout.results import take_results
from rollout.running import RunningBatch
from rollout.sampling_rows import SampledRows
from rollout.step_builder import PromptSource, StepBuilder
from rollout.step_plan import Committed, IntColumn, StepPlan


class Scheduler:
    """Owns the queues and each request's blocks. Not thread-safe: the engine serialises calls.

    long_prefill_token_threshold: most tokens one request computes in a step; 0 = the budget. With
    it several long prompts advance side by side; without it samples of one prompt share best.
    """

    def __init__(
        self,
        kv: KVCacheManager[int],
        batch: RunningBatch,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int],
        long_prefill_token_threshold: int = 0,
    ) -> None:
        if max_num_batched_tokens < batch.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_batch_size ({batch.max_batch_size}): each running request needs a token a "
                "step"
            )
        if long_prefill_token_threshold < 0:
            raise ValueError(
                "long_prefill_token_threshold must be 0 (off) or a number of tokens, got "
                f"{long_prefill_token_threshold}"
            )
        self._kv = kv
        self.batch = batch
        self._budget = max_num_batched_tokens
        self._chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._rows: IntColumn | None = None  # of `running`; None when that has changed
        self._live: dict[int, Request] = {}  # all that have not ended, in order of arrival
        self.finished: Counter[str] = Counter()
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; one that admission has rejected ends here."""
        self._live[request.request_id] = request
        if request.finish_reason is None:
            self.waiting.append(request)
        else:
            self._end(request)

    # ---------------------------------------------------------------- planning

    def plan(self, version: int) -> StepPlan:
        """The next step under policy version `version`. Takes blocks and publishes their keys.

        Never empty while `has_work`: one request alone always fits.
        """
        preemptions = self.preemptions
        rows, new = self._plan_running()
        step = StepBuilder(rows, new, self._budget)
        if self.preemptions == preemptions:
            self._admit(version, step)
        return step.build(self.batch)

    def _plan_running(self) -> tuple[IntColumn, IntColumn]:
        batch, rows = self.batch, self._running_rows()
        new = np.minimum(batch.num_tokens[rows] - batch.num_computed[rows], self._chunk)
        total = np.cumsum(new)
        if len(rows) and total[-1] > self._budget:
            new = np.clip(self._budget - (total - new), 0, new)
            rows, new = rows[new > 0], new[new > 0]
        ends = batch.num_computed[rows] + new
        for index in np.flatnonzero(ends > batch.num_slots[rows]).tolist():
            if not self._grow(index, int(ends[index])):
                break
        planned = min(len(rows), len(self.running))  # preempted ones were the last
        rows, new, ends = rows[:planned], new[:planned], ends[:planned]
        for index in np.flatnonzero(ends >= batch.publish_at[rows]).tolist():
            self._publish(int(rows[index]), int(ends[index]))
        return rows, new

    def _grow(self, index: int, num_tokens: int) -> bool:
        """Room for the running request number `index`; False if it was preempted itself."""
        while index < len(self.running):
            request = self.running[index]
            taken = self._kv.grow(request.request_id, num_tokens)
            if taken is not None:
                assert request.row is not None
                self.batch.add_blocks(request.row, taken)
                return True
            self._requeue(self.running.pop())
            self.preemptions += 1
        return False

    def _publish(self, row: int, num_tokens: int) -> None:
        """Published now, before it is computed: the same step's later admissions may share it."""
        batch, request_id = self.batch, self.batch.request(row).request_id
        batch.publish_at[row] = self._kv.publish(request_id, batch.tokens[row], num_tokens)

    def _admit(self, version: int, step: StepBuilder) -> None:
        """Move waiting requests into rows while they fit, none before those that came earlier."""
        sources: dict[int, PromptSource] | None = None
        while self.waiting and len(self.running) < self.batch.max_batch_size:
            request = self.waiting[0]
            is_fresh = request.may_fork
            if is_fresh:
                sources = step.prompt_sources(self.batch) if sources is None else sources
                source = sources.get(id(request.task))
                if source is not None and self._fork(request, source, step):
                    continue
            new = self._begin(request, version, step.budget)
            if not new:
                break
            assert request.row is not None
            step.add(request.row, new)
            ends = int(self.batch.num_computed[request.row]) + new
            if is_fresh and sources is not None and ends == request.num_prompt_tokens:
                sources.setdefault(id(request.task), PromptSource(request, in_step=True))

    def _begin(self, request: Request, version: int, budget: int) -> int:
        """Give the head of the queue a row and blocks for its next tokens; how many, 0 if it
        does not fit."""
        if not budget or not self._kv.num_free_blocks:
            return 0
        request_id, length = request.request_id, len(request.tokens)
        match = request.prompt_scores is None  # a prompt's logits come of computing it
        cached = self._kv.begin(request_id, request.tokens, version, match=match)
        new = min(length - cached, budget, self._chunk)
        if self._kv.grow(request_id, cached + new) is None:
            self._kv.free(request_id)
            return 0
        self._enter(request, cached, cached + new)
        return new

    def _fork(self, request: Request, source: PromptSource, step: StepBuilder) -> bool:
        """Let the head of the queue share the KV of a sibling's prompt, all of it.

        Where the sibling computes the prompt's end in this step, both sample from its logits, and
        nothing is computed twice. Later on the last token is computed again, for its logits.
        """
        length = request.num_prompt_tokens
        num_shared = length if source.in_step else length - 1
        if not source.in_step and not step.budget:
            return False
        sibling = source.request
        copy = self._kv.fork(request.request_id, sibling.request_id, num_shared, length)
        if copy is None:
            return False
        if self._kv.grow(request.request_id, length) is None:
            self._kv.free(request.request_id)
            return False
        row = self._enter(request, num_shared, length)
        assert sibling.row is not None
        if source.in_step:
            step.fork(row, sibling.row, copy)
        else:
            step.add(row, 1, copy)
        return True

    def _enter(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """From the head of the queue into a row; it computes up to token `num_tokens` now."""
        self.waiting.popleft()
        request.status = RequestStatus.RUNNING
        row = self.batch.add(request, num_computed)
        self.batch.add_blocks(row, self._kv.block_ids(request.request_id))
        self.running.append(request)
        self._rows = None
        if request.sealed:
            self._seal(request)
        else:
            self._publish(row, num_tokens)
        return row

    def _running_rows(self) -> IntColumn:
        if self._rows is None:
            self._rows = np.array([request.row for request in self.running], np.int64)
        return self._rows

    def _requeue(self, request: Request) -> None:
        """Drop the KV of a request taken from `running`; it waits before all that came later."""
        self._kv.free(request.request_id)
        self.batch.remove(request)
        self._rows = None
        request.status = RequestStatus.WAITING
        place = 0  # the head, unless `keep` let a younger one run on
        while place < len(self.waiting) and self.waiting[place].request_id < request.request_id:
            place += 1
        self.waiting.insert(place, request)

    # ---------------------------------------------------------------- results

    def commit(self, plan: StepPlan, sampled: SampledRows, version: int) -> Committed:
        """Take a step's results; row i of `sampled` belongs to `plan.sampled_rows[i]`."""
        done = take_results(self.batch, plan, sampled, version, self._eos_token_ids)
        self._finish_all(done.ended)
        return done

    def _finish_all(self, requests: Iterable[Request]) -> None:
        """End requests whose finish reason is set, wherever they are; each once."""
        ran = waited = False
        for request in requests:
            assert request.finish_reason is not None
            if request.status is RequestStatus.RUNNING:
                ran = True
                self._kv.free(request.request_id)
                self.batch.remove(request)
            else:
                waited = True
            self._end(request)
        if ran:
            self.running = [r for r in self.running if not r.finished]
            self._rows = None
        if waited:
            self.waiting = deque(r for r in self.waiting if not r.finished)

    def _end(self, request: Request) -> None:
        assert request.finish_reason is not None
        if request.detokenizer is not None:
            request.detokenizer.finish()
        request.status = RequestStatus.FINISHED
        self.finished[request.finish_reason] += 1
        self._live.pop(request.request_id, None)

    def abort(self, requests: Iterable[Request]) -> None:
        """End waiting or running requests as `aborted`, tokens kept; ended ones are left alone."""
        live = [r for r in requests if not r.finished]
        for request in live:
            request.finish_reason = "aborted"
        self._finish_all(live)

    def fail(self, requests: Iterable[Request], reason: str, message: str) -> None:
        """End waiting or running requests as `error`, tokens kept; ended ones are left alone."""
        live = [r for r in requests if not r.finished]
        for request in live:
            request.fail("error", reason, message)
        self._finish_all(live)

    def requeue_running(self) -> None:
        """Drop all KV and put the running requests back at the head: new weights, same tokens."""
        while self.running:
            self._requeue(self.running.pop())

    def seal_running(self) -> None:
        """Running requests go on with the KV they have, and never publish a block again.

        Those that have sampled nothing yet start over: their output will be of one version.
        """
        running, self.running = self.running, []
        for request in reversed(running):
            if len(self.batch.output(request)[0]):
                self.running.insert(0, request)
            else:
                self._requeue(request)
        for request in self.running:
            request.sealed = True
            self._seal(request)

    def _seal(self, request: Request) -> None:
        assert request.row is not None
        self._kv.seal(request.request_id)
        self.batch.publish_at[request.row] = NEVER

    def abandon(self, plan: StepPlan) -> None:
        """A step failed: take back the keys of blocks it never computed, and start over.

        Whoever matched such a block in the same plan counts it as computed, so all KV goes.
        """
        for row in plan.rows.tolist():
            request = self.batch.requests[row]
            if request is not None:
                computed = int(self.batch.num_computed[row])
                self._kv.unpublish_from(request.request_id, computed)
        self.requeue_running()

    def start_over(self) -> None:
        """After an exception in the midst of planning or bookkeeping, Ctrl-C for one: all KV and
        all rows go, and what has not ended waits, in order of arrival, with the tokens it has."""
        self.batch.clear()
        self._kv.clear()
        self.running, self._rows = [], None
        for request in list(self._live.values()):
            if request.status is RequestStatus.FINISHED:
                del self._live[request.request_id]
            elif request.finish_reason is not None:
                self._end(request)
            else:
                request.status = RequestStatus.WAITING
        self.waiting = deque(self._live.values())
