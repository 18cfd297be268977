"""The start-up probe: it holds for every road that claims exactness, and notices those that lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention import select_backend
from attention.reference import ReferenceAttention
from rollout import ExactnessRefused, RolloutEngine
from rollout.exactness import probe, settle
from rollout.model import attention_for
from rollout.model.operators import select_operators
from rollout.model.portable import StockOperators
from tests.models import FAMILIES, tiny_model

ROADS = [(None, None), ("portable", "tiled"), ("portable", None), (None, "tiled")]


class ClaimingAttention(ReferenceAttention):
    """Computes each sequence by stock products of its own shape, and claims too much."""

    name = "claiming"
    exact = True


class ClaimingOperators(StockOperators):
    """`F.linear`: a row's bits depend on how many there are."""

    name = "claiming"
    exact = True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("operators", "attention"), ROADS)
def test_it_holds_for_what_claims_exactness(family, operators, attention):
    model = tiny_model(family)
    model.operators = operators
    result = probe(model, attention_for(model, attention))
    assert result.held and result.reason == ""
    assert result.comparisons > 10_000


def test_the_engine_proves_itself_by_default():
    engine = RolloutEngine(tiny_model())
    assert engine.exactness.on and engine.exactness.probe.held
    assert "probe held" in str(engine.exactness)


@pytest.mark.parametrize("exact", [None, True])
def test_operators_that_lie_are_refused(exact):
    """L7, the control: nothing is weakened silently, whether the mode was asked for or not."""
    model = tiny_model()
    model.operators = ClaimingOperators()
    with pytest.raises(ExactnessRefused, match=r"not exact on this mach.*hidden differ.*exact=F"):
        RolloutEngine(model, exact=exact)
    assert not RolloutEngine(model, exact=False).exactness.on


def test_attention_that_lies_is_refused():
    with pytest.raises(ExactnessRefused, match="claiming attention"):
        RolloutEngine(tiny_model(), attention_backend=ClaimingAttention)


@pytest.mark.parametrize("part", ["log_normalizers", "gather"])
def test_a_vocabulary_that_scores_otherwise_is_refused(part):
    """One last bit between the log-prob that is drawn and the one that is scored."""
    model = tiny_model()
    operators = select_operators(None, torch.device("cpu"), torch.float32)

    class Off(type(operators.vocabulary)):
        pass

    def off(self, *args, **kwargs):
        result = getattr(super(Off, self), part)(*args, **kwargs)
        if isinstance(result, tuple):
            return torch.nextafter(result[0], torch.tensor(9e9)), *result[1:]
        return torch.nextafter(result, torch.tensor(9e9))

    setattr(Off, part, off)

    class WithOff(type(operators)):
        vocabulary = Off()

    model.operators = WithOff()
    with pytest.raises(ExactnessRefused, match="logprobs differ between paged steps and the train"):
        RolloutEngine(model)


def test_what_makes_no_claim_is_off_and_says_why():
    model = tiny_model()
    engine = RolloutEngine(model, attention_backend="reference")
    assert not engine.exactness.on and "reference" in engine.exactness.reason
    with pytest.raises(ExactnessRefused, match="reference on cpu"):
        RolloutEngine(model, attention_backend="reference", exact=True)
    half = tiny_model().to(torch.bfloat16)
    settled = settle(None, half, attention_for(half))
    assert not settled.on and "torch.bfloat16" in str(settled)


def test_it_leaves_everything_as_it_was():
    model = tiny_model()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    before = [p.clone() for p in model.parameters()]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert probe(model, select_backend()).held
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_weights_without_a_finite_result_are_no_failure_of_the_kernels():
    model = tiny_model()
    with torch.no_grad():
        model.output_weight[5] = torch.nan
    assert probe(model, select_backend()).held


def test_the_fingerprint_tells_weights_apart_and_nothing_else():
    model, same, other = tiny_model(), tiny_model(), tiny_model(seed=1)
    prints = [probe(m, select_backend()).fingerprint for m in (model, same, other)]
    assert prints[0] == prints[1] != prints[2]
    portable = probe(model, select_backend("tiled")).fingerprint
    assert portable != prints[0]


def test_thread_counts_are_compared():
    """A kernel that adds up by thread passes with one thread and fails with two."""
    model = tiny_model()
    operators = select_operators(None, torch.device("cpu"), torch.float32)

    class ByThread(type(operators)):
        def silu_mul(self, gate_up):
            out = super().silu_mul(gate_up)
            return out * np.float32(1 + 1e-6 * (torch.get_num_threads() - 1))

    model.operators = ByThread()
    with pytest.raises(ExactnessRefused, match="on 1"):
        RolloutEngine(model)


