"""The scheduler under random arrivals, steps, failures, aborts, publications and releases.

After every operation the books balance: blocks, rows and queues agree, each request is somewhere
exactly once, nothing is lost, and what it has sampled so far is what it was given. A model of the
KV storage knows for every slot of which tokens its KV is, and under which version: every request
reads the KV of its own tokens, whether it computed, matched, copied or shared them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache import BlockCopy
from rollout.request import Request, RequestStatus
from rollout.step_plan import StepPlan
from tests.rollout.scheduler_rig import BLOCK, EOS, Rig, sampled

RAN: Counter[str] = Counter()
"""How often each operation was carried out, over all examples."""


class SchedulerMachine(RuleBasedStateMachine):
    rig: Rig

    @initialize(
        blocks=st.integers(8, 12), batch=st.integers(1, 5), chunk=st.sampled_from([0, 0, 3])
    )
    def create(self, blocks: int, batch: int, chunk: int) -> None:
        self.rig = Rig(blocks=blocks, batch=batch, budget=9, chunk=chunk)
        self.batch_limit = batch
        self.all: list[Request] = []
        self.ended: list[Request] = []
        self.started_over: set[int] = set()  # under `keep`, while younger ones ran on
        self.given: dict[int, list[int]] = {}  # request id -> tokens sampled for it
        self.versions: dict[int, list[int]] = {}
        self.slots: dict[int, tuple[tuple[int, ...], int]] = {}  # (tokens up to it, version)

    @precondition(lambda self: len(self.rig.scheduler.waiting) < 12)
    @rule(
        length=st.integers(8, 20),
        kind=st.integers(0, 2),
        new=st.integers(6, 12),
        stop=st.booleans(),
        n=st.integers(1, 3),
    )
    def arrive(self, length: int, kind: int, new: int, stop: bool, n: int) -> None:
        stops = (8,) if stop else ()
        prompt = [30 + kind] * length
        for request in self.rig.group(
            prompt, n, max_tokens=new, ignore_eos=False, stop_token_ids=stops
        ):
            self.all.append(request)
            self.given[request.request_id], self.versions[request.request_id] = [], []

    @precondition(lambda self: self.rig.scheduler.has_work)
    @rule(
        tokens=st.lists(st.sampled_from([7] * 12 + [8, 1, -1]), min_size=15, max_size=60),
        fails=st.integers(0, 9),
    )
    def steps(self, tokens: list[int], fails: int) -> None:
        """One step for every five tokens; the last may fail."""
        while tokens and self.rig.scheduler.has_work:
            now, tokens = tokens[:5], tokens[5:]
            self.step((now * 5)[:5], fails == 0 and not tokens)
            self.books_balance()

    def step(self, tokens: list[int], fails: bool) -> None:
        rig = self.rig
        preemptions = rig.scheduler.preemptions
        oldest = rig.scheduler.running[0] if rig.scheduler.running else None
        plan = rig.plan()
        RAN["step"] += 1
        RAN["preemption"] += rig.scheduler.preemptions - preemptions
        assert len(plan.rows), "work is left and nothing is planned"
        everyone = [*plan.rows.tolist(), *plan.forked.tolist()]
        assert len(set(everyone)) == len(everyone) <= self.batch_limit
        assert plan.num_tokens <= 9 and (plan.num_new >= 1).all()
        if oldest is not None and rig.scheduler.preemptions > preemptions:
            assert rig.scheduler.running[0] is oldest, "the oldest was preempted"
        for row, new in zip(plan.rows.tolist(), plan.num_new.tolist(), strict=True):
            request = rig.batch.request(row)
            table = list(rig.kv.block_ids(request.request_id))
            assert rig.batch.block_table[row, : len(table)].tolist() == table
            assert rig.batch.num_slots[row] == len(table) * BLOCK
            assert len(table) * BLOCK >= rig.batch.num_computed[row] + new
        self.compute(plan, fails)
        if fails:
            RAN["failed step"] += 1
            rig.scheduler.abandon(plan)
            return
        RAN["fork"] += len(plan.forked)
        RAN["late fork"] += len(plan.copies_before)
        rows = plan.sampled_rows.tolist()
        for row, token in zip(rows, tokens, strict=False):
            if token >= 0:
                self.given[rig.batch.request(row).request_id].append(token)
                self.versions[rig.batch.request(row).request_id].append(rig.version)
        done = rig.scheduler.commit(plan, sampled(tokens[: len(rows)]), rig.version)
        self.ended += done.ended
        for request in done.ended:
            self.check_reason(request)

    def compute(self, plan: StepPlan, fails: bool) -> None:
        """The forward, as far as KV goes: copies, then all writes, then all reads."""
        batch, version = self.rig.batch, self.rig.version
        self.copy(plan.copies_before)
        for row, new in zip(plan.rows.tolist(), plan.num_new.tolist(), strict=True):
            computed = int(batch.num_computed[row])
            tokens = batch.tokens[row].tolist()
            for position in range(computed, computed + new):
                content = (tuple(tokens[: position + 1]), version)
                self.slots[self.slot(row, position)] = ((), -1) if fails else content
        self.copy(plan.copies_after)
        if fails:
            return
        ends = batch.num_computed + 0
        ends[plan.rows] += plan.num_new
        for row in [*plan.rows.tolist(), *plan.forked.tolist()]:
            tokens = batch.tokens[row].tolist()
            for position in range(int(ends[row])):
                prefix, computed_under = self.slots[self.slot(row, position)]
                assert prefix == tuple(tokens[: position + 1]), "KV of other tokens is read"
                if not batch.request(row).sealed:
                    assert computed_under == version, "KV of other weights is read"

    def slot(self, row: int, position: int) -> int:
        return int(self.rig.batch.block_table[row, position // BLOCK]) * BLOCK + position % BLOCK

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for offset in range(copy.num_tokens):
                content = self.slots[copy.source * BLOCK + offset]
                self.slots[copy.target * BLOCK + offset] = content

    def check_reason(self, request: Request) -> None:
        """The reason is the right one of the rules in design order: stop beats length."""
        tokens, params = self.given[request.request_id], request.params
        if request.finish_reason == "error":
            assert request.error_reason == "non_finite_logits"
        elif tokens[-1] in EOS or tokens[-1] in params.stop_token_ids:
            assert (request.finish_reason, request.stop_reason) == ("stop", tokens[-1])
        else:
            assert (request.finish_reason, request.stop_reason) == ("length", "max_tokens")
            assert len(tokens) == params.max_tokens

    @precondition(lambda self: self.all)
    @rule(data=st.data(), really=st.integers(0, 2))
    def abort(self, data: st.DataObject, really: int) -> None:
        if really:
            return
        RAN["abort"] += 1
        chosen = data.draw(st.lists(st.sampled_from(self.all), min_size=1, max_size=3, unique=True))
        self.ended += [r for r in chosen if not r.finished]
        self.rig.scheduler.abort(chosen)

    @rule(keep=st.booleans(), really=st.integers(0, 2))
    def publish(self, keep: bool, really: int) -> None:
        if really:
            return
        RAN["keep" if keep else "recompute"] += 1
        if keep:
            before = list(self.rig.scheduler.running)
            self.rig.scheduler.seal_running()
            self.started_over |= {r.request_id for r in before if r.row is None}
        else:
            self.rig.scheduler.requeue_running()
        self.rig.version += 1
        self.rig.kv.advance_version(self.rig.version)

    @rule(really=st.integers(0, 3))
    def release_and_restore(self, really: int) -> None:
        """What the engine does around giving its KV memory back: nothing cached survives."""
        if really:
            return
        RAN["release"] += 1
        self.rig.scheduler.requeue_running()
        self.rig.kv.reset()
        self.slots.clear()
        assert self.rig.kv.pool.num_free == self.rig.kv.pool.num_total

    @invariant()
    def books_balance(self) -> None:
        scheduler, kv, batch = self.rig.scheduler, self.rig.kv, self.rig.batch
        kv.check_integrity()
        assert kv.num_requests == len(scheduler.running) == len(batch)
        live = [*scheduler.running, *scheduler.waiting]
        assert len({r.request_id for r in live}) == len(live)
        assert len({r.request_id for r in [*live, *self.ended]}) == len(self.all)
        assert len(live) + len(self.ended) == len(self.all)
        assert sum(scheduler.finished.values()) == len(self.ended)
        held = [row for row, request in enumerate(batch.requests) if request is not None]
        assert sorted(r.row for r in scheduler.running) == held
        for request in scheduler.waiting:
            assert request.row is None and request.status is RequestStatus.WAITING
        waiting = [r.request_id for r in scheduler.waiting]
        assert waiting == sorted(waiting), "somebody was overtaken"
        for first in waiting[:1]:
            younger = any(r.request_id > first for r in scheduler.running)
            assert not younger or first in self.started_over

    @invariant()
    def tokens_are_those_that_were_sampled(self) -> None:
        for request in self.all:
            tokens, logprobs = self.rig.batch.output(request)
            given = self.given[request.request_id]
            assert tokens.tolist() == given and len(logprobs) == len(given)
            assert (np.asarray(logprobs) == -1).all()
            starts = [start for _, start in request.spans]
            said = [v for v, start in request.spans for _ in range(start, len(given))]
            versions = self.versions[request.request_id]
            assert starts == sorted(set(starts)) and len(said) >= len(given)
            for index, (version, start) in enumerate(request.spans):
                end = starts[index + 1] if index + 1 < len(starts) else len(given)
                assert versions[start:end] == [version] * (end - start)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.finish()
        assert all(r.finished for r in self.all)
        assert self.rig.kv.pool.num_used == 0


PROFILE = settings(max_examples=400, stateful_step_count=50, deadline=None)


def test_random_lives_of_requests() -> None:
    """S1, S3, S5, S8, S10, S11, K16, K20, K21: thousands of steps, integrity after each."""
    RAN.clear()
    run_state_machine_as_test(SchedulerMachine, settings=PROFILE)
    assert RAN["step"] > 2000, RAN
    for operation in (
        "preemption", "fork", "late fork", "failed step", "abort", "keep", "recompute", "release",
    ):
        assert RAN[operation] > 20, RAN
