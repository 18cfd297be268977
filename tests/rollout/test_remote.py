"""Dead, hung and out of memory are told apart, by name, phase and cause (F1, F2, F8)."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import time

import psutil
import pytest
import ray
import torch

from rollout import remote
from rollout.process_identity import ProcessIdentity
from rollout.remote import (
    ActorDied,
    ActorHung,
    ActorOutOfMemory,
    ActorTimeout,
    RemoteActor,
)

pytestmark = pytest.mark.usefixtures("ray_session")


class Worker:
    def heartbeat(self) -> str:
        return "all is well"

    def process_identity(self) -> ProcessIdentity:
        return ProcessIdentity.of_this()

    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def end(self, how: int) -> None:
        os.kill(os.getpid(), how)
        time.sleep(60)

    def fail(self) -> None:
        raise KeyError("no such thing")

    def eat(self, with_torch: bool) -> None:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
        if with_torch:
            torch.empty(1 << 30)
        else:
            bytearray(1 << 30)


@pytest.fixture
def start():
    started = []

    def make(timeout_s: float = 20.0) -> RemoteActor:
        handle = ray.remote(Worker).options(num_cpus=0, max_concurrency=4).remote()
        actor = RemoteActor("worker-7", handle, timeout_s)
        started.append(actor)
        assert actor.call("say hello", handle.heartbeat.remote(), 60) == "all is well"
        return actor

    yield make
    for actor in started:
        actor.kill()


def test_a_result_and_an_error_of_its_own_come_through(start):
    actor = start()
    assert actor.call("work", actor.handle.work.remote(0.1), 30) == "done"
    with pytest.raises(KeyError, match="no such thing"):
        actor.call("fail", actor.handle.fail.remote(), 30)


def test_a_busy_actor_is_late_not_hung(start):
    """It answers while it works: the deadline of the call ends the wait, not its heartbeat."""
    actor = start(timeout_s=0.5)
    with pytest.raises(ActorTimeout, match=r"worker-7 did not finish 'sleep' within 2 s"):
        actor.call("sleep", actor.handle.work.remote(30), 2)


def test_a_killed_actor_died(start):
    actor = start()
    with pytest.raises(ActorDied, match=r"worker-7 died during 'end'"):
        actor.call("end", actor.handle.end.remote(signal.SIGKILL), 60)


def test_a_stopped_actor_hangs_and_can_be_ended(start):
    """F2: named, with what it last said; `kill` ends it although it handles no message."""
    actor = start(timeout_s=1.0)
    pid = ray.get(actor.handle.process_identity.remote()).pid
    actor.call("work", actor.handle.work.remote(2.0), 30)  # long enough for a heartbeat
    with pytest.raises(ActorHung, match=r"worker-7 has not answered .* 'end'.*all is well"):
        actor.call("end", actor.handle.end.remote(signal.SIGSTOP), 60)
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    actor.kill()
    actor.kill()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_idle_actor_that_was_stopped_is_found(start):
    actor = start(timeout_s=1.0)
    os.kill(ray.get(actor.handle.process_identity.remote()).pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    with pytest.raises(ActorHung):
        while time.monotonic() < deadline:
            actor.check("a look round")
            time.sleep(0.1)


@pytest.mark.parametrize("with_torch", [False, True])
def test_no_memory_is_a_cause_of_its_own(start, with_torch):
    """F8."""
    actor = start()
    with pytest.raises(ActorOutOfMemory, match=r"worker-7 ran out of memory during 'eat'"):
        actor.call("eat", actor.handle.eat.remote(with_torch), 60)


def test_a_death_is_blamed_on_memory_if_the_kernel_says_so(start, monkeypatch):
    kills = iter([3, 4])
    monkeypatch.setattr(remote, "memory_kills", lambda: next(kills))
    actor = start()
    error = actor.death("run_batch", ray.exceptions.RayActorError())
    assert isinstance(error, ActorOutOfMemory) and "1 process" in str(error)


def test_another_process_with_the_same_number_is_spared():
    identity = ProcessIdentity.of_this()
    for other in ({"started": identity.started - 1}, {"host": "another"}, {"pid_namespace": 1}):
        dataclasses.replace(identity, **other).kill(0.0)  # and this one is still here
    assert remote.memory_kills() >= 0
