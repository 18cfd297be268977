"""Ctrl-C and SIGTERM: one exception, which never parts what belongs together (F5)."""

import signal

import pytest

from recipes.stopping import Stopped, stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_exception_with_its_exit_code(number):
    former = signal.getsignal(number)
    with pytest.raises(Stopped) as stop, stop_signals():
        signal.raise_signal(number)
    assert stop.value.exit_code == 128 + number
    assert not stop.value.at_once
    assert signal.getsignal(number) is former


def test_what_is_held_together_is_finished_first():
    done = []
    with pytest.raises(Stopped) as stop, stop_signals() as signals:
        with signals.held():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the block")
        done.append("what comes after")
    assert done == ["the rest of the block"]
    assert not stop.value.at_once


def test_the_second_signal_does_not_wait():
    with pytest.raises(Stopped) as stop, stop_signals() as signals, signals.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second signal waited")
    assert stop.value.at_once


def test_each_block_holds_for_itself():
    with stop_signals() as signals:
        with pytest.raises(Stopped), signals.held():
            signal.raise_signal(signal.SIGINT)
        with signals.held():
            pass
        with pytest.raises(Stopped) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert not stop.value.at_once


def test_an_error_within_comes_first():
    with pytest.raises(KeyError), stop_signals() as signals, signals.held():
        signal.raise_signal(signal.SIGINT)
        raise KeyError("the update failed")
