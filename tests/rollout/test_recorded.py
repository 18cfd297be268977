"""Recorded steps: the bits of the module itself, and the module itself where that would fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from attention.native import NativeAttention
from attention.native.recording import Recording
from rollout import Decoder, RolloutEngine
from rollout.model.portable import PortableOperators
from tests.models import FAMILIES, tiny_model
from tests.rollout.test_engine import bits, nudge, random_prompts, rollouts

pytestmark = pytest.mark.skipif(
    not NativeAttention.serves(torch.device("cpu"), torch.float32, 32),
    reason="nothing is recorded without a C++ compiler",
)
WORKLOAD = {"n": 3, "max_tokens": 20, "seed": 3}


@pytest.fixture
def replays(monkeypatch) -> Iterator[list[int]]:
    """Rows of every replay."""
    rows: list[int] = []
    replay = Recording.replay

    def counted(self: Recording, count: int) -> None:
        rows.append(count)
        replay(self, count)

    monkeypatch.setattr(Recording, "replay", counted)
    return rows


def both(model: Decoder, prompts: list[list[int]], **settings: object) -> list[object]:
    """Results with recorded steps, checked against those without."""
    found = bits(rollouts(RolloutEngine(model, **settings), prompts, **WORKLOAD))
    eager = RolloutEngine(model, **settings, enforce_eager=True)
    assert found == bits(rollouts(eager, prompts, **WORKLOAD))
    return found


@pytest.mark.parametrize("settings", [
    {},
    {"max_batch_size": 3, "block_size": 1},
    {"max_num_batched_tokens": 80, "long_prefill_token_threshold": 7},
    {"num_kv_blocks": 12, "max_batch_size": 8},
])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits(family, settings, replays):
    """Chunks, decodes, mixed steps, forks, preemptions; every number of rows on one recording."""
    both(tiny_model(family), random_prompts(8), **settings)
    assert len(set(replays)) >= 3


def test_eager_records_nothing(replays):
    engine = RolloutEngine(tiny_model(), enforce_eager=True)
    rollouts(engine, random_prompts(3), **WORKLOAD)
    assert replays == []


def test_a_step_of_many_tokens_is_the_modules(replays):
    prompts = random_prompts(12, longest=70)
    both(tiny_model(), prompts, max_num_batched_tokens=2048)
    assert sum(map(len, prompts)) > 256 >= max(replays)


def test_an_update_in_place_is_seen(replays):
    model = tiny_model()
    engine, prompts = RolloutEngine(model), random_prompts(3)
    before = bits(rollouts(engine, prompts, **WORKLOAD))
    engine.apply_weight_update(None, lambda: nudge(model))
    count = len(replays)
    after = bits(rollouts(engine, prompts, **WORKLOAD))
    assert after == both(model, prompts) != before and len(replays) > count


def test_pages_at_other_addresses_are_found(replays):
    """And their memory is not held by a recording: see test_release.py."""
    model = tiny_model()
    engine, prompts = RolloutEngine(model), random_prompts(3)
    before = bits(rollouts(engine, prompts, **WORKLOAD))
    engine.release()
    kept = torch.zeros(engine._core._storage.num_bytes // 4)  # the old addresses are taken
    engine.restore()
    assert bits(rollouts(engine, prompts, **WORKLOAD)) == before
    del kept


def test_longer_angles_are_found(replays):
    """The rotary table grows with the longest position and then lies elsewhere."""
    model = tiny_model(max_position_embeddings=1024)
    engine = RolloutEngine(model)
    rollouts(engine, [[5, 6]], max_tokens=4)
    table = model._rotary._tables
    found = bits(rollouts(engine, [[5] * 255], max_tokens=200, seed=1))
    assert model._rotary._tables is not table
    eager = RolloutEngine(model, enforce_eager=True)
    assert found == bits(rollouts(eager, [[5] * 255], max_tokens=200, seed=1))


def exchanged_parameter(model: Decoder) -> None:
    down = model.model.layers[1].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach() * 0.5)


def moved_data(model: Decoder) -> None:
    norm = model.model.norm
    norm.weight.data = norm.weight.detach() * 0.5


def exchanged_module(model: Decoder) -> None:
    model.model.layers[1] = tiny_model(seed=5).model.layers[1]


def own_forward(model: Decoder) -> None:
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda ops, x: forward(ops, x) * 0.5


def hook(model: Decoder) -> None:
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out * 0.5)


def operators(model: Decoder) -> None:
    model.operators = PortableOperators(exact=True)


@pytest.mark.parametrize(
    "change", [exchanged_parameter, moved_data, exchanged_module, own_forward, hook, operators]
)
def test_a_module_that_has_changed_is_not_replayed_as_it_was(change, replays):
    """Without the check, the recording would compute what the module was."""
    model = tiny_model()
    engine, prompts = RolloutEngine(model), random_prompts(3)
    before = bits(rollouts(engine, prompts, **WORKLOAD))
    assert replays
    change(model)
    engine._kv.reset()  # a prefix of the module as it was
    after = bits(rollouts(engine, prompts, **WORKLOAD))
    assert after != before
    eager = RolloutEngine(model, enforce_eager=True, exact=False)
    assert after == bits(rollouts(eager, prompts, **WORKLOAD))


@pytest.mark.parametrize("part", ["model", "mlp"])
def test_a_forward_that_was_replaced_in_its_class_is_called(part, monkeypatch, replays):
    model = tiny_model()
    kind = type(model) if part == "model" else type(model.model.layers[0].mlp)
    engine, forward, calls = RolloutEngine(model), kind.forward, []
    rollouts(engine, [[5, 6]], max_tokens=4, ignore_eos=True)
    count = len(replays)

    def counted(self, *arguments):
        calls.append(1)
        return forward(self, *arguments)

    monkeypatch.setattr(kind, "forward", counted)
    rollouts(engine, [[7, 8]], max_tokens=4, ignore_eos=True)
    assert calls and len(replays) == count


def test_a_hook_is_called_in_every_step_it_is_there(replays):
    model = tiny_model()
    engine = RolloutEngine(model)
    rollouts(engine, [[5, 6]], max_tokens=4, ignore_eos=True)
    count, calls = len(replays), []
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    layer = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    rollouts(engine, [[7, 8]], max_tokens=4, ignore_eos=True)
    assert len(calls) == 4 and len(replays) == count
    handle.remove()
    layer.remove()
    rollouts(engine, [[9, 8]], max_tokens=4, ignore_eos=True)
    assert len(replays) > count


def test_a_hook_of_an_exchanged_module_sees_no_recording(replays):
    """It is called once a step, on what was computed; not while the new module is written down."""
    model, seen = tiny_model(), []
    engine = RolloutEngine(model)
    rollouts(engine, [[5, 6]], max_tokens=4, ignore_eos=True)
    count = len(replays)
    layer = tiny_model(seed=5).model.layers[1]
    layer.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    model.model.layers[1] = layer
    rollouts(engine, [[7, 8]], max_tokens=4, ignore_eos=True)
    assert seen == [2, 1, 1, 1] and len(replays) == count


class Doubling(torch.nn.Module):
    """A layer that computes something beside the kernels."""

    def __init__(self, layer: torch.nn.Module, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = layer, in_place

    def forward(self, *arguments):
        x, delta = self.layer(*arguments)
        return (x, delta.mul_(2.0)) if self.in_place else (x, delta * 2.0)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_that_cannot_be_recorded_is_run(in_place, caplog, replays):
    """Said once; a new result is found out when it is written down, one in place when replayed."""
    model = tiny_model()
    model.model.layers[1] = Doubling(model.model.layers[1], in_place)
    engine, prompts = RolloutEngine(model), random_prompts(3)
    with caplog.at_level(logging.WARNING, "rollout.recorded"):
        found = bits(rollouts(engine, prompts, **WORKLOAD))
    assert len(caplog.records) == 1 and len(replays) == int(in_place)
    eager = RolloutEngine(model, enforce_eager=True)
    assert found == bits(rollouts(eager, prompts, **WORKLOAD))
