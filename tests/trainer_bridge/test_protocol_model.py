"""Every interleaving of the publication protocol, with a death anywhere.

What holds in all of them:

1. A reader reads the weights of one update, and those that were published as the version it got.
2. The version that a reader gets never goes back.
3. Weights and words change only while nobody reads and nobody else writes.
4. A number stands for one update for ever: what failed or was killed burns its number.
5. A trainer that was superseded changes nothing.
6. Nobody is stuck: whoever has not died gets to its end, and with a recovery after the last
   failure the weights are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
from torch import nn

from tests.trainer_bridge.protocol_model import (
    NOBODY,
    POISONED,
    STABLE,
    Process,
    Rules,
    Violation,
    World,
    explore,
    successors,
)
from trainer_bridge import control_page
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.publication import GateSettings, SharedGate


def reader(turns: int = 1) -> Process:
    return Process("reader", "lock", turns=turns)


def writer(content: int, turns: int = 1, undo: bool = True) -> Process:
    return Process("writer", "look", content=content, turns=turns, undo=undo)


def recoverer(content: int = 900) -> Process:
    return Process("recoverer", "lock", content=content)


CASTS = {
    "two readers, two writers": (reader(), reader(), writer(100), writer(200, undo=False)),
    "readers that come again": (reader(2), reader(2), writer(100, turns=2)),
    "a recovery": (reader(2), writer(100), writer(200, undo=False), recoverer()),
    "two recoveries": (reader(), writer(100, undo=False), recoverer(), recoverer(950)),
}


@pytest.mark.parametrize("cast", CASTS)
def test_every_interleaving_keeps_the_promises(cast):
    """1 to 5 in every world with one death; 6 in every world that is an end."""
    worlds, ends = explore(World(CASTS[cast], crashes=1))
    assert worlds > 1000 and ends
    for world in ends:
        assert all(process.at == "end" for process in world.processes)
        assert world.exclusive == NOBODY and not world.shared


def test_a_recovery_after_the_last_failure_leaves_whole_weights():
    """Two deaths and no recovery leave torn weights that nobody serves; a third trainer helps."""
    _, ends = explore(World((writer(100, undo=False), writer(200)), crashes=2))
    assert any(world.torn for world in ends), "no death was ever in the middle of an update"
    for end in ends:
        _, after = explore(end._replace(processes=(recoverer(), reader()), crashes=0))
        for world in after:
            assert world.state == STABLE and world.seq % 2 == 0
            assert world.halves[0] == world.halves[1]
            assert (world.version, world.halves[0]) in world.published


@pytest.mark.parametrize(("rule", "cast"), [
    ("reader_locks", "two readers, two writers"),
    ("reader_checks", "two readers, two writers"),
    ("writer_marks", "two readers, two writers"),
    ("writer_checks_epoch", "a recovery"),
    ("numbers_are_burnt", "a recovery"),
    ("undo_before_restore", "two readers, two writers"),
    ("recovery_reloads", "a recovery"),
])
def test_without_a_rule_a_promise_breaks(rule, cast):
    """The model can fail: each rule is needed."""
    with pytest.raises(Violation):
        explore(World(CASTS[cast], crashes=1), Rules(**{rule: False}))


# The model and the gate


class Recorded:
    """The words of a control page; every store that changes one is written down."""

    NAMES: ClassVar = {
        control_page.EPOCH: "epoch",
        control_page.SEQ: "seq",
        control_page.LIVE: "live",
        control_page.ATTEMPT: "attempt",
    }

    def __init__(self, words: memoryview, trace: list[object]) -> None:
        self.words, self.trace = words, trace

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if index in self.NAMES and self.words[index] != value:
            self.trace.append((self.NAMES[index], value))
        self.words[index] = value


@pytest.fixture
def traced() -> Iterator[Callable[..., tuple[SharedGate, list[object]]]]:
    """A gate at version 0, and what is stored through it from then on."""
    arenas: list[tuple[WeightArena, SharedGate]] = []

    def make(undo: bool) -> tuple[SharedGate, list[object]]:
        model = nn.Linear(4, 4)
        arena = WeightArena.create(ArenaLayout.for_module(model))
        gate = SharedGate.create(arena, settings=GateSettings(undo=undo))
        gate.open(0)
        arenas.append((arena, gate))
        trace: list[object] = []
        gate.page._words = Recorded(gate.page._words, trace)  # type: ignore[assignment]
        take_undo = arena.take_undo

        def take() -> Callable[[], None]:
            restore = take_undo()
            return lambda: (trace.append("weights"), restore())[1]

        arena.take_undo = take  # type: ignore[method-assign]
        return gate, trace

    yield make
    for arena, gate in arenas:
        gate.page._words = gate.page._words.words  # type: ignore[attr-defined]
        gate.close()
        arena.close()


def modelled(process: Process, start: World, raises: bool = False) -> tuple[list[object], World]:
    """What one process alone stores in the model, and the world it leaves."""
    world, trace = start._replace(processes=(process,), crashes=0), []
    while choices := list(successors(world, Rules())):
        after = choices[-1 if raises and world.processes[0].at == "half" else 0]
        for word in ("epoch", "attempt", "seq"):
            if getattr(after, word) != getattr(world, word):
                trace.append((word, getattr(after, word)))
        if (after.version, after.state) != (world.version, world.state):
            trace.append(("live", after.version << 8 | after.state))
        if after.halves != world.halves and trace[-1] != "weights":
            trace.append("weights")
        world = after
    return trace, world


def failing(trace: list[object]) -> Callable[[int], None]:
    def update(version: int) -> None:
        trace.append("weights")
        raise ArithmeticError

    return update


def test_an_update_stores_what_the_model_says(traced):
    gate, trace = traced(undo=False)
    gate.write(None, lambda version: trace.append("weights"))
    assert trace == modelled(writer(100), World(()))[0]


@pytest.mark.parametrize("undo", [True, False])
def test_a_failing_update_and_a_recovery_store_what_the_model_says(undo, traced):
    gate, trace = traced(undo)
    with pytest.raises(ArithmeticError):
        gate.write(None, failing(trace))
    expected, world = modelled(writer(100, undo=undo), World(()), raises=True)
    assert trace == expected and (world.state == POISONED) != undo
    trace.clear()
    gate.recover(lambda: trace.append("weights"))
    assert trace == modelled(recoverer(), world)[0]
