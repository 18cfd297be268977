"""Every set of operators: right in value and gradient; those that claim it, rows of their own."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.native import BuildFailed, load_library
from rollout.model.fusion import FusedLinear, Linear, pack_adjacent
from rollout.model.native.library import SOURCES
from rollout.model.operators import NAMES, select_operators
from rollout.model.portable import StockOperators, rms_norm, rotate_half
from rollout.model.rotary import RotaryTable, Rotation, inverse_frequencies
from tests.models import tiny_config

CPU = torch.device("cpu")
OPERATORS = {name: select_operators(name, CPU, torch.float32) for name in NAMES}
EXACT = [name for name, operators in OPERATORS.items() if operators.exact]
SHAPES = [(576, 576), (1536, 576), (331, 96), (64, 64), (50, 128), (2000, 64), (7, 1100)]  # out, in
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 100, 129, 256, 257, 300]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def differs(function, rows: torch.Tensor) -> bool:
    """Whether a row of `function` changes with the rows beside it or the number of threads."""
    whole, before = function(rows), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in ROWS:
                for start in (0, 1, 44):
                    if start + count > len(rows):
                        continue
                    part = function(rows[start : start + count].contiguous())
                    if not torch.equal(part, whole[start : start + count]):
                        return True
    finally:
        torch.set_num_threads(before)
    return False


def rotation(tokens: int, dim: int) -> Rotation:
    table = RotaryTable(inverse_frequencies(tiny_config(head_dim=dim)))
    return table.at(torch.arange(tokens) * 3 % 97)


def rotated(ops, qkv: torch.Tensor, norms: bool) -> torch.Tensor:
    """q, k and v side by side, two key/value heads; a token's position is in its first number."""
    dim = qkv.shape[2]
    angles = RotaryTable(inverse_frequencies(tiny_config(head_dim=dim)))
    positions = (qkv[:, 0, 0].abs() * 50).long()
    weights = (randn(dim, seed=1), randn(dim, seed=2)) if norms else (None, None)
    q, k, v = ops.rotate(qkv, angles.at(positions), 2, *weights, 1e-6)
    return torch.cat((q, k, v), dim=1)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_is_its_own(name, shape):
    """L5: for any number of rows, any place among them, 1 and 2 threads."""
    weight, bias = randn(*shape), randn(shape[0])
    assert not differs(lambda x: OPERATORS[name].matmul(x, weight, bias), randn(301, shape[1]))


def test_stock_rows_are_not_their_own():
    """L7: the control: the same comparison fails for `F.linear` and `F.silu`."""
    stock = StockOperators()
    weights = [randn(*shape) for shape in SHAPES]
    assert any(differs(lambda x, w=w: stock.matmul(x, w), randn(301, w.shape[1])) for w in weights)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert any(differs(stock.silu_mul, randn(301, 2 * width)) for width in (50, 63, 331))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_result_in_a_workspace_is_the_same(name):
    operators = OPERATORS[name]
    x, weight = randn(7, 96), randn(50, 96)
    memory = operators.workspace(9, weight)
    for rows in (7, 3):
        got = operators.matmul(x[:rows], weight, out=memory)
        assert torch.equal(got, operators.matmul(x[:rows], weight))
        assert memory is None or got.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("width", [32, 50, 63, 331, 576])
def test_other_rows_are_their_own(name, width):
    """At odd widths, where a vectorised loop has a tail inside the row."""
    ops, rows = OPERATORS[name], randn(301, 2 * width) * 3
    weight = randn(2 * width, seed=1)
    assert not differs(ops.silu_mul, rows)
    assert not differs(lambda x: ops.add_rms_norm(x, None, weight, 1e-6)[1], rows)
    assert not differs(lambda x: torch.cat(ops.add_rms_norm(x, x * 2, weight, 1e-6), 1), rows)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("norms", [False, True])
