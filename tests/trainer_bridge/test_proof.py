"""The proof itself: it holds, counts what it met, and notices a bit that depends on company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.model.operators import select_operators
from tests.models import tiny_model
from trainer_bridge import Proof, prove
from trainer_bridge.proof import Comparison

MORE_ROWS_THAN_THE_PROBE = 130


class DependsOnRows(type(select_operators(None, torch.device("cpu"), torch.float32))):
    """Exact up to a size of batch that the start-up probe does not try."""

    def silu_mul(self, gate_up):
        out = super().silu_mul(gate_up)
        return out * (1 + 2e-7) if gate_up.shape[0] > MORE_ROWS_THAN_THE_PROBE else out


def test_it_holds_and_the_control_does_not():
    """L5, L6, L7 on one model, in little; the script does it on all of them at length."""
    model = tiny_model()
    before = [p.clone() for p in model.parameters()]
    operators, threads = model.operators, torch.get_num_threads()
    seen: list[int] = []
    proof = prove(model, tokens=3_000, control_tokens=200, progress=seen.append)
    assert proof.held and proof.conclusive
    assert proof.scored.tokens >= 3_000 and seen[-1] == proof.scored.tokens
    assert proof.repeated.tokens > 300
    assert proof.preemptions > 0 and proof.prefix_hit_tokens > 0 and proof.engines > 2
    assert 0 < proof.control.max_difference < 1e-3
    assert "0 differ, max |Δ log-prob| 0" in str(proof) and "held" in str(proof)
    assert model.operators is operators and torch.get_num_threads() == threads
    assert all(map(torch.equal, before, model.parameters()))


def test_it_notices_what_the_probe_is_too_small_for():
    model = tiny_model()
    model.operators = DependsOnRows()
    proof = prove(model, tokens=1_500, control_tokens=1)
    assert not proof.held
    assert proof.scored.differing > 0 and 0 < proof.scored.max_difference < 1e-4
    assert "DID NOT HOLD" in str(proof)


def test_what_the_probe_would_refuse_is_shown_not_raised():
    """Kernels that are not exact at all: a proof that did not hold, with its figures."""
    model = tiny_model()
    model.operators = "stock"
    proof = prove(model, tokens=500, control_tokens=1)
    assert not proof.held and proof.scored.differing > 0


def test_equal_seeds_prove_the_same():
    proofs = [prove(tiny_model(), tokens=300, control_tokens=50, seed=4) for _ in range(2)]
    assert proofs[0].scored == proofs[1].scored and proofs[0].control == proofs[1].control


@pytest.mark.parametrize(
    "settings", [{"tokens": 0}, {"threads": ()}, {"threads": (0,)}, {"actors": (1, 0)}]
)
def test_what_cannot_be_proved_is_refused(settings):
    with pytest.raises(ValueError, match="at least 1"):
        prove(tiny_model(), **settings)


def test_actors_need_a_folder(tmp_path):
    with pytest.raises(ValueError, match="pass its folder"):
        prove(tiny_model(), actors=(2,))


def test_bits_are_compared_not_values():
    comparison = Comparison()
    comparison.add(np.float32([0.0, -1.0]), np.float32([-0.0, -1.0]))
    assert (comparison.tokens, comparison.differing, comparison.max_difference) == (2, 1, 0.0)


def test_nothing_compared_is_nothing_shown():
    assert not Proof().held
    blind = Proof(scored=Comparison(5), repeated=Comparison(5), control=Comparison(5))
    assert blind.held and not blind.conclusive and "NOT SHOWN" in str(blind)
