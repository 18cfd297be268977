"""LocalGate: readers and one writer of one process."""

from __future__ import annotations

import threading
import time

import pytest

from rollout.policy import LocalGate, PoisonedWeights, check_version


def test_versions():
    """W2."""
    gate = LocalGate(3)
    assert gate.write(None, lambda target: target) == 4
    assert gate.write(9, lambda target: target) == 9
    for bad in (9, 4, -1, True, 1.5, "10"):
        with pytest.raises(ValueError):
            gate.write(bad, lambda target: None)
        with pytest.raises(ValueError):
            check_version(bad) if not isinstance(bad, int) or bad in (-1, True) else LocalGate(-1)
    assert gate.version == 9


def test_a_failing_update_burns_its_number():
    """W3: poisoned until recover, which brings a number never tried."""
    gate, reloaded = LocalGate(), []
    with pytest.raises(OSError):
        gate.write(None, _raise)
    for call in (lambda: gate.read().__enter__(), lambda: gate.write(None, lambda v: None)):
        with pytest.raises(PoisonedWeights, match="version 1"):
            call()
    assert gate.version == 0
    assert gate.recover(lambda: reloaded.append(1)) == 2 and reloaded == [1]
    assert gate.recover() == 2
    with gate.read() as version:
        assert version == 2
    with pytest.raises(ValueError, match="not greater"):
        gate.write(1, lambda v: None)


def test_undo_keeps_the_old_version():
    """W3: the other outcome; the number is burnt all the same."""
    weights = {"w": 1}

    def take_undo():
        old = dict(weights)
        return lambda: weights.update(old)

    def half(target: int) -> None:
        weights["w"] = 2
        raise OSError

    gate = LocalGate(take_undo=take_undo)
    with pytest.raises(OSError):
        gate.write(None, half)
    assert weights == {"w": 1} and gate.version == 0
    with pytest.raises(ValueError, match="attempted before"):
        gate.write(1, lambda v: None)
    assert gate.write(None, lambda v: v) == 2


def test_validation_before_the_update_changes_nothing():
    gate = LocalGate()
    calls = []
    with pytest.raises(OSError):
        gate.write(None, calls.append, lambda: _raise(0))
    assert calls == []
    assert gate.write(None, lambda v: v) == 1


def test_a_reader_holds_the_writer_back():
    """W5."""
    gate, order = LocalGate(), []
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with gate.read() as version:
            inside.set()
            leave.wait(10)
            order.append(("read", version, gate.version))

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait(10)
    writer = threading.Thread(target=lambda: gate.write(None, lambda v: order.append("write")))
    writer.start()
    time.sleep(0.05)
    assert order == []
    leave.set()
    reader.join(10)
    writer.join(10)
    assert order == [("read", 0, 0), "write"]


def test_readers_and_writers_never_overlap():
    """Many threads; the control without the gate is torn."""

    def torn(guarded: bool) -> int:
        gate, pair, found = LocalGate(), [0, 0], []

        def write(target: int) -> None:
            pair[0] = target
            time.sleep(0.001)
            pair[1] = target

        def read() -> None:
            for _ in range(60):
                if guarded:
                    with gate.read():
                        found.append(pair[0] != pair[1])
                else:
                    found.append(pair[0] != pair[1])
                time.sleep(0.0005)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(1, 30):
            gate.write(None, write) if guarded else write(number)
        for thread in threads:
            thread.join()
        return sum(found)

    assert torn(guarded=True) == 0
    assert torn(guarded=False) > 0


def test_from_inside_is_refused():
    gate = LocalGate()
    with gate.read(), pytest.raises(RuntimeError, match="inside a policy snapshot"):
        gate.write(None, lambda v: None)
    with gate.read(), gate.read() as version:
        assert version == 0
    with pytest.raises(RuntimeError, match="from inside an update"):
        gate.write(None, lambda v: gate.read().__enter__())


def _raise(target: int) -> None:
    raise OSError("disk")


def test_an_undo_that_fails_leaves_poison():
    """W3: half-written weights are never served, not even when putting them back fails."""

    def undo() -> None:
        raise OSError("undo")

    gate = LocalGate(take_undo=lambda: undo)

    def fail(version: int) -> None:
        raise ValueError("update")

    with pytest.raises(OSError, match="undo"):
        gate.write(None, fail)
    with pytest.raises(PoisonedWeights, match="version 1"), gate.read():
        pass


def test_recover_from_inside_is_refused():
    gate = LocalGate()
    with gate.read(), pytest.raises(RuntimeError, match="inside a policy snapshot"):
        gate.recover()
    gate.write(None, lambda version: None)


def test_an_interrupted_wait_for_readers_lets_the_next_in(monkeypatch):
    """Ctrl-C while an update waits for a reader to leave: nobody waits for that update."""
    gate = LocalGate()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.read():
            entered.set()
            leave.wait(60)

    reader = threading.Thread(target=hold)
    reader.start()
    assert entered.wait(60)

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gate.write(None, lambda version: None)
    with gate.read() as version:
        assert version == 0
    leave.set()
    reader.join(60)
    gate.write(None, lambda version: None)
    assert gate.version == 1


def test_every_refusal_is_an_exception_of_its_own():
    """W10: one object raised again and again would keep every caller's frames alive."""
    gate = LocalGate()

    def fail(version: int) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        gate.write(None, fail)
    seen = []
    for _ in range(2):
        with pytest.raises(PoisonedWeights) as caught, gate.read():
            pass
        seen.append(caught.value)
    assert seen[0] is not seen[1]


def test_check_write_raises_what_write_would():
    """And changes nothing: whoever asks first need not have ended anything for an update."""
    gate = LocalGate(policy_version=3)
    gate.check_write(None)
    gate.check_write(4)
    for bad in (3, -1, True):
        with pytest.raises(ValueError):
            gate.check_write(bad)
    with gate.read(), pytest.raises(RuntimeError, match="inside a policy snapshot"):
        gate.check_write(None)
    assert gate.version == 3