def test_rotated_rows_are_their_own(name, norms):
    ops = OPERATORS[name]
    assert not differs(lambda x: rotated(ops, x, norms), randn(301, 8, 32))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 70),
    depth=st.integers(1, 1200),
    width=st.integers(1, 130),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products(name, rows, depth, width, biased, seed):
    x, weight = randn(rows, depth, seed=seed), randn(width, depth, seed=seed + 1)
    bias = randn(width, seed=seed + 2) if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    got = OPERATORS[name].matmul(x, weight, bias)
    assert got.shape == (rows, width)
    assert torch.allclose(got.double(), exact, atol=1e-6 * depth)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), size=st.integers(1, 300), seed=st.integers(0, 9))
def test_row_operations(name, rows, size, seed):
    ops = OPERATORS[name]
    x, delta, weight = (randn(rows, size, seed=seed + i) for i in range(3))
    weight = weight[0]
    total, normed = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    exact = rms_norm((x + delta).double(), weight.double(), 1e-5)
    assert torch.allclose(normed.double(), exact.double(), atol=1e-5)
    same, alone = ops.add_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(same, x)
    assert torch.allclose(alone, rms_norm(x, weight, 1e-5), atol=1e-5)
    gate_up = torch.cat((x * 5, delta), dim=1)
    silu = torch.nn.functional.silu((x * 5).double()) * delta
    assert torch.allclose(ops.silu_mul(gate_up).double(), silu, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dim", [32, 48, 128])
def test_rotation(name, norms, dim):
    qkv, angles = randn(11, 7, dim), rotation(11, dim)
    weights = (randn(dim, seed=1), randn(dim, seed=2)) if norms else (None, None)
    q, k, v = OPERATORS[name].rotate(qkv, angles, 2, *weights, 1e-6)
    wide_q, wide_k = qkv[:, :3].double(), qkv[:, 3:5].double()
    if norms:
        wide_q = rms_norm(wide_q, weights[0], 1e-6)
        wide_k = rms_norm(wide_k, weights[1], 1e-6)
    cos, sin = (
        table.index_select(0, angles.positions).unsqueeze(1).double()
        for table in (angles.cos, angles.sin)
    )
    assert torch.allclose(q.double(), rotate_half(wide_q.double(), cos, sin), atol=1e-5)
    assert torch.allclose(k.double(), rotate_half(wide_k.double(), cos, sin), atol=1e-5)
    assert torch.equal(v, qkv[:, 5:])


def test_extreme_gates_stay_finite():
    for name in NAMES:
        gate_up = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]], requires_grad=True)
        out = OPERATORS[name].silu_mul(gate_up)
        assert torch.allclose(out, torch.tensor([[0.0, 0.0, 100.0, 1e4]]), atol=1e-6)
        out.sum().backward()
        assert torch.isfinite(gate_up.grad).all()


