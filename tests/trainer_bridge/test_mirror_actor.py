"""The mirror of the weights, as an object: what it takes in, and what its readers see."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from rollout.policy import WeightsError
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.mirror_actor import MirrorActor
from trainer_bridge.publication import SharedGate


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))


@pytest.fixture
def weights():
    """Those of the trainer."""
    torch.manual_seed(0)
    model = net()
    arena = WeightArena.create(ArenaLayout.for_module(model))
    arena.copy_from(model)
    yield arena
    arena.close()


@pytest.fixture
def mirror(weights):
    mirror = MirrorActor(weights.layout)
    yield mirror
    mirror._gate.close()
    mirror._arena.close()


def reader_of(mirror: MirrorActor) -> tuple[SharedGate, torch.nn.Module]:
    """As a rollout actor of the mirror's node attaches: read-only."""
    arena_handle, gate_handle = mirror.attachment()
    arena = WeightArena.attach(arena_handle)
    model = net()
    arena.bind(model, requires_grad=False)
    return SharedGate.attach(arena, gate_handle, model), model


def pieces(arena: WeightArena, size: int = 64) -> list[np.ndarray]:
    return [piece.copy() for piece in arena.pieces(size)]


@pytest.mark.parametrize("size", [1, 64, 100, 1 << 20])
def test_pieces_of_any_size_make_up_the_weights(weights, mirror, size):
    cut = pieces(weights, size)
    assert max(map(len, cut)) <= size
    assert mirror.publish(4, *cut) == 4
    echo = mirror.weights_echo(checksum=True)
    assert echo.checksum == weights.checksum()
    assert echo.version == 4


def test_a_reader_sees_each_version_with_its_bytes(weights, mirror):
    mirror.publish(1, *pieces(weights))
    reader, model = reader_of(mirror)
    for version in (2, 7):
        weights.tensor("0.weight").mul_(1.5)
        assert mirror.publish(version, *pieces(weights)) == version
        with reader.read() as seen:
            assert seen == version
            assert torch.equal(model[0].weight, weights.tensor("0.weight"))
    reader.close()


def test_an_older_version_changes_nothing(weights, mirror):
    """A repetition of what was sent, overtaken by what came later."""
    old = pieces(weights)
    weights.tensor("1.weight").add_(1)
    mirror.publish(5, *pieces(weights))
    for version in (4, 5):
        assert mirror.publish(version, *old) == 5
    assert mirror.weights_echo(checksum=True).checksum == weights.checksum()


@pytest.mark.parametrize("change", [lambda cut: cut[:-1], lambda cut: [*cut, cut[0]]])
def test_the_wrong_number_of_bytes_is_refused_whole(weights, mirror, change):
    mirror.publish(1, *pieces(weights))
    before = mirror.weights_echo(checksum=True)
    weights.tensor("0.weight").zero_()
    with pytest.raises(ValueError, match=r"pieces hold \d+ bytes, the arena has \d+"):
        mirror.publish(2, *change(pieces(weights)))
    assert mirror._arena.checksum() == before.checksum


def test_nothing_is_read_before_the_first_version(weights, mirror):
    reader, _ = reader_of(mirror)
    with pytest.raises(WeightsError, match="no weights were published yet"), reader.read():
        pass
    assert mirror.heartbeat().startswith("waiting for the first weights")


def test_it_waits_for_its_readers(weights, mirror):
    mirror.publish(1, *pieces(weights))
    reader, _ = reader_of(mirror)
    with reader.read():
        writing = threading.Thread(target=mirror.publish, args=(2, *pieces(weights)))
        writing.start()
        time.sleep(0.05)
        assert writing.is_alive()
        assert mirror.heartbeat().startswith("publishing policy version 2")
    writing.join()
    assert mirror.get_stats()["policy_version"] == 2
    reader.close()
