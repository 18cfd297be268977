"""Element-wise parts whose bits must not depend on the batch."""

from __future__ import annotations

import torch

from rollout.model.layers import RMSNorm, RotaryTable, _SiluMul, inverse_frequencies
from tests.models import tiny_config


def differs(function, width: int) -> bool:
    """Whether a row of `function` changes with the number of rows beside it."""
    x = torch.randn(301, width, generator=torch.Generator().manual_seed(0)) * 3
    whole, before = function(x), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 5, 33, 64, 299):
                for start in (0, 1):
                    part = function(x[start : start + rows].contiguous())
                    if not torch.equal(part, whole[start : start + rows]):
                        return True
    finally:
        torch.set_num_threads(before)
    return False


def test_silu_mul_rows_are_their_own():
    """At odd widths, where a vectorised loop has a tail inside the row; F.silu is the control."""
    for width in (50, 63, 331, 1536):
        assert not differs(lambda x: _SiluMul.apply(x, x + 1), width)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert any(differs(torch.nn.functional.silu, width) for width in (50, 63, 331))


def test_silu_mul_values_and_gradient():
    gate = torch.randn(40, dtype=torch.float64, requires_grad=True)
    up = torch.randn(40, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(_SiluMul.apply(gate, up), expected)
    assert torch.autograd.gradcheck(_SiluMul.apply, (gate, up))
    extreme = torch.tensor([-1e4, -100.0, 100.0], requires_grad=True)
    _SiluMul.apply(extreme, torch.ones(3)).sum().backward()
    assert torch.isfinite(extreme.grad).all()


def test_rms_norm_rows_are_their_own():
    for width in (32, 63, 576):
        norm = RMSNorm(width, 1e-6, torch.float32, "cpu")
        assert not differs(norm, width)


def test_a_position_has_the_same_rotation_in_every_step():
    table = RotaryTable(inverse_frequencies(tiny_config()))
    cos, sin = table(torch.arange(2000), torch.float32)  # one growth
    grown = RotaryTable(inverse_frequencies(tiny_config()))
    for start in (0, 3, 250, 255, 256, 700, 1999):  # many
        few = grown(torch.arange(start, min(start + 5, 2000)), torch.float32)
        assert torch.equal(few[0], cos[start : start + 5])
        assert torch.equal(few[1], sin[start : start + 5])
    assert cos.shape == (2000, 1, 32)
    angle = 7 * 10000.0 ** (-2 / 32)
    assert abs(float(cos[7, 0, 1]) - torch.tensor(angle).cos().item()) < 1e-6
