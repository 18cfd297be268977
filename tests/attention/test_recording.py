"""Kernel calls that are written down and made again."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention.native.recording import Kernels, NotRecordable, Recorder, Recording
from rollout.model.native import NativeOperators

ROWS, SIZE = 40, 48


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def weights() -> list[Tensor]:
    return [torch.randn(2 * SIZE, SIZE), torch.randn(SIZE), torch.randn(SIZE, SIZE)]


def forward(ops: NativeOperators, x: Tensor, parameters: list[Tensor]) -> Tensor:
    """Two layers' worth of products, norms and gates; deltas live on over other results."""
    gate_up, norm, down = parameters
    delta = None
    for _ in range(2):
        x, normed = ops.add_rms_norm(x, delta, norm, 1e-6)
        delta = ops.matmul(ops.silu_mul(ops.matmul(normed, gate_up)), down)
    return ops.add_rms_norm(x, delta, norm, 1e-6)[1]


def recorded(
    parameters: list[Tensor],
    run: Callable[[NativeOperators, Tensor, list[Tensor]], Tensor] = forward,
) -> tuple[Recording, Tensor, Tensor]:
    """The recording, where it reads and where its result is."""
    x = torch.zeros(ROWS, SIZE)
    recorder = Recorder([x, *parameters])
    out = run(NativeOperators(recorder), x, parameters)
    gc.collect()
    return recorder.recording(), x, out


@pytest.mark.parametrize("rows", [1, 2, 17, ROWS])
def test_a_replay_is_the_forward(rows):
    parameters = weights()
    recording, x, out = recorded(parameters)
    out.fill_(torch.nan)
    for _ in range(2):
        x[:rows] = torch.randn(rows, SIZE)
        expected = forward(NativeOperators(), x[:rows].clone(), parameters)
        recording.replay(rows)
        assert torch.equal(out[:rows], expected)
        assert out[rows:].isnan().all(), "rows were written that nobody asked for"
        parameters[0].mul_(1.5)  # in place: the next replay sees it


def test_writing_down_computes_nothing():
    """Results stay as they were; only `replay` calls kernels."""
    parameters = weights()
    x = torch.zeros(ROWS, SIZE)
    recorder = Recorder([x, *parameters])
    out = recorder.empty(x, ROWS, SIZE)
    out.fill_(7.0)
    NativeOperators(recorder).matmul(x, parameters[2], out=out)
    assert (out == 7.0).all() and len(recorder.recording()) == 1
    recorder.recording().replay(ROWS)
    assert (out == 0.0).all()


def test_memory_is_used_again_but_never_while_it_is_needed():
    recorder = Recorder([])
    like = torch.zeros(1)
    first, second = recorder.empty(like, 4, 16), recorder.empty(like, 4, 16)
    view, address = first.view(8, 8)[4:], first.data_ptr()
    assert address % 64 == 0 and second.data_ptr() != address
    del first
    gc.collect()
    assert recorder.empty(like, 64).data_ptr() != address, "a view still lies there"
    del view
    gc.collect()
    assert recorder.empty(like, 16, 4).data_ptr() == address


@pytest.mark.parametrize("between", [
    lambda x: x + 1.0,
    lambda x: x.clone(),
    lambda x: x.t().contiguous().t().contiguous(),
])
def test_what_is_computed_in_between_is_found_out(between):
    def run(ops: NativeOperators, x: Tensor, parameters: list[Tensor]) -> Tensor:
        return ops.matmul(between(ops.matmul(x, parameters[2])), parameters[2])

    with pytest.raises(NotRecordable, match=r"argument 0 of linear"):
        recorded(weights(), run)


def test_a_kernel_that_cannot_be_recorded_is_refused():
    def run(ops: NativeOperators, x: Tensor, parameters: list[Tensor]) -> Tensor:
        from rollout.model.native.library import library

        ops.kernels.launch(library().silu_mul_backward, 0, 0, 0, 0, 0)
        return x

    with pytest.raises(NotRecordable, match="silu_mul_backward"):
        recorded(weights(), run)


def test_at_once_is_what_everybody_else_gets():
    called = []
    Kernels().launch(lambda *arguments: called.append(arguments), 1, 2)
    assert called == [(1, 2)]
