"""The torch-free scheduler, driven with real block bookkeeping and invented tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache import BlockPool, KVCacheManager
from rollout.request import PromptTask, Request
from rollout.sampling import SamplingParams
from rollout.scheduler import Sampled, Scheduled, Scheduler

EOS = frozenset({1})
BLOCK = 4


class Rig:
    """A scheduler over `blocks` usable blocks whose model says `token_for(request)`."""

    def __init__(self, blocks: int = 100, batch: int = 8, budget: int = 1024) -> None:
        self.kv: KVCacheManager[int] = KVCacheManager(BlockPool(blocks + 1), BLOCK)
        self.scheduler = Scheduler(self.kv, batch, budget, EOS)
        self.version = 0
        self.ids = 0

    def add(self, prompt: list[int] | int, **fields: object) -> Request:
        tokens = [50 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **fields})
        request = Request(self.ids, PromptTask(self.ids, tokens, params, 0, 0), 0)
        request.max_total_tokens = 60
        self.ids += 1
        self.scheduler.add(request)
        return request

    def plan(self) -> list[Scheduled]:
        plan = self.scheduler.plan(self.version)
        self.kv.check_integrity()
        return plan

    def commit(self, plan: list[Scheduled], token: int = 7) -> list[Request]:
        rows = [Sampled(token, -1.0, -1.0) for entry in plan if entry.samples]
        ended = self.scheduler.commit(plan, rows, self.version)
        self.kv.check_integrity()
        return ended

    def step(self, token: int = 7) -> list[Request]:
        return self.commit(self.plan(), token)

    def finish(self) -> int:
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < 1000, "livelock"
        return steps


def shape(plan: list[Scheduled]) -> dict[int, int]:
    return {entry.request.request_id: entry.num_new_tokens for entry in plan}


def test_counts_at_every_stage():
    """S1, S8, S10."""
    rig = Rig(batch=2)
    requests = [rig.add(6) for _ in range(3)]
    assert (len(rig.scheduler.waiting), len(rig.scheduler.running)) == (3, 0)
    rig.step()
    assert (len(rig.scheduler.waiting), len(rig.scheduler.running)) == (1, 2)
    rig.finish()
    assert all(r.finished and r.finish_reason == "length" for r in requests)
    assert rig.scheduler.finished == {"length": 3}
    assert rig.kv.pool.num_used == 0 and rig.kv.num_requests == 0


def test_the_budget_is_shared_and_long_prompts_are_chunked():
    """S2: all advance; a prompt samples only on its last chunk; decodes share its steps."""
    rig = Rig(budget=10, batch=4)
    a, b = rig.add(list(range(2, 8))), rig.add(list(range(20, 40)))
    first = rig.plan()
    assert shape(first) == {0: 6, 1: 4}
    assert [entry.samples for entry in first] == [True, False]
    rig.commit(first)
    second = rig.plan()
    assert shape(second) == {0: 1, 1: 9}
    rig.commit(second)
    third = rig.plan()
    assert shape(third) == {0: 1, 1: 7} and all(entry.samples for entry in third)
    rig.commit(third)
    assert (a.num_output_tokens, b.num_output_tokens) == (3, 1)


def test_first_come_first_served():
    """S3, S7: the batch limit holds, nobody is overtaken, everybody finishes."""
    rig = Rig(batch=2)
    requests = [rig.add(5, max_tokens=1 + i % 3) for i in range(6)]
    started: list[int] = []
    while rig.scheduler.has_work:
        plan = rig.plan()
        assert len(plan) <= 2
        started += [e.request.request_id for e in plan if not e.request.num_computed_tokens]
        rig.commit(plan)
    assert started == sorted(started) and all(r.finished for r in requests)


def test_no_step_too_many():
    """S9: a request of max_tokens n takes n steps."""
    rig = Rig()
    rig.add(5, max_tokens=4)
    assert rig.finish() == 4


def test_preemption_takes_the_newest_and_it_resumes_first():
    """S5: tokens, log-probs and spans stay; it waits at the head of the queue."""
    rig = Rig(blocks=5, batch=2)
    old, new = rig.add([2, 3, 4], max_tokens=12), rig.add([5, 6, 7], max_tokens=12)
    late = rig.add([8, 9])
    while not rig.scheduler.preemptions:
        rig.step()
    assert list(rig.scheduler.waiting) == [new, late] and rig.scheduler.running == [old]
    kept = list(new.tokens)
    assert new.num_computed_tokens == 0 and len(new.logprobs) == new.num_output_tokens > 0
    rig.finish()
    assert new.tokens[: len(kept)] == kept
    assert [r.num_output_tokens for r in (old, new, late)] == [12, 12, 5]


def test_one_request_alone_uses_all_blocks():
    """S6: what fits exactly finishes without preemption; the last token needs no KV."""
    rig = Rig(blocks=3)
    request = rig.add(7, max_tokens=6)  # 7 + 6 - 1 = 12 tokens of KV
    rig.finish()
    assert request.num_output_tokens == 6 and rig.scheduler.preemptions == 0


def test_identical_prompts_of_one_plan_share():
    """K14: the second computes only the remainder, in the same step."""
    rig = Rig()
    rig.add(10)
    rig.add(10)
    assert shape(rig.plan()) == {0: 10, 1: 2}


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"max_tokens": 3}, [7, 7, 7], ("length", "max_tokens")),
        ({"ignore_eos": False}, [7, 1], ("stop", 1)),
        ({"max_tokens": 2}, [7, 1], ("length", "max_tokens")),
        ({"stop_token_ids": (9, 7)}, [7], ("stop", 7)),
        ({"ignore_eos": False, "max_tokens": 1}, [1], ("stop", 1)),
        ({"max_tokens": None}, [7] * 10, ("length", "context")),
    ],
)
def test_stop_reasons(fields, tokens, reason):
    """S4."""
    rig = Rig()
    request = rig.add(50, **fields)
    for token in tokens:
        assert not request.finished
        rig.step(token)
    assert (request.finish_reason, request.stop_reason) == reason
    assert request.tokens[50:] == tokens


def test_abort_in_every_state():
    """S1, S11: waiting, running and finished; everything is freed, each counted once."""
    rig = Rig(batch=2)
    requests = [rig.add(6, max_tokens=1 if i == 0 else 5) for i in range(6)]
    rig.step()
    rig.scheduler.abort(requests)
    rig.scheduler.abort(requests)
    assert [r.finish_reason for r in requests] == ["length"] + ["aborted"] * 5
    assert rig.scheduler.finished == {"length": 1, "aborted": 5}
    assert not rig.scheduler.has_work and rig.kv.pool.num_used == 0


def test_a_row_without_a_token_ends_its_request():
    """L9."""
    rig = Rig()
    bad, good = rig.add([2, 3]), rig.add([4, 5])
    rig.scheduler.commit(rig.plan(), [Sampled(None, 0, 0), Sampled(7, -1.0, -1.0)], 0)
    assert (bad.finish_reason, bad.error_reason) == ("error", "non_finite_logits")
    assert not good.finished and good.tokens[-1] == 7


def test_a_failed_step_publishes_nothing():
    """K21: its blocks are not findable; the requests start over and finish."""
    rig = Rig()
    requests = [rig.add(10), rig.add(10)]
    rig.scheduler.abandon(rig.plan())
    rig.kv.check_integrity()
    assert rig.kv.pool.num_cached == 0
    assert [r.request_id for r in rig.scheduler.waiting] == [0, 1]
    assert shape(rig.plan()) == {0: 10, 1: 2}
    assert not any(r.finished for r in requests)


def test_limits_are_checked():
    kv: KVCacheManager[int] = KVCacheManager(BlockPool(5), BLOCK)
    with pytest.raises(ValueError, match="max_batch_size"):
        Scheduler(kv, 0, 10, EOS)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\)"):
        Scheduler(kv, 4, 3, EOS)


class Machine(RuleBasedStateMachine):
    """Random arrivals, steps, failures, aborts and publications over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(blocks=15, batch=4, budget=9)
        self.all: list[Request] = []
        self.ended: list[Request] = []

    @rule(length=st.integers(1, 20), kind=st.integers(0, 2), new=st.integers(1, 12))
    def arrive(self, length: int, kind: int, new: int) -> None:
        self.all.append(self.rig.add([30 + kind] * length, max_tokens=new, ignore_eos=False))

    @precondition(lambda self: self.rig.scheduler.has_work)
    @rule(token=st.sampled_from([7, 7, 7, 8, 1]), fails=st.integers(0, 9))
    def step(self, token: int, fails: int) -> None:
        plan = self.rig.plan()
        assert plan, "work is left and nothing is planned"
        assert sum(shape(plan).values()) <= 9 and len(plan) == len(shape(plan)) <= 4
        for request, new in plan:
            held = len(self.rig.kv.block_ids(request.request_id)) * BLOCK
            assert new >= 1 and held >= request.num_computed_tokens + new
        if fails == 0:
            self.rig.scheduler.abandon(plan)
        else:
            self.ended += self.rig.commit(plan, token)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.all))
        if not request.finished:
            self.ended.append(request)
        self.rig.scheduler.abort([request])

    @rule(keep=st.booleans())
    def publish(self, keep: bool) -> None:
        if keep:
            self.rig.scheduler.seal_running()
        else:
            self.rig.scheduler.requeue_running()
        self.rig.version += 1
        self.rig.kv.unpublish_older(self.rig.version)

    @invariant()
    def books_balance(self) -> None:
        scheduler, kv = self.rig.scheduler, self.rig.kv
        kv.check_integrity()
        assert kv.num_requests == len(scheduler.running)
        live = [*scheduler.running, *scheduler.waiting]
        assert len({r.request_id for r in live}) == len(live)
        assert len(live) + len(self.ended) == len(self.all)
        assert len({r.request_id for r in self.ended}) == len(self.ended)
        assert sum(scheduler.finished.values()) == len(self.ended)
        for request in self.all:
            assert len(request.logprobs) == request.num_output_tokens
            assert sum(end - start for _, start, end in request.spans) == request.num_output_tokens

    def teardown(self) -> None:
        self.rig.finish()
        assert all(r.finished for r in self.all)
        assert self.rig.kv.pool.num_used == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
