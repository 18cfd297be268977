"""Linear layers: rows that do not depend on their number, weights fused where they lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollout.model.fusion import FusedLinear, Linear, adjacent_view, matmul_rows, pack_adjacent

SHAPES = [(576, 576), (1536, 576), (331, 96), (64, 64), (50, 128), (2000, 64)]  # out, in
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 256]


def rows_that_differ(function, out_features: int, in_features: int) -> set[int]:
    """Numbers of rows at which some row differs from the same row among 300."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator)
    x = torch.randn(300, in_features, generator=generator)
    whole, found = function(x, weight, bias), set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROWS:
                for start in (0, 3, 44):
                    part = function(x[start : start + rows].contiguous(), weight, bias)
                    if not torch.equal(part, whole[start : start + rows]):
                        found.add(rows)
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_its_own(shape):
    assert rows_that_differ(matmul_rows, *shape) == set()


def test_stock_linear_is_not_so():
    """The control: the same comparison fails for `F.linear`."""
    assert any(rows_that_differ(nn.functional.linear, *shape) for shape in SHAPES)


def test_values_and_empty_input():
    x, weight, bias = torch.randn(7, 33), torch.randn(12, 33), torch.randn(12)
    assert torch.allclose(matmul_rows(x, weight, bias), x @ weight.t() + bias, atol=1e-5)
    assert matmul_rows(x[:0], weight).shape == (0, 12)


class Projections(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k = Linear(32, 64, bias, torch.float32, "cpu"), None
        self.k = Linear(32, 16, bias, torch.float32, "cpu")
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(generator=torch.Generator().manual_seed(p.numel()))
        self.fused = FusedLinear(self.q, self.k)

    def groups(self) -> list[tuple[str, str]]:
        names = ["weight", "bias"] if self.q.bias is not None else ["weight"]
        return [(f"q.{name}", f"k.{name}") for name in names]


@pytest.mark.parametrize("bias", [False, True])
def test_fused_is_the_layers_side_by_side(bias):
    """Bitwise, before packing (separate matmuls) and after (one view), and the gradients agree."""
    module, x = Projections(bias), torch.randn(9, 32)
    expected = torch.cat([module.q(x), module.k(x)], dim=1)
    assert adjacent_view([module.q.weight, module.k.weight]) is None
    assert torch.equal(module.fused(x), expected)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]

    pack_adjacent(module, module.groups())
    view = adjacent_view([module.q.weight, module.k.weight])
    assert view is not None and view.shape == (80, 32)
    assert torch.equal(module.fused(x), expected)
    module.fused(x).square().sum().backward()
    for p, gradient in zip(module.parameters(), gradients, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-5, atol=1e-4)


def test_in_place_changes_are_seen_and_rebinding_stays_right():
    module, x = Projections(False), torch.randn(4, 32)
    pack_adjacent(module, module.groups())
    before = module.fused(x)
    with torch.no_grad():
        module.k.weight.mul_(2)
    assert torch.equal(module.fused(x)[:, 64:], before[:, 64:] * 2)
    module.k.weight.data = torch.zeros_like(module.k.weight)  # no longer adjacent
    assert torch.equal(module.fused(x)[:, :64], before[:, :64])
    assert not module.fused(x)[:, 64:].any()


def test_every_parameter_keeps_a_storage_of_its_own():
    """Savers that find ties by storage would drop parameters that share one."""
    module = Projections(True)
    pack_adjacent(module, module.groups())
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == 4
    for p in module.parameters():
        assert p.untyped_storage().nbytes() == p.numel() * 4


def test_frozen_parameters_get_no_gradient():
    module, x = Projections(True), torch.randn(4, 32, requires_grad=True)
    pack_adjacent(module, module.groups())
    module.q.weight.requires_grad_(False)
    module.fused(x).sum().backward()
    assert module.q.weight.grad is None and module.k.weight.grad is not None
    assert x.grad is not None
