"""Columns on the wire: nothing is lost on the way there and back."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import Rollout, RolloutBatch, RolloutEngine, SamplingParams, VersionSpan
from rollout.request import PromptTask, prompt_tasks
from rollout.transport import PackedPrompts
from tests.models import tiny_model

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def rollouts(draw) -> list[Rollout]:
    found = []
    for prompt_index in range(draw(st.integers(1, 4))):
        prompt = draw(TOKENS)
        for sample in range(draw(st.integers(1, 3))):
            tokens = draw(TOKENS)
            logprobs = [float(np.float32(-i / 3)) for i in range(len(tokens))]
            spans = (VersionSpan(3, 0, len(tokens)),) if tokens else ()
            mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
            found.append(
                Rollout(
                    prompt_index, sample, prompt, tokens, logprobs, logprobs[::-1], spans,
                    draw(st.sampled_from(["stop", "length", "rejected"])),
                    draw(st.sampled_from([None, 7, "max_tokens"])),
                    draw(st.sampled_from([None, "prompt_empty"])), None,
                    draw(st.integers(0, 2**63 - 1)), 0.5,
                    response_mask=None if all(mask) else mask,
                )
            )
    return found


@given(rollouts())
def test_rollouts_survive_packing(found):
    batch = pickle.loads(pickle.dumps(RolloutBatch.from_rollouts(found)))
    assert list(batch) == found
    assert batch.token_ids.dtype == np.int32 and batch.logprobs.dtype == np.float32
    assert batch.lengths.tolist() == [len(r.token_ids) for r in found]
    masks = [r.response_mask or [True] * len(r.token_ids) for r in found]
    assert batch.response_lengths.tolist() == [sum(mask) for mask in masks]
    turns = [sum(not before and now for before, now in pairwise([False, *m])) for m in masks]
    assert batch.num_turns.tolist() == turns
    assert batch.num_prompts == len({r.prompt_index for r in found})
    assert batch[-1] == found[-1]
    with pytest.raises(IndexError):
        batch[len(batch)]


@given(rollouts(), rollouts())
def test_concat_counts_prompts_on(first, second):
    batches = [RolloutBatch.from_rollouts(first), RolloutBatch.from_rollouts(second)]
    joined = RolloutBatch.concat(batches)
    assert [r.token_ids for r in joined] == [r.token_ids for r in first + second]
    assert joined.num_prompts == batches[0].num_prompts + batches[1].num_prompts
    assert RolloutBatch.concat(batches[:1]) is batches[0]


def test_versions_of_tokens_that_nobody_sampled():
    """A conversation's spans partition what the policy chose; the rest is of no version."""
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2), VersionSpan(5, 4, 5))
    zeros = [0.0] * 5
    talk = Rollout(
        0, 0, [1], [2, 3, 4, 5, 6], zeros, zeros, spans, "stop", None, None, None, 0, 1.0,
        response_mask=[True, True, False, False, True],
    )  # fmt: skip
    plain = Rollout(
        0, 1, [1], [2], [0.0], [0.0], (VersionSpan(6, 0, 1),), "stop", None, None, None, 0, 1.0
    )
    batch = RolloutBatch.from_rollouts([talk, plain])
    assert batch.token_versions.tolist() == [4, 5, -1, -1, 5, 6]
    assert batch.num_turns.tolist() == [2, 1] and batch.response_lengths.tolist() == [3, 1]
    assert batch[0] == talk and batch[1].response_mask is None


def test_select_keeps_order_and_drops_unused_prompts():
    batch = RolloutBatch.from_demonstrations([[1], [2], [3]], [[4], [5, 6], []])
    chosen = batch.select([2, 0])
    assert [r.prompt_token_ids for r in chosen] == [[3], [1]] and chosen.num_prompts == 2
    assert not batch.has_behaviour


@given(st.lists(TOKENS, max_size=5), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_prompts_survive_packing(prompts, ns):
    params = [SamplingParams(n=n, temperature=0.5) for n in ns[: len(prompts)]]
    tasks = prompt_tasks(prompts, params, 7, 100)
    assert pickle.loads(pickle.dumps(PackedPrompts.pack(tasks))).unpack() == tasks


def test_ids_beyond_int32_arrive_as_ids_outside_any_vocabulary():
    task = PromptTask(0, [5, 2**40, -3], SamplingParams(), 0, 0)
    assert PackedPrompts.pack([task]).unpack()[0].token_ids == [5, -1, -1]


def test_one_params_per_prompt_or_one_for_all():
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        prompt_tasks([[1], [2], [3]], [SamplingParams()] * 2, 0, 0)


def test_a_rejected_id_that_int32_cannot_hold_spoils_nothing():
    """R6: its prompt is packed beside the others, the id as -1."""
    engine = RolloutEngine(tiny_model())
    found = engine.run_batch([[5, 2**40], [5, 6]], max_tokens=3, seed=0, return_details=True)
    batch = RolloutBatch.from_rollouts(found)
    assert batch[0].prompt_token_ids == [5, -1]
    assert batch[0].error_reason == "token_out_of_vocabulary"
    assert batch[1] == found[1]
