"""The gate: order of the words, faults of real processes, and what a caller may rely on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rollout.policy import (
    FencedWriter,
    ParameterLeftArena,
    PoisonedWeights,
    ReadOnlyWeights,
    TornWeights,
    UpdateBusy,
    WeightsError,
)
from tests.trainer_bridge.gate_worker import StartWorker, WorkerProcess, fill, values
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.control_page import ControlPage
from trainer_bridge.publication import GateSettings, QuiesceTimeout, SharedGate, State

QUICK = GateSettings(
    quiesce_timeout_s=0.4, reader_timeout_s=0.4, intent_lease_s=0.1, undo=False
)


def small_model(width: int = 64, layers: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@pytest.fixture
def model() -> nn.Sequential:
    return small_model()


@pytest.fixture
def arena(model: nn.Module) -> Iterator[WeightArena]:
    arena = WeightArena.create(ArenaLayout.for_module(model))
    arena.bind(model, requires_grad=True)
    with torch.no_grad():
        fill(arena, 0.0)
    yield arena
    arena.close()


@pytest.fixture
def gate(arena: WeightArena, model: nn.Module) -> Iterator[SharedGate]:
    gate = SharedGate.create(arena, module=model, settings=QUICK)
    gate.open(0)
    yield gate
    gate.close()


@pytest.fixture
def start(arena: WeightArena, gate: SharedGate) -> Iterator[StartWorker]:
    """Starts workers on the arena, by default through this process's handles."""
    workers: list[WorkerProcess] = []

    def start_worker(writable: bool = False, settings: GateSettings = QUICK) -> WorkerProcess:
        workers.append(WorkerProcess(arena.handle(), gate.handle(), writable, settings))
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.close()


def words(gate: SharedGate) -> tuple[int, ...]:
    page = gate.page
    return page.epoch, page.sequence, page.version, page.state, page.attempt, page.intent_pid


def fail_half_way(arena: WeightArena, error: BaseException) -> None:
    arena.tensor(arena.layout.entries[0].name).fill_(-1.0)
    raise error


# Versions


def test_version_counts_up_and_refuses_what_is_not_greater(gate: SharedGate) -> None:
    """W2"""
    assert gate.write(None, lambda target: target) == 1
    assert gate.write(5, lambda target: target) == 5
    assert gate.write(None, lambda target: target) == 6
    before = words(gate)
    for wrong in (True, -1, 6, 3, "7", 7.0, 1 << 60):
        with pytest.raises(ValueError):
            gate.write(wrong, lambda target: pytest.fail("the update ran"))  # type: ignore
    assert words(gate) == before
    with gate.read() as version:
        assert version == gate.version == 6


def test_nothing_is_readable_before_the_gate_opens(arena: WeightArena) -> None:
    gate = SharedGate.create(arena)
    for attempt in (gate.read().__enter__, lambda: gate.write(None, lambda target: None)):
        with pytest.raises(WeightsError, match="no weights were published yet"):
            attempt()
    gate.open(41)
    with gate.read() as version:
        assert version == 41
    with pytest.raises(WeightsError, match="open already"):
        gate.open(42)
    assert gate.write(None, lambda target: target) == 42


def test_words_move_in_the_order_of_the_protocol(gate: SharedGate) -> None:
    """Inside the update the words say so, after it the version moved and SEQ is even again."""
    epoch, seq, version, *_ = words(gate)

    def look(target: int) -> None:
        assert words(gate) == (epoch, seq + 1, version, State.WRITING, target, os.getpid())
        assert gate.page.writer_pid == os.getpid()

    gate.write(None, look)
    assert words(gate) == (epoch, seq + 2, version + 1, State.STABLE, version + 1, 0)
    assert gate.page.writer_pid == 0


def test_receipt_says_what_was_done(arena: WeightArena, gate: SharedGate) -> None:
    """W13"""
    gate.write(None, lambda target: time.sleep(0.02))
    receipt = gate.last_receipt
    assert receipt is not None
    assert (receipt.version, receipt.tensors, receipt.bytes_copied) == (1, 16, 0)
    assert receipt.held_s >= 0.02 > receipt.wait_s >= 0

    careful = SharedGate.attach(arena, gate.handle(), settings=GateSettings(undo=True))
    careful.write(None, lambda target: None)
    assert careful.last_receipt is not None
    assert careful.last_receipt.bytes_copied == arena.layout.total_bytes


