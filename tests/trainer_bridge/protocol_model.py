"""A model of the publication protocol, small enough to try every interleaving of it.

Readers, writers and one who recovers are programs of atomic steps: one store or load of a word of
the control page, one half of the weights, one lock operation. Whatever may come next is tried:
any process moves, or dies where it stands, which frees its lock and nothing else. The weights are
two halves that hold the number of the update that wrote them, so a torn or mislabelled read shows.

The steps are those of `trainer_bridge/publication.py`, `control_page.py` and `step_reader.py`, in
their order; `test_protocol_model.py` compares the stores with what the real gate does. Left out is
the announcement (INTENT): nothing but fairness depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

INIT, STABLE, WRITING, POISONED = range(4)
NOBODY = -1


class Process(NamedTuple):
    """`at`: the label of the step that comes next."""

    program: str
    at: str
    epoch: int = 1
    mark: tuple[int, int, int] = (0, 0, 0)
    version: int = 0  # a reader's, for its step; a writer's target
    content: int = 0  # what this process writes; a reader's first half
    turns: int = 1  # steps a reader takes, updates a writer makes
    undo: bool = True


class World(NamedTuple):
    """All that the next step depends on. published: (version, content) of every commit; tried:
    every number that an update or a recovery began under."""

    processes: tuple[Process, ...]
    epoch: int = 1
    seq: int = 0
    version: int = 0
    state: int = STABLE
    attempt: int = 0
    halves: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (0, 0)
    shared: frozenset[int] = frozenset()
    exclusive: int = NOBODY
    published: frozenset[tuple[int, int]] = frozenset({(0, 0)})
    tried: frozenset[int] = frozenset({0})
    crashes: int = 1

    def moved(self, index: int, process: Process, **changes: object) -> World:
        processes = (*self.processes[:index], process, *self.processes[index + 1 :])
        return self._replace(processes=processes, **changes)  # type: ignore[arg-type]

    @property
    def mark(self) -> tuple[int, int, int]:
        return self.version, self.state, self.seq

    @property
    def torn(self) -> bool:
        return self.state != STABLE or self.seq % 2 == 1


class Violation(AssertionError):
    """An invariant does not hold; the message says which."""


class Rules(NamedTuple):
    """The protocol; each rule can be left out, to see that it is needed."""

    reader_locks: bool = True
    reader_checks: bool = True
    writer_marks: bool = True  # WRITING and an odd SEQ before the first byte
    writer_checks_epoch: bool = True
    numbers_are_burnt: bool = True
    undo_before_restore: bool = True
    recovery_reloads: bool = True


Successors = Iterator[World]


def reader(world: World, i: int, me: Process, rules: Rules) -> Successors:
    match me.at:
        case "lock":
            if world.exclusive == NOBODY:
                yield world.moved(i, me._replace(at="check"), shared=world.shared | {i})
            elif not rules.reader_locks:
                yield world.moved(i, me._replace(at="check"))
        case "check":
            if rules.reader_checks and world.torn:
                yield world.moved(i, me._replace(at="end"), shared=world.shared - {i})
            else:
                if world.version < me.version:
                    raise Violation("the version that a reader is given never goes back")
                yield world.moved(i, me._replace(at="first", version=world.version))
        case "first":
            yield world.moved(i, me._replace(at="second", content=world.halves[0]))
        case "second":
            if me.content != world.halves[1]:
                raise Violation("what a reader reads within one step is of one update")
            if (me.version, me.content) not in world.published:
                raise Violation("what a reader reads is what was published as its version")
            yield world.moved(i, me._replace(at="unlock", content=0))
        case "unlock":
            turns = me.turns - 1
            at = "lock" if turns else "end"
            yield world.moved(i, me._replace(at=at, turns=turns), shared=world.shared - {i})


def writer(world: World, i: int, me: Process, rules: Rules) -> Successors:
    step = me._replace
    match me.at:
        case "look":
            wrong = rules.writer_checks_epoch and me.epoch != world.epoch
            if wrong or world.state == POISONED:
                yield world.moved(i, step(at="end"))
            else:
                yield world.moved(i, step(at="lock", mark=world.mark))
        case "lock":
            if world.exclusive == NOBODY and not world.shared:
                yield world.moved(i, step(at="verify"), exclusive=i)
            yield world.moved(i, step(at="end"))  # the deadline
        case "verify":
            fenced = rules.writer_checks_epoch and me.epoch != world.epoch
            if fenced or world.torn or me.mark != world.mark:
                yield world.moved(i, step(at="end"), exclusive=NOBODY)
            else:
                target = max(world.attempt, world.version) + 1
                yield world.moved(i, step(at="attempt", version=target), before=world.halves)
        case "attempt":
            attempt = me.version if rules.numbers_are_burnt else world.attempt
            yield _begin(world, i, step(at="writing"), attempt)
        case "writing":
            state = WRITING if rules.writer_marks else world.state
            yield world.moved(i, step(at="odd"), state=state)
        case "odd":
            seq = world.seq + 1 if rules.writer_marks else world.seq
            yield world.moved(i, step(at="half"), seq=seq)
        case "half":
            yield from _change(world, i, me)
            if rules.writer_marks:
                yield world.moved(i, step(at="poison"), halves=(me.content, world.halves[1]))
        case "whole" | "commit":
            yield from _change(world, i, me)
        case "even":
            seq = world.seq + 1 if rules.writer_marks else world.seq
            yield world.moved(i, step(at="unlock"), seq=seq)
        case "poison":  # the update raised
            after = "undo half" if rules.undo_before_restore else "stable"
            yield world.moved(i, step(at=after if me.undo else "unlock"), state=POISONED)
        case "undo half":
            yield world.moved(i, step(at="undo"), halves=(world.before[0], world.halves[1]))
        case "undo":
            at = "stable" if rules.undo_before_restore else "unlock"
            yield world.moved(i, step(at=at), halves=world.before)
        case "stable":
            yield world.moved(i, step(at="restored"), state=STABLE)
        case "restored":
            at = "unlock" if rules.undo_before_restore else "undo half"
            yield world.moved(i, step(at=at), seq=world.seq + 1)
        case "unlock":
            turns, content = me.turns - 1, me.content + 1
            at = "look" if turns else "end"
            after = step(at=at, turns=turns, content=content, version=0, mark=(0, 0, 0))
            yield world.moved(i, after, exclusive=NOBODY, before=(0, 0))


_STORES = frozenset(
    "attempt writing odd half whole commit even poison stable restored claim".split()
) | {"undo half", "undo"}


def recoverer(world: World, i: int, me: Process, rules: Rules) -> Successors:
    step = me._replace
    match me.at:
        case "lock":
            if world.exclusive == NOBODY and not world.shared:
                yield world.moved(i, step(at="claim"), exclusive=i)
        case "claim":
            epoch = world.epoch + 1
            at = "attempt" if world.torn else "unlock"
            yield world.moved(i, step(at=at, epoch=epoch), epoch=epoch)
        case "attempt":
            target = max(world.attempt, world.version) + 1
            yield _begin(world, i, step(at="writing", version=target), target)
        case "writing":
            yield world.moved(i, step(at="odd"), state=WRITING)
        case "odd":
            at = "half" if rules.recovery_reloads else "commit"
            yield world.moved(i, step(at=at), seq=world.seq | 1)
        case "half" | "whole" | "commit":
            yield from _change(world, i, me)
        case "even":
            yield world.moved(i, step(at="unlock"), seq=world.seq + 1)
        case "unlock":
            yield world.moved(i, step(at="end"), exclusive=NOBODY)


def _begin(world: World, i: int, after: Process, attempt: int) -> World:
    if after.version in world.tried:
        raise Violation("a number stands for one update, for ever, also if that failed")
    return world.moved(i, after, attempt=attempt, tried=world.tried | {after.version})


def _change(world: World, i: int, me: Process) -> Successors:
    """One half of the weights, the other, and the one word that holds version and state."""
    match me.at:
        case "half":
            halves = (me.content, world.halves[1])
            yield world.moved(i, me._replace(at="whole"), halves=halves)
        case "whole":
            halves = (me.content, me.content)
            yield world.moved(i, me._replace(at="commit"), halves=halves)
        case "commit":
            published = world.published | {(me.version, me.content)}
            after = me._replace(at="even")
            yield world.moved(i, after, version=me.version, state=STABLE, published=published)


def _require_alone(world: World, i: int, me: Process) -> None:
    """Of whoever is about to change a word or the weights."""
    if me.at not in _STORES:
        return
    if me.at != "claim" and me.epoch != world.epoch:
        raise Violation("a trainer that was superseded changes nothing")
    if world.exclusive != i or world.shared:
        raise Violation("weights and words change while nobody reads or writes")


PROGRAMS: dict[str, Callable[[World, int, Process, Rules], Successors]] = {
    "reader": reader,
    "writer": writer,
    "recoverer": recoverer,
}


def successors(world: World, rules: Rules) -> Successors:
    """Every world that can come next."""
    for i, me in enumerate(world.processes):
        if me.at == "end":
            continue
        _require_alone(world, i, me)
        yield from PROGRAMS[me.program](world, i, me, rules)
        if world.crashes:
            free = world.exclusive if world.exclusive != i else NOBODY
            yield world.moved(
                i,
                me._replace(at="end"),
                crashes=world.crashes - 1,
                shared=world.shared - {i},
                exclusive=free,
            )


def explore(start: World, rules: Rules | None = None) -> tuple[int, list[World]]:
    """Visit every reachable world; how many there are, and those in which nobody can move.

    Raises `Violation` for the first world that breaks an invariant.
    """
    rules = rules or Rules()
    seen, stack, ends = {start}, [start], []
    while stack:
        world = stack.pop()
        moved = False
        for following in successors(world, rules):
            moved = True
            if following not in seen:
                seen.add(following)
                stack.append(following)
        if not moved:
            ends.append(world)
    return len(seen), ends
