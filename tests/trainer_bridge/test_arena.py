"""The flat arena: layout, binding, sharing between real processes, and what is refused."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from rollout.policy import ParameterLeftArena, ReadOnlyWeights, WeightsError
from tests.trainer_bridge.gate_worker import context
from trainer_bridge.arena import ArenaHandle, ArenaLayout, TensorEntry, WeightArena


class Attention(nn.Module):
    """q, k, v must lie back to back; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.q = nn.Linear(6, 6, bias=False)
        self.o = nn.Linear(6, 6, bias=False)
        self.k = nn.Linear(6, 3, bias=False)
        self.v = nn.Linear(6, 3, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def adjacent_parameters(self) -> list[tuple[str, ...]]:
        return [("q.weight", "k.weight", "v.weight")]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        mixed = self.q(x) + torch.cat([self.k(x), self.v(x)], dim=-1)
        logits: torch.Tensor = self.head(self.o(mixed).tanh())
        return logits


@pytest.fixture
def model() -> Attention:
    torch.manual_seed(0)
    return Attention()


@pytest.fixture
def arena(model: Attention) -> Iterator[WeightArena]:
    arena = WeightArena.create(ArenaLayout.for_module(model))
    arena.copy_from(model)
    arena.bind(model, requires_grad=True)
    yield arena
    arena.close()


def serve_arena(pipe: Connection, handle: ArenaHandle | None) -> None:
    """Attaches (or creates) an arena and gives out its handle and checksum on every message."""
    arena = (
        WeightArena.attach(handle)
        if handle is not None
        else WeightArena.create(ArenaLayout.for_module(Attention()))
    )
    while True:
        pipe.send((arena.handle(), arena.checksum()))
        pipe.recv()


# Layout


def test_groups_are_packed_and_everything_else_is_aligned(model: Attention) -> None:
    layout = ArenaLayout.for_module(model)
    names = [entry.name for entry in layout.entries]
    at = {entry.name: entry for entry in layout.entries}
    assert names.index("k.weight") == names.index("q.weight") + 1
    assert at["k.weight"].offset == at["q.weight"].end
    assert at["v.weight"].offset == at["k.weight"].end
    loose = set(names) - {"k.weight", "v.weight"}
    assert all(at[name].offset % 64 == 0 for name in loose)
    assert at["k.weight"].offset % 64, "control: inside the group nothing is aligned"
    assert layout.total_bytes % 64 == 0
    assert layout.aliases == {"head.weight": "embed.weight"}


def test_layout_needs_no_memory_and_is_the_same_everywhere(model: Attention) -> None:
    layout = ArenaLayout.for_module(model)
    with torch.device("meta"):
        assert ArenaLayout.for_module(Attention()) == layout
    assert pickle.loads(pickle.dumps(layout)).digest() == layout.digest()
    assert ArenaLayout.for_module(model.double()).digest() != layout.digest()


def test_layout_errors_name_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"'w' is empty: shape \(0, 2\)"):
        TensorEntry("w", torch.float32, (0, 2), 0)
    with pytest.raises(ValueError, match="'w': offset 2"):
        TensorEntry("w", torch.float32, (2,), 2)
    first = TensorEntry("a", torch.float32, (4,), 0)
    with pytest.raises(ValueError, match="'a' and 'b'"):
        ArenaLayout((first, TensorEntry("b", torch.float32, (4,), 8)))
    with pytest.raises(ValueError, match="twice"):
        ArenaLayout((first, replace(first, offset=64)))
    with pytest.raises(ValueError, match="'c' -> 'd'"):
        ArenaLayout((first,), {"c": "d"})
    with pytest.raises(ValueError, match="no parameters"):
        ArenaLayout.for_module(nn.ReLU())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("q.weight", "w.weight")], "'w.weight', which is unknown"),
        ([("q.weight", "head.weight")], "'head.weight', which is unknown or tied"),
        ([("q.weight", "k.weight"), ("k.weight", "v.weight")], "'k.weight' twice"),
    ],
)
def test_wrong_groups_are_refused(
    model: Attention, groups: list[tuple[str, ...]], message: str
) -> None:
    model.adjacent_parameters = lambda: groups  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        ArenaLayout.for_module(model)


# Binding