def gradients(ops, function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(ops, *leaves)
    weight = randn(*out.shape, seed=9).to(out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def check_gradients(name: str, function, inputs: list[torch.Tensor]) -> None:
    """Against stock autograd in float64, and that against finite differences."""
    ops, oracle = OPERATORS[name], StockOperators()
    wide = [x.double() for x in inputs]
    exact = gradients(oracle, function, wide)
    for got, want in zip(gradients(ops, function, inputs), exact, strict=True):
        assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)
    step = 1e-6
    weight = randn(*function(oracle, *wide).shape, seed=9).double()
    for i, x in enumerate(wide):
        direction = randn(*x.shape, seed=7).double()
        low, high = (
            (function(oracle, *wide[:i], x + s * direction, *wide[i + 1 :]) * weight).sum()
            for s in (-step, step)
        )
        slope = float((high - low) / (2 * step))
        assert abs(slope - float((exact[i] * direction).sum())) <= 1e-5 * max(1.0, abs(slope))


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    check_gradients(name, lambda ops, *a: ops.linear(*a), [randn(9, 33), randn(12, 33), randn(12)])
    x, weight = randn(70, 50), randn(50, seed=1)
    check_gradients(name, lambda ops, x, w: ops.add_rms_norm(x, None, w, 1e-5)[1], [x, weight])

    def both(ops, x, delta, w):
        return torch.cat(ops.add_rms_norm(x, delta, w, 1e-5))

    check_gradients(name, both, [x, randn(70, 50, seed=2), weight])
    check_gradients(name, lambda ops, x: ops.silu_mul(x), [randn(9, 66) * 3])
    angles = rotation(70, 32)

    def plain(ops, qkv):
        return torch.cat(ops.rotate(qkv, angles, 2, None, None, 1e-6), dim=1)

    def normed(ops, qkv, q, k):
        return torch.cat(ops.rotate(qkv, angles, 2, q, k, 1e-6), dim=1)

    qkv = randn(70, 7, 32)
    check_gradients(name, plain, [qkv])
    check_gradients(name, normed, [qkv, randn(32, seed=1), randn(32, seed=2)])


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_get_no_gradient(name):
    ops = OPERATORS[name]
    x, weight = randn(5, 32).requires_grad_(), randn(32, seed=1)
    ops.add_rms_norm(x, x * 2, weight, 1e-6)[1].sum().backward()
    qkv = randn(5, 4, 32).requires_grad_()
    q, _, _ = ops.rotate(qkv, rotation(5, 32), 1, weight, weight.clone(), 1e-6)
    q.sum().backward()
    assert weight.grad is None and x.grad is not None and qkv.grad is not None
    layers = Linear(32, 8, True, torch.float32, "cpu"), Linear(32, 4, True, torch.float32, "cpu")
    module = torch.nn.ModuleList(layers)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(generator=torch.Generator().manual_seed(p.numel()))
    pack_adjacent(module, [("0.weight", "1.weight"), ("0.bias", "1.bias")])
    layers[0].weight.requires_grad_(False)
    FusedLinear(*layers)(ops, x).sum().backward()
    assert layers[0].weight.grad is None and layers[1].weight.grad is not None


BUILDS = {"avx2": ["-mavx2", "-mfma"], "scalar": []}


@pytest.mark.parametrize("build", BUILDS)
def test_every_instruction_set_gives_the_same_bits(build, tmp_path):
    """Kernels compiled for another vector width: the order of every sum is written, not chosen."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("the other builds are for x86")
    try:
        other = load_library("decoder", SOURCES, flags=BUILDS[build], cache=tmp_path)
    except BuildFailed as error:
        pytest.skip(f"this compiler does not make it: {error}")
    native = OPERATORS["native"]
    for rows, (width, depth) in ((1, (331, 96)), (5, (50, 1100)), (70, (64, 64))):
        x, weight, bias = randn(rows, depth), randn(width, depth), randn(width)
        out = torch.empty(rows, width)
        x_at, weight_at, bias_at, out_at = (t.data_ptr() for t in (x, weight, bias, out))
        call(other.linear, x_at, rows, depth, weight_at, width, bias_at, out_at)
        assert torch.equal(out, native.matmul(x, weight, bias))
        gate_up = torch.cat((x, x.flip(0)), dim=1)
        silu = torch.empty_like(x)
        call(other.silu_mul, gate_up.data_ptr(), rows, depth, silu.data_ptr())
        assert torch.equal(silu, native.silu_mul(gate_up))


def call(function, *arguments: int) -> None:
    function(*(ctypes.c_int64(a) for a in arguments))


def test_choosing_operators():
    assert select_operators(None, CPU, torch.float32).name == "native"
    assert select_operators(None, CPU, torch.bfloat16).name == "portable"
    assert not select_operators("portable", CPU, torch.bfloat16).exact
    own = StockOperators()
    assert select_operators(own, CPU, torch.float32) is own
    with pytest.raises(ValueError, match="'fast'; available: native, portable, stock"):
        select_operators("fast", CPU, torch.float32)
