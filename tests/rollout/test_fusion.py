"""Projections fused by adjacency in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollout.model.fusion import FusedLinear, Linear, adjacent_view, pack_adjacent
from rollout.model.portable import PortableOperators

OPERATORS = PortableOperators(exact=True)


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
    expected = torch.cat(
        [OPERATORS.linear(x, layer.weight, layer.bias) for layer in (module.q, module.k)], dim=1
    )
    assert adjacent_view([module.q.weight, module.k.weight]) is None
    assert torch.equal(module.fused(OPERATORS, x), expected)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]

    pack_adjacent(module, module.groups())
    view = adjacent_view([module.q.weight, module.k.weight])
    assert view is not None and view.shape == (80, 32)
    assert torch.equal(module.fused(OPERATORS, x), expected)
    module.fused(OPERATORS, x).square().sum().backward()
    for p, gradient in zip(module.parameters(), gradients, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-5, atol=1e-4)


def test_in_place_changes_are_seen_and_rebinding_stays_right():
    module, x = Projections(False), torch.randn(4, 32)
    pack_adjacent(module, module.groups())
    before = module.fused(OPERATORS, x)
    with torch.no_grad():
        module.k.weight.mul_(2)
    assert torch.equal(module.fused(OPERATORS, x)[:, 64:], before[:, 64:] * 2)
    module.k.weight.data = torch.zeros_like(module.k.weight)  # no longer adjacent
    assert torch.equal(module.fused(OPERATORS, x)[:, :64], before[:, :64])
    assert not module.fused(OPERATORS, x)[:, 64:].any()


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
    module.fused(OPERATORS, x).sum().backward()
    assert module.q.weight.grad is None and module.k.weight.grad is not None
    assert x.grad is not None