def test_validate_runs_before_and_after(gate: SharedGate) -> None:
    states: list[State] = []
    gate.write(None, lambda target: None, lambda: states.append(gate.state))
    assert states == [State.STABLE, State.WRITING]

    def refuse() -> None:
        raise KeyError("not now")

    before = words(gate)
    with pytest.raises(KeyError):
        gate.write(None, lambda target: pytest.fail("the update ran"), refuse)
    assert words(gate) == before


def test_telling_is_best_effort(arena: WeightArena, gate: SharedGate) -> None:
    told: list[tuple[int, State]] = []

    def notify(version: int) -> None:
        told.append((version, talkative.state))
        raise ConnectionError("nobody listens")

    talkative = SharedGate.attach(arena, gate.handle(), notify=notify)
    assert talkative.write(None, lambda target: "result") == "result"
    assert told == [(1, State.STABLE)]


# Failing updates


def test_the_undo_copy_is_kept_while_there_is_room(
    arena: WeightArena, gate: SharedGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; an explicit choice stands whatever the memory."""
    total = arena.layout.total_bytes
    memory = SimpleNamespace(available=8 * total)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert GateSettings().wants_undo(total)
    memory.available -= 1
    assert not GateSettings().wants_undo(total)
    assert GateSettings(undo=True).wants_undo(total)
    memory.available = 100 * total
    assert not GateSettings(undo=False).wants_undo(total)


def test_a_process_says_what_it_reads(
    model: nn.Module, arena: WeightArena, gate: SharedGate, start: StartWorker
) -> None:
    """W13: version, tensors, memory, and a checksum when asked; never while an update runs."""
    echo = gate.echo()
    assert (echo.version, echo.tensors, echo.checksum) == (0, 16, None)
    reader = start()
    theirs = reader.ask("echo")
    assert theirs == gate.echo(checksum=True)
    gate.write(None, lambda target: fill(arena, target))
    assert reader.ask("echo") != theirs
    assert reader.ask("echo") == gate.echo(checksum=True)
    name, parameter = next(iter(model.named_parameters()))
    parameter.data = parameter.data.clone()
    with pytest.raises(ParameterLeftArena, match=name):
        gate.echo()


@pytest.mark.parametrize("error", [ZeroDivisionError("in the step"), KeyboardInterrupt()])
def test_failing_update_with_undo_leaves_the_old_bits(
    arena: WeightArena, gate: SharedGate, error: BaseException
) -> None:
    """W3: bits and version stand, the number is burnt."""
    careful = SharedGate.attach(arena, gate.handle(), settings=GateSettings(undo=True))
    before = arena.checksum()
    seen_inside: list[str] = []

    def update(target: int) -> None:
        try:
            fail_half_way(arena, error)
        finally:
            seen_inside.append(arena.checksum())

    with pytest.raises(type(error)):
        careful.write(None, update)
    assert seen_inside != [before], "control: the update did change bits"
    assert arena.checksum() == before
    with careful.read() as version:
        assert version == 0
    with pytest.raises(ValueError, match="attempted before"):
        careful.write(1, lambda target: None)
    assert careful.write(None, lambda target: target) == 2


def test_failing_update_without_undo_poisons_until_recover(
    arena: WeightArena, gate: SharedGate
) -> None:
    """W3: the error names the attempted version; recovery gives a number never tried."""
    with pytest.raises(ZeroDivisionError):
        gate.write(7, lambda target: fail_half_way(arena, ZeroDivisionError()))
    assert gate.version == 0
    for attempt in (gate.read().__enter__, lambda: gate.write(None, lambda target: None)):
        with pytest.raises(PoisonedWeights, match="version 7"):
            attempt()
    assert gate.recover(lambda: fill(arena, 8.0)) == 8
    with gate.read() as version:
        assert (version, values(arena)) == (8, {8.0})


def test_a_failing_reload_leaves_the_weights_torn(arena: WeightArena, gate: SharedGate) -> None:
    with pytest.raises(ZeroDivisionError):
        gate.write(None, lambda target: fail_half_way(arena, ZeroDivisionError()))
    with pytest.raises(OSError):
        gate.recover(lambda: fail_half_way(arena, OSError("no checkpoint")))
    with pytest.raises(TornWeights), gate.read():
        pass
    assert gate.recover(lambda: fill(arena, 3.0)) == 3


def test_recover_of_whole_weights_only_claims_them(gate: SharedGate) -> None:
    gate.write(None, lambda target: None)
    assert gate.recover(lambda: pytest.fail("reloaded")) == 1
    assert gate.page.epoch == 2


def test_parameter_that_left_is_found_before_publication(
    arena: WeightArena, gate: SharedGate, model: nn.Sequential
) -> None:
    """W7, and again after the update, where it counts as a failure of it."""
    first = model.get_parameter("0.weight")
    inside = first.data
    before = words(gate)
    first.data = inside.clone()
    with pytest.raises(ParameterLeftArena, match=r"'0\.weight'"):
        gate.write(None, lambda target: pytest.fail("the update ran"))
    assert words(gate) == before

    first.data = inside
    gate.write(None, lambda target: None)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ParameterLeftArena, match="assign=True"):
        gate.write(None, lambda target: model.load_state_dict(state, assign=True))
    assert (gate.version, gate.state) == (1, State.POISONED)


# Threads and nesting


def test_steps_nest_and_exclude_updates_of_the_same_thread(gate: SharedGate) -> None:
    """W5"""
    with gate.read() as outer, gate.read() as inner:
        assert outer == inner == 0
        with pytest.raises(WeightsError, match="from inside a step"):
            gate.write(None, lambda target: None)

    def update(target: int) -> None:
        with pytest.raises(WeightsError, match="inside an update"):
            gate.read().__enter__()
        with pytest.raises(WeightsError, match="another update"):
            gate.write(None, lambda inner_target: None)

    gate.write(None, update)
    assert gate.version == 1


def test_a_step_of_another_thread_holds_an_update_back(gate: SharedGate) -> None:
    """flock does not exclude threads of one description; the gate must. W5"""
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        with gate.read(), gate.read():
            entered.set()
            leave.wait()

    threads = [threading.Thread(target=step, daemon=True) for _ in range(2)]
    threads[0].start()
    entered.wait()
    with pytest.raises(QuiesceTimeout):
        gate.write(None, lambda target: None)
    threads[1].start()
    time.sleep(0.05)
    leave.set()
    for thread in threads:
        thread.join()
    assert gate.write(None, lambda target: target) == 1


def test_the_first_to_leave_does_not_unlock_for_the_other(gate: SharedGate) -> None:
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        with gate.read():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    entered.wait()
    with gate.read():
        pass
    with pytest.raises(QuiesceTimeout):
        gate.write(None, lambda target: None)
    leave.set()
    thread.join()
    assert gate.write(None, lambda target: target) == 1


def test_two_threads_update_and_one_gets_busy(gate: SharedGate) -> None:
    inside, leave = threading.Event(), threading.Event()

    def update(target: int) -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=gate.write, args=(None, update), daemon=True)
    thread.start()
    inside.wait()
    with pytest.raises(UpdateBusy, match="another thread"):
        gate.write(None, lambda target: None)
    leave.set()
    thread.join()
    assert gate.version == 1


def test_a_forked_child_may_not_use_the_parents_gate(gate: SharedGate) -> None:
    """fork() shares the owner of the lock, so both would believe to hold it."""
    child = os.fork()
    if child == 0:
        refused = 0
        for attempt in (gate.read().__enter__, lambda: gate.write(None, lambda target: None)):
            try:
                attempt()
            except WeightsError as error:
                refused += "fork" in str(error)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2


# Faults of real processes


def count_torn(
    start: StartWorker, gate: SharedGate, arena: WeightArena, guarded: bool
) -> tuple[int, int]:
    readers = [start(settings=GateSettings()) for _ in range(2)]
    for reader in readers:
        assert reader.ask("loop", guarded, 0.001) == "looping"

    def update(target: int) -> None:
        for entry in arena.layout.entries:
            arena.tensor(entry.name).fill_(target)
            time.sleep(0.001)

    for _ in range(20):
        if guarded:
            gate.write(None, update)
        else:
            update(gate.version + 1)
            gate.write(None, lambda target: None)
        time.sleep(0.005)
    steps = torn = 0
    for reader in readers:
        reply = reader.ask("stop")
        steps, torn = steps + len(reply[0]), torn + reply[1]
        assert len(reply[2]) > 1, "the reader saw a single version: the test has no power"
    return steps, torn


@torch.no_grad()
def test_no_step_sees_torn_weights(
    start: StartWorker, gate: SharedGate, arena: WeightArena
) -> None:
    """W6. The control is the same traffic past the gate: it must be torn."""
    gate = SharedGate.attach(arena, gate.handle())
    steps, torn = count_torn(start, gate, arena, guarded=True)
    assert steps >= 20
    assert torn == 0
    _, torn = count_torn(start, gate, arena, guarded=False)
    assert torn > 0


def test_bits_are_equal_in_every_process(
    start: StartWorker, gate: SharedGate, arena: WeightArena
) -> None:
    """W13"""
    readers = [start(), start()]
    old = arena.checksum()
    with torch.no_grad():
        gate.write(None, lambda target: fill(arena, 0.5))
    assert arena.checksum() != old
    assert {reader.ask("checksum") for reader in readers} == {arena.checksum()}


def test_a_rollout_process_cannot_write(start: StartWorker, arena: WeightArena) -> None:
    """A refusal through the gate, a crash of that process past it; the weights stand."""
    before = arena.checksum()
    reader, trainer = start(), start(writable=True)
    assert reader.ask("write") == (
        ReadOnlyWeights.__name__,
        "this process maps the weights read-only; the trainer updates",
    )
    reader.tell("stray_write")
    reader.process.join(30)
    assert reader.process.exitcode == -signal.SIGSEGV
    assert arena.checksum() == before
    assert trainer.ask("stray_write") is None, "control: a writable mapping takes it"
    assert arena.checksum() != before


def test_trainer_killed_half_way(start: StartWorker, gate: SharedGate, arena: WeightArena) -> None:
    """F3: torn weights are never served; a new trainer comes back through a reader's descriptor,
    recovers under a number never tried, and the old number stays burnt."""
    reader, trainer = start(), start(writable=True)
    assert trainer.ask("write") == 1
    assert trainer.ask("write_slowly") == "half-way"
    reader.tell("step")
    time.sleep(0.1)
    assert not reader.pipe.poll(), "the reader must wait while the writer lives"
    killed_at = time.monotonic()
    trainer.signal(signal.SIGKILL)
    error, message = reader.reply()
    assert time.monotonic() - killed_at < 2.0
    assert (error, gate.version) == ("TornWeights", 1)
    assert f"process {trainer.pid}" in message
    assert "version 2" in message
    assert len(values(arena)) == 2, "control: the weights are torn indeed"
    with pytest.raises(TornWeights):
        gate.write(None, lambda target: pytest.fail("the update ran"))

    arena_handle, gate_handle = reader.ask("handles")
    assert arena_handle.memory.pid == reader.pid
    successor = WorkerProcess(arena_handle, gate_handle, writable=True)
    try:
        assert successor.ask("recover", 1.5) == 3
        assert reader.ask("step") == (3, {1.5})
        assert successor.ask("write", 2)[0] == "ValueError"
        assert successor.ask("write") == 4
        assert reader.ask("step") == (4, {4.0})
        with pytest.raises(FencedWriter, match="incarnation 1"):
            gate.write(None, lambda target: pytest.fail("the update ran"))
    finally:
        successor.close()


WORDS_AFTER = [  # of a write to version 1: the store, then (VERSION, STATE, SEQ, ATTEMPT)
    ("nothing", (0, State.STABLE, 0, 0)),
    ("UNTIL", (0, State.STABLE, 0, 0)),
    ("INTENT", (0, State.STABLE, 0, 0)),
    ("ATTEMPT", (0, State.STABLE, 0, 1)),
    ("WRITER", (0, State.STABLE, 0, 1)),
    ("LIVE", (0, State.WRITING, 0, 1)),
    ("SEQ, and all weights", (0, State.WRITING, 1, 1)),
    ("LIVE again", (1, State.STABLE, 1, 1)),
    ("SEQ again", (1, State.STABLE, 2, 1)),
    ("WRITER again", (1, State.STABLE, 2, 1)),
    ("INTENT again", (1, State.STABLE, 2, 1)),
]


@pytest.mark.parametrize("stores", range(len(WORDS_AFTER)), ids=[name for name, _ in WORDS_AFTER])
def test_trainer_killed_after_each_store(start: StartWorker, gate: SharedGate, stores: int) -> None:
    """Whichever word was the last: the old version, the new one, or torn; never a mixture."""
    reader, trainer = start(), start(writable=True)
    trainer.tell("write_dying", stores + 1)
    if stores == len(WORDS_AFTER) - 1:
        assert trainer.reply() == 1, "control: the write has no further store"
    else:
        trainer.process.join(30)
        assert trainer.process.exitcode == -signal.SIGKILL
    page = gate.page
    version, state, sequence, attempt = WORDS_AFTER[stores][1]
    assert (page.version, page.state, page.sequence, page.attempt) == WORDS_AFTER[stores][1]
    reply = reader.ask("step")
    torn = state is not State.STABLE or sequence % 2 == 1
    assert reply[0] == "TornWeights" if torn else reply == (version, {float(version)})

    successor = start(writable=True)
    recovered = successor.ask("recover", 9.0)
    assert recovered == (attempt + 1 if torn else version)
    following = successor.ask("write")
    assert following == max(recovered, attempt) + 1
    assert reader.ask("step") == (following, {float(following)})


def test_reader_killed_inside_its_step(start: StartWorker, gate: SharedGate) -> None:
    """F1: the kernel drops the lock of the dead. Control: while it lives, the update waits."""
    reader = start()
    assert reader.ask("hold") == "holding"
    with pytest.raises(QuiesceTimeout):
        gate.write(None, lambda target: None)
    reader.signal(signal.SIGKILL)
    assert gate.write(None, lambda target: target) == 1


def test_hung_reader_fails_the_update_and_nothing_else(
    start: StartWorker, gate: SharedGate, arena: WeightArena
) -> None:
    """F2: named, in time, nothing changed, the others serve on; then it goes on as if nothing."""
    hung, other = start(), start()
    assert hung.ask("hold") == "holding"
    hung.signal(signal.SIGSTOP)
    settings = GateSettings(quiesce_timeout_s=1.5, intent_lease_s=0.2)
    writer = SharedGate.attach(arena, gate.handle(), settings=settings)
    before, bits = words(gate), arena.checksum()
    assert other.ask("loop", True, 0.0) == "looping"
    began = time.monotonic()
    with pytest.raises(QuiesceTimeout, match=rf"process {hung.pid} \(.*, stopped\)") as caught:
        writer.write(None, lambda target: pytest.fail("the update ran"))
    ended = time.monotonic()
    assert 1.5 <= ended - began < 5.0
    assert "nothing was changed, the live policy version is 0" in str(caught.value)
    assert (words(gate), arena.checksum()) == (before, bits)
    steps, torn, _ = other.ask("stop")
    assert [step for step in steps if began + 0.1 < step < ended], "it served while the writer hung"
    assert torn == 0
    hung.signal(signal.SIGCONT)
    assert hung.ask("leave") == "released"
    assert writer.write(None, lambda target: target) == 1


def relay(inside: WorkerProcess, outside: WorkerProcess, over: threading.Event) -> None:
    """One of two readers is always inside a step, unless the other is held back at the gate."""
    assert inside.ask("hold") == "holding"
    while not over.is_set():
        outside.tell("hold")
        entered = outside.pipe.poll(0.05)
        assert inside.ask("leave") == "released"
        if not entered:
            assert outside.pipe.poll(30)
        assert outside.reply() == "holding"
        inside, outside = outside, inside
    assert inside.ask("leave") == "released"


def test_overlapping_steps_cannot_starve_the_writer(
    start: StartWorker, arena: WeightArena, gate: SharedGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the announcement the same readers never let it in."""
    patient = GateSettings(quiesce_timeout_s=20.0, intent_lease_s=1.0)
    writer = SharedGate.attach(arena, gate.handle(), settings=patient)
    over = threading.Event()
    readers = start(settings=patient), start(settings=patient)
    thread = threading.Thread(target=relay, args=(*readers, over), daemon=True)
    thread.start()
    while not gate._lock._lock.holders():
        time.sleep(0.01)
    for version in range(1, 4):
        assert writer.write(None, lambda target: target) == version
        time.sleep(0.06)
    with monkeypatch.context() as patch:
        patch.setattr(ControlPage, "announce", lambda self, pid, until_ns: None)
        with pytest.raises(QuiesceTimeout):
            gate.write(None, lambda target: None)
    over.set()
    thread.join(30)
    assert not thread.is_alive()
    assert writer.write(None, lambda target: target) == 4


def test_hung_writer_fails_the_reader_in_time(start: StartWorker) -> None:
    reader, trainer = start(), start(writable=True)
    assert trainer.ask("write_slowly") == "half-way"
    trainer.signal(signal.SIGSTOP)
    error, message = reader.ask("step")
    assert error == "UpdateBusy"
    assert f"process {trainer.pid} (" in message
    assert "stopped" in message
    trainer.signal(signal.SIGCONT)
    trainer.tell("go on")
    assert trainer.reply() == 1
    assert reader.ask("step") == (1, {1.0})


def test_two_processes_update_and_one_gets_busy(start: StartWorker, gate: SharedGate) -> None:
    trainer = start(writable=True)
    assert trainer.ask("write_slowly") == "half-way"
    with pytest.raises(UpdateBusy):
        gate.write(None, lambda target: pytest.fail("the update ran"))
    trainer.tell("go on")
    assert trainer.reply() == 1
    assert gate.write(None, lambda target: target) == 2


def test_an_update_that_was_overtaken_gets_busy(arena: WeightArena, gate: SharedGate) -> None:
    """Compare-and-set: another process commits between this one's checks and its lock."""
    other = SharedGate.attach(arena, gate.handle())

    def overtake() -> None:
        other.write(None, lambda target: None)

    with pytest.raises(UpdateBusy, match="meanwhile; the live version is 1"):
        gate.write(None, lambda target: pytest.fail("the update ran"), validate=overtake)
    assert gate.write(None, lambda target: target) == 2


def test_a_trainer_superseded_meanwhile_is_refused(arena: WeightArena, gate: SharedGate) -> None:
    """The epoch is checked again under the lock, where nobody can claim it any more."""
    successor = SharedGate.attach(arena, gate.handle())
    with pytest.raises(FencedWriter):
        gate.write(
            None,
            lambda target: pytest.fail("the update ran"),
            validate=lambda: [successor.recover()].clear(),
        )
    assert gate.version == 0


def test_superseded_trainer_is_refused(start: StartWorker, gate: SharedGate) -> None:
    old, new = start(writable=True), start(writable=True)
    assert old.ask("write") == 1
    assert new.ask("recover", 0.0) == 1
    assert old.ask("write")[0] == "FencedWriter"
    assert new.ask("write") == 2
    assert gate.version == 2


def test_gates_of_two_arenas_do_not_mix(arena: WeightArena, gate: SharedGate) -> None:
    """F9"""
    other = WeightArena.create(arena.layout)
    with pytest.raises(WeightsError, match="another layout"):
        SharedGate.attach(other, gate.handle())


def test_descriptors_and_memory_do_not_grow(arena: WeightArena, gate: SharedGate) -> None:
    """W10"""
    careful = SharedGate.attach(arena, gate.handle(), settings=GateSettings(undo=True))
    careful.write(None, lambda target: None)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        careful.write(None, lambda target: None)
    for _ in range(20):
        SharedGate.attach(arena, gate.handle()).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_closed_gate_says_so(arena: WeightArena, gate: SharedGate) -> None:
    other = SharedGate.attach(arena, gate.handle())
    other.close()
    for attempt in (other.read().__enter__, lambda: other.write(None, lambda target: None)):
        with pytest.raises(WeightsError, match="closed"):
            attempt()
    assert other.version == 0
    assert gate.write(None, lambda target: target) == 1


def test_a_step_costs_microseconds(gate: SharedGate) -> None:
    """~5 us on an idle machine; the bound allows for a busy one."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            with gate.read():
                pass
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 100e-6
