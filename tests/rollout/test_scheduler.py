"""The torch-free scheduler, driven with real block bookkeeping and invented tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import BlockPool, KVCacheManager
from rollout.detokenizer import Detokenizer
from rollout.running import RunningBatch
from rollout.sampling_rows import NOT_FINITE, NOTHING_LEFT, SampledRows
from rollout.scheduler import Scheduler
from tests.rollout.scheduler_rig import BLOCK, EOS, Rig, sampled


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
    assert rig.kv.pool.num_used == 0 and rig.kv.num_requests == len(rig.batch) == 0


def test_long_prompts_are_chunked_beside_decodes():
    """S2: a prompt samples only on its last chunk; a decode and a chunk share a step."""
    rig = Rig(budget=10, batch=4)
    a, b = rig.add(list(range(2, 8))), rig.add(list(range(20, 40)))
    first = rig.plan()
    assert rig.shape(first) == {0: 6, 1: 4}
    assert first.samples.tolist() == [True, False]
    rig.commit(first)
    second = rig.plan()
    assert rig.shape(second) == {0: 1, 1: 9}
    rig.commit(second)
    third = rig.plan()
    assert rig.shape(third) == {0: 1, 1: 7} and third.samples.all()
    rig.commit(third)
    assert (len(rig.output(a)), len(rig.output(b))) == (3, 1)


def test_a_chunk_limit_lets_long_prompts_advance_together():
    """S2: three prompts share the budget of every step, the oldest first."""
    rig = Rig(budget=20, batch=4, chunk=8)
    for start in (100, 200, 300):
        rig.add(list(range(start, start + 16)))
    assert rig.shape(rig.plan()) == {0: 8, 1: 8, 2: 4}
    without = Rig(budget=20, batch=4)
    for start in (100, 200, 300):
        without.add(list(range(start, start + 16)))
    assert without.shape(without.plan()) == {0: 16, 1: 4}


def test_first_come_first_served():
    """S3, S7: the batch limit holds, nobody is overtaken, everybody finishes."""
    rig = Rig(batch=2)
    requests = [rig.add(5, max_tokens=1 + i % 3) for i in range(6)]
    started: list[int] = []
    while rig.scheduler.has_work:
        plan = rig.plan()
        assert len(plan.rows) <= 2
        started += [i for i in rig.shape(plan) if i not in started]
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
    kept = rig.output(new)
    assert new.row is None and len(new.logprobs) == len(kept) > 0 and new.spans == [(0, 0)]
    rig.finish()
    assert rig.output(new)[: len(kept)] == kept
    assert [len(rig.output(r)) for r in (old, new, late)] == [12, 12, 5]
    assert new.version_spans() == ((0, 0, 12),)


def test_preemption_for_the_oldest_can_empty_the_rest_of_the_plan():
    """S5: those before the preempted one stay planned, those after are gone from the step."""
    rig = Rig(blocks=4, batch=4)
    for first in (2, 6, 10, 14):
        rig.add([first, first + 1, first + 2, first + 3], max_tokens=8)
    plan = rig.plan()
    assert rig.shape(plan) == {0: 4, 1: 4, 2: 4, 3: 4}
    rig.commit(plan)
    assert rig.shape(rig.plan()) == {0: 1, 1: 1}
    assert [r.request_id for r in rig.scheduler.waiting] == [2, 3]
    assert rig.scheduler.preemptions == 2


def test_one_request_alone_uses_all_blocks():
    """S6: what fits exactly finishes without preemption; the last token needs no KV."""
    rig = Rig(blocks=3)
    request = rig.add(7, max_tokens=6)  # 7 + 6 - 1 = 12 tokens of KV
    rig.finish()
    assert len(rig.output(request)) == 6 and rig.scheduler.preemptions == 0


def test_identical_prompts_of_one_plan_share():
    """K14: the second computes only the remainder, in the same step."""
    rig = Rig()
    rig.add(10)
    rig.add(10)
    assert rig.shape(rig.plan()) == {0: 10, 1: 2}


def test_samples_of_one_prompt_compute_it_once():
    """K14: those admitted with it fork from its logits; with one admitted later only the last
    token is computed again; then, when nobody runs any more, the block that is not full."""
    rig = Rig(batch=2)
    first, second, third, fourth = rig.group(10, 4, max_tokens=20)
    plan = rig.plan()
    assert rig.shape(plan) == {0: 10} and plan.forked.tolist() == [second.row]
    assert [c.num_tokens for c in plan.copies_after] == [2] and not plan.copies_before
    rig.commit(plan)
    assert rig.shape(rig.plan()) == {0: 1, 1: 1}
    rig.step()
    rig.scheduler.abort([second])
    later = rig.plan()
    assert rig.shape(later) == {0: 1, 2: 1}
    assert [c.num_tokens for c in later.copies_before] == [1] and not later.copies_after
    rig.commit(later)
    rig.scheduler.abort([first, third])
    assert rig.shape(rig.plan()) == {3: 2}
    assert rig.kv.prefix_stats()[0] == (40, 10 + 9 + 8)
    assert fourth.row is not None


@pytest.mark.parametrize("length", [8, 9, 12])
def test_a_fork_at_a_border_of_blocks(length):
    """K14: a prompt of full blocks leaves nothing to copy, or one block for who comes later."""
    rig = Rig(batch=2)
    _, second, *_ = rig.group(length, 3, max_tokens=20)
    plan = rig.plan()
    assert [c.num_tokens for c in plan.copies_after] == [length % BLOCK] * (length % BLOCK > 0)
    rig.commit(plan)
    rig.scheduler.abort([second])
    later = rig.plan()
    rest = (length - 1) % BLOCK
    assert [c.num_tokens for c in later.copies_before] == [rest] * (rest > 0)
    assert rig.shape(later) == {0: 1, 2: 1}


def test_who_does_not_fork():
    """A sample that has tokens, one whose prompt is scored, and any with caching off."""
    rig = Rig(batch=4)
    scored = rig.group(10, 2, prompt_logprobs=0)
    for request in scored:
        assert not request.may_fork
    assert not rig.add(10).may_fork
    cold = Rig(batch=4)
    cold.kv.pool.enable_prefix_caching = False
    cold.group(10, 2)
    assert cold.shape(cold.plan()) == {0: 10, 1: 10}


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"max_tokens": 3}, [7, 7, 7], ("length", "max_tokens")),
        ({"ignore_eos": False}, [7, 1], ("stop", 1)),
        ({"max_tokens": 2}, [7, 1], ("length", "max_tokens")),
        ({"stop_token_ids": (9, 7)}, [7], ("stop", 7)),
        ({"ignore_eos": False, "max_tokens": 1}, [1], ("stop", 1)),
        ({"max_tokens": None}, [7] * 10, ("length", "context")),
        ({"max_tokens": 10}, [7] * 10, ("length", "max_tokens")),
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
    assert rig.output(request) == tokens


def test_a_stop_id_ends_only_the_request_that_names_it():
    """S4: the ids of all running requests are tested at once; each still has its own."""
    rig = Rig()
    named, other, eos = rig.add(3, stop_token_ids=(7,)), rig.add(3), rig.add(3, ignore_eos=False)
    rig.step(7)
    assert [r.finished for r in (named, other, eos)] == [True, False, False]
    rig.step(1)
    assert [r.finished for r in (other, eos)] == [False, True]
    late = rig.add(3)
    rig.step(7)  # the id that `named` brought is gone with it
    assert not late.finished and rig.batch.stop_ids.tolist() == [1]


def test_a_stop_string_is_looked_for_in_every_token():
    """S4, L10: across a token border; stop beats length."""

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(i) for i in ids)

    rig = Rig()
    request = rig.add([60], max_tokens=3, stop=("bc",))
    request.detokenizer = Detokenizer(Letters(), ("bc",))
    for letter in "abc":
        assert not request.finished
        rig.step(ord(letter))
    assert (request.finish_reason, request.stop_reason) == ("stop", "bc")
    assert request.result().text == "a"
    assert rig.output(request) == [ord(letter) for letter in "abc"]


def test_abort_in_every_state():
    """S1, S11: waiting, running and finished; everything is freed, each counted once."""
    rig = Rig(batch=2)
    requests = [rig.add(6, max_tokens=1 if i == 0 else 5) for i in range(32)]
    rig.step()
    rig.scheduler.abort(requests)
    rig.scheduler.abort(requests)
    assert [r.finish_reason for r in requests] == ["length"] + ["aborted"] * 31
    assert rig.scheduler.finished == {"length": 1, "aborted": 31}
    assert not rig.scheduler.has_work and rig.kv.pool.num_used == len(rig.batch) == 0


def test_rows_without_a_token_end_their_requests():
    """L9: by name, next to a good one; the three kinds of row are told apart."""
    rig = Rig()
    bad, good, stuck = rig.add([2, 3]), rig.add([4, 5]), rig.add([6, 7])
    rig.scheduler.commit(rig.plan(), sampled([NOT_FINITE, 7, NOTHING_LEFT]), 0)
    assert (bad.finish_reason, bad.error_reason) == ("error", "non_finite_logits")
    assert (stuck.finish_reason, stuck.error_reason) == ("error", "no_token_allowed")
    assert not good.finished and rig.output(good) == [7] and rig.output(bad) == []


def test_a_failed_step_publishes_nothing():
    """K21: its blocks are not findable; the requests start over and finish."""
    rig = Rig()
    requests = [rig.add(10), rig.add(10)]
    rig.scheduler.abandon(rig.plan())
    rig.kv.check_integrity()
    assert rig.kv.pool.num_cached == 0
    assert [r.request_id for r in rig.scheduler.waiting] == [0, 1]
    assert rig.shape(rig.plan()) == {0: 10, 1: 2}
    assert not any(r.finished for r in requests)


def test_spans_say_which_version_sampled_what():
    """W6: `keep` and `recompute` go on with the same tokens; spans partition the output."""
    rig = Rig()
    kept, late = rig.add([2, 3], max_tokens=6), None
    for version in (0, 0, 1, 1, 4):
        if version != rig.version:
            rig.scheduler.seal_running() if version == 1 else rig.scheduler.requeue_running()
            rig.version = version
            rig.kv.advance_version(version)
            late = late or rig.add([4, 5], max_tokens=3)
        rig.step()
    rig.step()
    assert kept.version_spans() == ((0, 0, 2), (1, 2, 4), (4, 4, 6))
    assert late is not None and late.version_spans() == ((1, 0, 2), (4, 2, 3))


def test_best_tokens_go_to_those_who_asked():
    """`logprobs=k`: each request keeps its own k of the columns of a mixed step."""
    rig = Rig()
    one, none, two = rig.add([2], logprobs=1), rig.add([3]), rig.add([4], logprobs=2)
    rows = sampled([7, 7, 7])
    ids = np.array([[5, 6], [5, 6], [8, 9]])
    logprobs = np.array([[-1, -2], [-1, -2], [-3, -4]], np.float32)
    top = SampledRows(rows.tokens, rows.logprobs, rows.sampling_logprobs, ids, logprobs)
    rig.scheduler.commit(rig.plan(), top, 0)
    assert (one.top, none.top, two.top) == ([{5: -1.0}], [], [{8: -3.0, 9: -4.0}])


def test_limits_are_checked():
    kv: KVCacheManager[int] = KVCacheManager(BlockPool(5), BLOCK)
    with pytest.raises(ValueError, match="max_batch_size"):
        RunningBatch(0, 60, BLOCK, EOS)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\)"):
        Scheduler(kv, RunningBatch(4, 60, BLOCK, EOS), 3, EOS)
    with pytest.raises(ValueError, match="long_prefill_token_threshold"):
        Scheduler(kv, RunningBatch(4, 60, BLOCK, EOS), 4, EOS, -1)


def test_the_queue_stays_in_order_of_arrival():
    """S3: under `keep` an older request starts over while a younger one runs on; preempted later,
    the younger one does not come before it."""
    rig = Rig(batch=3, chunk=4)
    older, younger, last = rig.add([2] * 9), rig.add([3, 4]), rig.add([5, 6])
    rig.step()
    rig.scheduler.seal_running()
    assert list(rig.scheduler.waiting) == [older]
    assert rig.scheduler.running == [younger, last]
    rig.scheduler.requeue_running()
    assert list(rig.scheduler.waiting) == [older, younger, last]
