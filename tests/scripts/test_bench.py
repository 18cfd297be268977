"""The pure parts of the benchmarks: what is asked for, what counts, what a machine could do."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from rollout import DecoderConfig
from scripts.bench.machine import (
    Rates,
    common_beginning,
    decode_work,
    layer_parameters,
    limit_tokens_per_s,
    prefill_work,
)
from scripts.bench.peers.draw import draw
from scripts.bench.peers.figures import Figures, table
from scripts.bench.rollout import names, positive
from scripts.bench.workloads import WORKLOADS, Group, Sample, check_samples, requests
from tests.models import tiny_config

VOCABULARY = 1_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_what_they_say(name):
    workload = WORKLOADS[name]
    groups = workload.draw(3, VOCABULARY)
    assert groups == workload.draw(3, VOCABULARY)
    assert len(groups) == workload.prompts
    low, high = workload.prompt_tokens
    for group in groups:
        assert workload.prefix + low <= len(group.prompt) <= workload.prefix + high
        assert len(group.max_tokens) == workload.samples
        assert all(workload.new_tokens[0] <= n <= workload.new_tokens[1] for n in group.max_tokens)
        assert all(0 <= token < VOCABULARY for token in group.prompt)
    prompts = [group.prompt for group in groups]
    assert common_beginning(prompts) == workload.prefix
    others = [group.prompt for group in workload.draw(4, VOCABULARY)]
    assert common_beginning(prompts + others) == 0  # no repeat hits another one's prefix cache
    assert max(len(p) + max(g.max_tokens) for p, g in zip(prompts, groups, strict=True)) <= (
        workload.max_seq_len
    )


def test_design_sizes():
    """W1 and W2 are those of the figures in the README: 64 samples of 64 new tokens."""
    for name, prompt in (("w1", 64), ("w2", 512)):
        groups = WORKLOADS[name].draw(0, VOCABULARY)
        assert [len(g.prompt) for g in groups] == [prompt] * 8
        assert [g.max_tokens for g in groups] == [[64] * 8] * 8


def test_groups_are_one_request_where_their_lengths_allow():
    same, mixed = Group([1, 2], [4, 4, 4]), Group([3], [2, 5])
    assert [(r.prompt, r.n, r.max_tokens) for r in requests([same])] == [([1, 2], 3, 4)]
    assert [(r.n, r.max_tokens) for r in requests([same, mixed])] == [
        (1, 4), (1, 4), (1, 4), (1, 2), (1, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([Sample([1, 2], [-1.0, -2.0])], "asked for 2 samples"),
        ([Sample([1, 2], [-1.0, -2.0]), Sample([1], [-1.0])], "should have 3"),
        ([Sample([1, 2], [-1.0]), Sample([1] * 3, [-1.0] * 3)], "should have 2"),
        ([Sample([1, 2], [-1.0, np.nan]), Sample([1] * 3, [-1.0] * 3)], "not finite"),
        ([Sample([1, 2], [-1.0, 0.5]), Sample([1] * 3, [-1.0] * 3)], "above 0"),
    ],
)
def test_an_engine_that_returns_too_little_is_not_timed(samples, message):
    groups = [Group([1], [2]), Group([2], [3])]
    good = [Sample([1, 2], [-1.0, -2.0]), Sample([1] * 3, [-1.0] * 3)]
    assert check_samples(groups, good) == 5
    with pytest.raises(ValueError, match=message):
        check_samples(groups, samples)


def test_the_limit_by_hand():
    """One prompt of 3 tokens, two samples of 2: four tokens, two of them from the prefill."""
    config: DecoderConfig = tiny_config()
    groups = [Group([1, 2, 3], [2, 2])]
    layers = layer_parameters(config)
    assert layers == 3 * (64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 128)
    projection = 101 * 64
    attention = 4 * 3 * 4 * 32  # per token and token of context
    prefill, decode = prefill_work(config, groups), decode_work(config, groups, batch=2)
    assert prefill.flops == 2 * 3 * layers + 2 * projection + attention * (1 + 2 + 3)
    assert prefill.read_bytes == 4 * (layers + projection)
    assert decode.flops == 2 * 2 * (layers + projection) + attention * (4 + 4)
    assert decode.read_bytes == 4 * (layers + projection) + 8 * 3 * 2 * 32 * (4 + 4)
    slow_memory = Rates(1, 1e9, 1e-9 * 4 * (layers + projection))  # a second for the weights
    assert limit_tokens_per_s(config, groups, 2, slow_memory) == pytest.approx(
        4 / (1 + decode.read_bytes / prefill.read_bytes)
    )


def test_drawn_tokens_follow_their_probabilities_and_are_scored():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 300)).astype(np.float32)
    rows = np.repeat(logits, 4_000, axis=0)
    before = rows.copy()
    tokens, logprobs = draw(rows, rng)
    assert (rows == before).all()
    exact = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert logprobs == pytest.approx(exact[tokens], abs=1e-5)
    frequency = np.bincount(tokens, minlength=300) / len(tokens)
    assert np.abs(frequency - np.exp(exact)).sum() < 0.25  # 300 cells, 4,000 draws


def figures(engine: str, speeds: list[float], error: str | None = None) -> Figures:
    return Figures(engine, "tiny", "w1", speeds=speeds, tokens=[4] * len(speeds), error=error)


def test_the_median_counts_and_a_failure_is_no_figure():
    own = figures("lockstep", [1_000.0, 3_000.0, 2_000.0])
    own.limit_tokens_per_s = 4_000.0
    assert own.line()["tokens_per_s"] == 2_000 and own.line()["fraction_of_limit"] == 0.5
    failed = figures("peer", [5_000.0], error="its process ended")
    assert failed.line()["error"] == "its process ended" and "tokens_per_s" not in failed.line()
    rows = table([own, figures("other", [500.0]), failed], "lockstep").splitlines()
    assert rows[2:] == ["| lockstep | 2,000 |", "| other | 500 (4.00) |", "| peer | – |"]


def test_names_on_the_command_line():
    assert names("w2,w1,w2", list(WORKLOADS)) == ["w2", "w1"] and names("none", ["x"]) == []
    with pytest.raises(argparse.ArgumentTypeError, match="'w3' is none of w1, w2"):
        names("w3", ["w1", "w2"])
    assert positive("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        positive("0")