def test_bind_keeps_values_objects_and_ties(model: Attention) -> None:
    """W8"""
    ids = torch.arange(5)
    before, parameters = model(ids), list(model.parameters())
    arena = WeightArena.create(ArenaLayout.for_module(model), backing="private")
    arena.copy_from(model)
    arena.bind(model, requires_grad=True)
    assert torch.equal(model(ids), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.head.weight is model.embed.weight
    arena.check_bound(model)
    with torch.no_grad():
        arena.tensor("head.weight").zero_()
    assert not model.embed.weight.any()
    assert not torch.equal(model(ids), before), "control: the module reads the arena"


def test_every_parameter_has_a_storage_of_its_own(model: Attention, arena: WeightArena) -> None:
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert parameter.storage_offset() == 0
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_module_on_the_meta_device_gets_the_weights(model: Attention, arena: WeightArena) -> None:
    reader = WeightArena.attach(arena.handle())
    with torch.device("meta"):
        other = Attention()
    reader.bind(other, requires_grad=False)
    reader.check_bound(other)
    assert other.head.weight is other.embed.weight
    assert not any(parameter.requires_grad for parameter in other.parameters())
    assert torch.equal(other(torch.arange(5)), model(torch.arange(5)))


def test_bind_refuses_what_does_not_fit(arena: WeightArena) -> None:
    with pytest.raises(ValueError, match="only one of them has"):
        arena.bind(nn.Linear(2, 2), requires_grad=True)
    untied = Attention()
    untied.head.weight = nn.Parameter(untied.head.weight.clone())
    with pytest.raises(ValueError, match="tie different parameters"):
        arena.bind(untied, requires_grad=True)
    wide = Attention()
    wide.k = nn.Linear(6, 4, bias=False)
    with pytest.raises(ValueError, match=r"'k.weight' has shape \(4, 6\).*\(3, 6\)"):
        arena.bind(wide, requires_grad=True)
    with pytest.raises(ValueError, match="read-only"):
        WeightArena.attach(arena.handle()).bind(Attention(), requires_grad=True)


@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
def test_training_in_the_arena_equals_training_outside(
    model: Attention, arena: WeightArena, form: str
) -> None:
    """Bitwise, and the parameters never leave. Control: one step changes the bits."""
    outside = copy.deepcopy(model)
    start = arena.checksum()
    foreach, fused = form == "foreach", form == "fused"
    for step in range(3):
        for module in (model, outside):
            optimizer = torch.optim.AdamW(
                module.parameters(), lr=1e-2, foreach=foreach, fused=fused
            )
            module(torch.arange(step, step + 7)).logsumexp(-1).sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        arena.check_bound(model)
    for ours, theirs in zip(model.parameters(), outside.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert arena.checksum() != start
    model.load_state_dict(Attention().state_dict())
    arena.check_bound(model)


def _rebind(model: Attention) -> nn.Module:
    model.k.weight.data = model.k.weight.data.clone()
    return model


def _assign(model: Attention) -> nn.Module:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def _from_vector(model: Attention) -> nn.Module:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return model


def _resize(model: Attention) -> nn.Module:
    model.embed = nn.Embedding(12, 6)
    return model


def _untie(model: Attention) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _add(model: Attention) -> nn.Module:
    model.adapter = nn.Linear(2, 2)
    return model


def _remove(model: Attention) -> nn.Module:
    del model.norm
    return model


@pytest.mark.parametrize(
    ("leave", "name", "likely"),
    [
        (_rebind, "k.weight", "parameter.data = ..."),
        (_assign, "embed.weight", "assign=True"),
        (copy.deepcopy, "embed.weight", "deepcopy"),
        (_from_vector, "embed.weight", "vector_to_parameters"),
        (_resize, "embed.weight", "resize_token_embeddings"),
        (lambda model: model.to(torch.bfloat16), "embed.weight", "model.to(torch.bfloat16)"),
        (lambda model: model.to("cpu:0"), "embed.weight", 'model.to("cpu:0")'),
        (_untie, "head.weight", "parameter.data = ..."),
        (_add, "adapter.weight", "was added"),
        (_remove, "norm.bias", "was removed"),
    ],
)
def test_a_parameter_that_left_is_named_with_the_likely_call(
    model: Attention,
    arena: WeightArena,
    leave: Callable[[Attention], nn.Module],
    name: str,
    likely: str,
) -> None:
    """W7. Control: before the call there is nothing to find."""
    arena.check_bound(model)
    with pytest.raises(ParameterLeftArena) as caught:
        arena.check_bound(leave(model))
    assert repr(name) in str(caught.value)
    assert likely in str(caught.value)


def test_undo_puts_every_bit_back(arena: WeightArena) -> None:
    before = arena.checksum()
    undo = arena.take_undo()
    for entry in arena.layout.entries:
        arena.tensor(entry.name).fill_(float("nan"))
    assert arena.checksum() != before
    undo()
    assert arena.checksum() == before
    reader = WeightArena.attach(arena.handle())
    for attempt in (reader.take_undo, lambda: reader.copy_from(Attention())):
        with pytest.raises(ReadOnlyWeights):
            attempt()


# Sharing


def test_another_process_sees_the_same_bits(arena: WeightArena) -> None:
    """Through an exec'd process too, and after an in-place change."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_arena, args=(theirs, arena.handle()), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        first = ours.recv()[1]
        assert first == arena.checksum()
        with torch.no_grad():
            arena.tensor("norm.bias").add_(1.0)
        ours.send("again")
        assert ours.poll(60)
        second = ours.recv()[1]
        assert second == arena.checksum() != first
    finally:
        process.kill()
        process.join()


def test_arena_outlives_its_creator_and_leaves_nothing_behind() -> None:
    """F4: a new trainer comes back through any live process; with the last one all is gone."""
    names_before = set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))
    creator_pipe, theirs = context.Pipe()
    creator = context.Process(target=serve_arena, args=(theirs, None), daemon=True)
    creator.start()
    handle, checksum = creator_pipe.recv()
    engine_pipe, theirs = context.Pipe()
    engine = context.Process(target=serve_arena, args=(theirs, handle), daemon=True)
    engine.start()
    engine_handle, _ = engine_pipe.recv()
    os.kill(creator.pid or 0, signal.SIGKILL)
    creator.join()
    with pytest.raises(WeightsError, match="ask another attached process"):
        WeightArena.attach(handle, writable=True)

    back = WeightArena.attach(engine_handle, writable=True)
    assert back.checksum() == checksum
    back.tensor("norm.bias").fill_(3.0)
    engine_pipe.send("again")
    assert engine_pipe.recv()[1] == back.checksum() != checksum
    os.kill(engine.pid or 0, signal.SIGKILL)
    engine.join()
    back.close()
    left = (set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))) - names_before
    assert not {name for name in left if "lockstep" in name}


def test_a_handle_that_means_something_else_is_refused(arena: WeightArena) -> None:
    handle = pickle.loads(pickle.dumps(arena.handle()))
    WeightArena.attach(handle).close()
    wrong = {
        "another host": replace(handle.memory, host="elsewhere"),
        "another PID namespace": replace(handle.memory, pid_namespace=1),
        "cannot open": replace(handle.memory, fd=10_000),
        "no longer the shared memory": replace(handle.memory, inode=handle.memory.inode + 1),
        "is no longer": replace(handle.memory, size=handle.memory.size + 64),
        "the handle names": replace(handle.memory, nonce=bytes(16)),
    }
    for message, memory in wrong.items():
        with pytest.raises(WeightsError, match=message):
            WeightArena.attach(replace(handle, memory=memory))
    with torch.device("meta"):
        layout = ArenaLayout.for_module(Attention().double())
    with pytest.raises(WeightsError, match="another layout"):
        WeightArena.attach(replace(handle, layout=layout))


def test_a_folder_serves_where_proc_does_not(model: Attention, tmp_path: Path) -> None:
    arena = WeightArena.create(ArenaLayout.for_module(model), backing=tmp_path)
    arena.copy_from(model)
    handle = arena.handle()
    elsewhere = replace(handle, memory=replace(handle.memory, pid_namespace=1, pid=1))
    reader = WeightArena.attach(elsewhere)
    assert reader.checksum() == arena.checksum()
    assert len(list(tmp_path.iterdir())) == 1
    reader.close()
    arena.close(unlink=True)
    assert not list(tmp_path.iterdir())


def test_private_memory_cannot_be_shared(model: Attention) -> None:
    arena = WeightArena.create(ArenaLayout.for_module(model), backing="private")
    with pytest.raises(WeightsError, match="backing='memfd'"):
        arena.handle()


def test_a_folder_that_cannot_hold_it_is_one_sentence(model: Attention, tmp_path: Path) -> None:
    """F6: found at creation, the file is gone again."""
    layout = ArenaLayout.for_module(model)
    with pytest.raises(WeightsError, match=r"nowhere.*No such file"):
        WeightArena.create(layout, backing=tmp_path / "nowhere")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(WeightsError, match=r"cannot allocate .* File too large"):
            WeightArena.create(layout, backing=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_descriptors_go_with_the_arena(model: Attention) -> None:
    """W10: closed or merely dropped. A bound parameter stays readable."""
    layout = ArenaLayout.for_module(model)

    def use_one(close: bool) -> None:
        arena = WeightArena.create(layout)
        other = WeightArena.attach(arena.handle())
        other.tensor("q.weight")
        if close:
            arena.close()
            other.close()

    use_one(True)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for close in (True, False) * 10:
        use_one(close)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before

    arena = WeightArena.create(layout)
    arena.copy_from(model)
    kept = model.q.weight.detach().clone()
    arena.bind(model, requires_grad=True)
    arena.close()
    assert torch.equal(model.q.weight, kept)
    with pytest.raises(WeightsError, match="closed"):
        arena.handle()
