"""Promise 5 over real processes: any of them is killed or stopped, and nothing is lost (F1-F3, F7,
F8, W13)."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

from rollout import (
    ExactnessRefused,
    SamplingParams,
    TornWeights,
)
from rollout.actor import RolloutActor, StaleWeights
from rollout.remote import ActorDied, ActorOutOfMemory
from tests.trainer_bridge import colocated
from tests.trainer_bridge.colocated import PARAMS as SHORT
from tests.trainer_bridge.colocated import PROMPTS, in_process, scale_norm
from trainer_bridge import Colocation, TrainerLost, WeightsDiffer
from trainer_bridge.agreement import check_same_bits
from trainer_bridge.attach import attach_engine

pytestmark = pytest.mark.usefixtures("ray_session")

LONG = SamplingParams(n=8, max_tokens=150, seed=1, ignore_eos=True)


start = partial(colocated.start, heartbeat_timeout_s=3.0)


@pytest.fixture(scope="module")
def shared(folder, ray_session):
    """One run for the tests that leave it whole."""
    with start(folder) as run:
        yield run
        wait_until_alive(run, ["rollout-0", "rollout-1"])
        check_same_bits(run.exactness)


@pytest.fixture
def run(shared):
    """That run with both actors at work."""
    wait_until_alive(shared, ["rollout-0", "rollout-1"])
    shared.pool.members.losses.clear()
    return shared


def pid_of(handle) -> int:
    return ray.get(handle.process_identity.remote()).pid


def rollout_pid(run: Colocation, name: str) -> int:
    return pid_of(run.pool.members.serving[name].handle)


def trainer_pid(run: Colocation) -> int:
    return run.trainer.get_stats()["pid"]


def while_rollouts_run(run: Colocation, act, params=LONG):
    """The result of a batch during which `act` was called, once some prompts were handed in."""
    found: list = []

    def compute():
        try:
            found.append(run.pool.run_batch(PROMPTS, params))
        except BaseException as error:
            found.append(error)

    worker = threading.Thread(target=compute)
    worker.start()
    while not any(s["generated_tokens"] > 100 for s in run.pool.get_stats()):
        time.sleep(0.01)
    act()
    worker.join(180)
    assert found, "the batch did not end"
    return found[0]


def wait_until_alive(run: Colocation, names: list[str]) -> None:
    deadline = time.monotonic() + 60
    while sorted(run.pool.alive) != names:
        assert time.monotonic() < deadline, run.pool.alive
        run.pool.members.check()
        time.sleep(0.1)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_actor_changes_no_token_and_another_joins(run, blow):
    """F1, F2: same bits; the one that takes its place reads the same weights and serves."""
    expected = list(run.pool.run_batch(PROMPTS, LONG))
    victim, restarts = rollout_pid(run, "rollout-0"), run.pool.members.restarts
    found = while_rollouts_run(run, lambda: os.kill(victim, blow))
    assert list(found) == expected
    (loss,) = run.pool.members.losses
    assert "rollout-0" in str(loss) and "run_batch" in str(loss)
    wait_until_alive(run, ["rollout-0", "rollout-1"])
    assert run.pool.members.restarts == restarts + 1
    assert rollout_pid(run, "rollout-0") != victim
    assert list(run.pool.run_batch(PROMPTS, LONG)) == expected
    busy = {s["actor"]: s["generated_tokens"] for s in run.pool.get_stats()}
    assert busy["rollout-0"] > 0
    assert len({echo.memory for echo in run.verify_weights().values()}) == 1


def test_an_actor_that_joins_after_updates_is_held_against_the_others(run):
    """It proves its bits on today's weights, which no probe at the start has seen."""
    step(run, 0)
    version = run.trainer.policy_version
    expected = list(run.pool.run_batch(PROMPTS, SHORT))
    os.kill(rollout_pid(run, "rollout-0"), signal.SIGKILL)
    assert list(run.pool.run_batch(PROMPTS, SHORT)) == expected
    wait_until_alive(run, ["rollout-0", "rollout-1"])
    check_same_bits(run.exactness)
    probe = run.pool.probe()["rollout-0"][1]
    other = dataclasses.replace(
        probe, probe=dataclasses.replace(probe.probe, fingerprint="others")
    )
    about = {"attachment": run.pool.attachments()["rollout-0"]}
    others = {"rollout-1": (version, other)}
    with pytest.raises(ExactnessRefused, match="rollout-0"):
        run.admit_actor("rollout-0", about, {"rollout-0": (version, probe), **others})
    # On other weights there is nothing to compare.
    assert not run.admit_actor("rollout-0", about, {"rollout-0": (version + 1, probe), **others})


def test_what_was_handed_in_is_not_computed_again(folder):
    """Some prompts are short: they are done when the actor dies, and only others are repeated."""
    short = SamplingParams(n=2, max_tokens=2, seed=4, ignore_eos=True)
    long = SamplingParams(n=24, max_tokens=200, seed=4, ignore_eos=True)
    params = [short, long] * 3
    with start(folder, max_restarts=0) as run:
        pool = run.pool
        sent = []
        dispatch = pool._dispatch

        def spy(tasks, session_ids, deadline):
            sent.append(sorted(task.prompt_index for task in tasks))
            return dispatch(tasks, session_ids, deadline)

        pool._dispatch = spy
        expected = list(pool.run_batch(PROMPTS, params))
        sent.clear()
        told: list[int] = []
        handed_in: set[int] = set()
        collect = pool._collect

        def kill_after_the_first_part(share, take):
            ended = collect(share, take)
            if told and not handed_in and share.open:
                handed_in.update(told)
                os.kill(pid_of(share.actor.handle), signal.SIGKILL)
            return ended

        pool._collect = kill_after_the_first_part
        found = pool.run_batch(PROMPTS, params, on_finished=lambda place, _: told.append(place))
        assert list(found) == expected
        assert sorted(told) == list(range(len(PROMPTS))), "of each prompt once, though one died"
        repeated = [index for tasks in sent[1:] for index in tasks]
        assert handed_in and repeated
        assert not handed_in & set(repeated)
        assert len(pool.alive) == 1


def test_an_update_goes_on_when_a_reader_hangs_inside_its_step(run):
    """The lock of a stopped process is freed by ending it, while the trainer waits."""
    batch, version = run.pool.run_batch(PROMPTS, SHORT), run.trainer.policy_version
    victim = rollout_pid(run, "rollout-1")
    worker = threading.Thread(target=swallow, args=(run.pool.run_batch, PROMPTS, LONG))
    worker.start()
    while not stopped_inside_a_step(victim):
        time.sleep(0.001)
    stats = run.trainer.step(batch, np.ones(len(batch), np.float32))
    assert stats["rollout/policy_version"] == version + 1
    worker.join(120)
    assert any("rollout-1" in str(loss) for loss in run.pool.members.losses)


def stopped_inside_a_step(pid: int) -> bool:
    """Stop the process; let it go on if it did not hold the weights' lock at that moment."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.002)
    held = any(
        line.split()[1] == "FLOCK" and int(line.split()[4]) == pid
        for line in Path("/proc/locks").read_text().splitlines()
        if line.split()[1] != "->"
    )
    if not held:
        os.kill(pid, signal.SIGCONT)
    return held


def test_without_restarts_the_others_go_on_and_the_last_one_is_named(folder):
    with start(folder, max_restarts=0) as run:
        expected = list(run.pool.run_batch(PROMPTS, SHORT))
        os.kill(rollout_pid(run, "rollout-0"), signal.SIGKILL)
        assert list(run.pool.run_batch(PROMPTS, SHORT)) == expected
        assert run.pool.alive == ["rollout-1"]
        os.kill(rollout_pid(run, "rollout-1"), signal.SIGKILL)
        with pytest.raises(ActorDied, match="rollout-1"):
            run.pool.run_batch(PROMPTS, SHORT)
        with pytest.raises(ActorDied, match=r"no rollout actor is left; .*rollout-1"):
            run.pool.run_batch(PROMPTS, SHORT)


def test_all_actors_at_once(folder):
    """The batch waits for those that are started again."""
    with start(folder) as run:
        expected = list(run.pool.run_batch(PROMPTS, SHORT))
        for name in list(run.pool.alive):
            os.kill(rollout_pid(run, name), signal.SIGKILL)
        assert list(run.pool.run_batch(PROMPTS, SHORT)) == expected


def take_too_much(tasks):
    bytearray(1 << 62)


def test_no_memory_in_an_actor_ends_the_batch_with_that_cause(folder):
    """F8: not repeated elsewhere, where it would be the same."""

    def without_memory(engine):
        engine.open_batch = take_too_much
        return engine

    with start(folder, actors=1) as run:

        def start_actor(name):
            attach = partial(attach_engine, run._weights, run._engine_config)
            kind, threads = run._room.rollout(RolloutActor, 0, 1)
            return kind.remote(lambda: without_memory(attach()), threads)

        run.start_actor = start_actor
        os.kill(rollout_pid(run, "rollout-0"), signal.SIGKILL)
        with pytest.raises(ActorOutOfMemory, match="rollout-0 ran out of memory"):
            run.pool.run_batch(PROMPTS, SHORT)


def test_an_actor_refuses_work_before_it_has_the_wanted_version(run, monkeypatch):
    """F7."""
    version = run.trainer.policy_version
    run.pool.members.min_version = version + 1
    monkeypatch.setattr(run.pool.members, "stale_timeout_s", 0.1)
    with pytest.raises(StaleWeights, match=f"version {version + 1} or later.*version {version}"):
        run.pool.run_batch(PROMPTS, SHORT)
    run.trainer.apply_weight_update(None, scale_norm)
    batch = run.pool.run_batch(PROMPTS, SHORT)
    assert {span.version for r in batch for span in r.version_spans} == {version + 1}


def die_half_way(model) -> None:
    model.model.norm.weight.mul_(3)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def step(run: Colocation, seed: int) -> None:
    batch = run.pool.run_batch(PROMPTS, SamplingParams(n=4, max_tokens=24, seed=seed))
    noise = np.random.default_rng(seed).standard_normal(len(batch)).astype(np.float32)
    stats = run.trainer.step(batch, noise)
    assert stats["sampling/sampling_logp_difference/max"] == 0


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory) -> bytes:
    """The weights after four steps without a fault."""
    out = tmp_path_factory.mktemp("undisturbed")
    with start(folder) as run:
        for seed in range(4):
            step(run, seed)
        run.trainer.save_checkpoint(str(out))
    return weights_of(out)


@pytest.mark.parametrize("moment", ["idle", "writing"])
def test_a_new_trainer_goes_on_from_the_checkpoint(folder, tmp_path, undisturbed, moment):
    """F3: the torn weights are served to nobody, the number is burnt, and the steps after the
    checkpoint, taken again, end in the same bits as without the death."""
    with start(folder) as run:
        step(run, 0)
        step(run, 1)
        assert run.trainer.save_checkpoint(str(tmp_path / "two")) == 2
        step(run, 2)
        before = run.verify_weights()["trainer"]
        if moment == "idle":
            os.kill(trainer_pid(run), signal.SIGKILL)
            with pytest.raises(TrainerLost, match="trainer died during 'get_stats'"):
                run.trainer.get_stats()
            burnt = 3  # committed, and gone back behind
        else:
            with pytest.raises(TrainerLost, match="trainer died during 'apply_weight_update'"):
                run.trainer.apply_weight_update(None, die_half_way)
            with pytest.raises(TornWeights, match="policy version 4"):
                run.pool.run_batch(PROMPTS, SHORT)
            burnt = 4
        version = run.restart_trainer(tmp_path / "two")
        assert version == burnt + 1
        echoes = run.verify_weights()
        assert {echo.memory for echo in echoes.values()} == {before.memory}, "a second copy"
        assert list(run.pool.run_batch(PROMPTS, SHORT)) == in_process(
            tmp_path / "two", policy_version=version
        )
        step(run, 2)
        step(run, 3)
        run.trainer.save_checkpoint(str(tmp_path / "found"))
    assert weights_of(tmp_path / "found") == undisturbed
    assert weights_of(tmp_path / "found") != weights_of(tmp_path / "two")


def test_a_hung_trainer_is_ended_and_cannot_come_back(run):
    """F2 for the trainer: nobody waits for it beyond its heartbeat, and it is fenced off."""
    old, version = trainer_pid(run), run.trainer.policy_version
    os.kill(old, signal.SIGSTOP)
    with pytest.raises(TrainerLost, match=r"trainer has not answered for .* 'step'"):
        step(run, 0)
    assert run.restart_trainer(None) == version + 1
    with pytest.raises(ProcessLookupError):
        os.kill(old, signal.SIGCONT)
    step(run, 0)


def test_a_new_trainer_does_not_wait_for_a_reader_that_hangs_in_its_step(run):
    """Two faults at once: the stopped actor holds the lock that the new trainer needs."""
    version = run.trainer.policy_version
    victim = rollout_pid(run, "rollout-1")
    worker = threading.Thread(target=swallow, args=(run.pool.run_batch, PROMPTS, LONG))
    worker.start()
    while not stopped_inside_a_step(victim):
        time.sleep(0.001)
    os.kill(trainer_pid(run), signal.SIGKILL)
    assert run.restart_trainer(None) == version + 1
    worker.join(120)
    assert any("rollout-1" in str(loss) for loss in run.pool.members.losses)
    wait_until_alive(run, ["rollout-0", "rollout-1"])
    step(run, 0)


def hang_half_way(model) -> None:
    model.model.norm.weight.mul_(3)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_new_actor_does_not_wait_for_a_trainer_that_hangs_in_its_update(folder, caplog):
    """Two faults at once: it must read weights to be admitted, and the stopped trainer holds their
    lock. Whoever admits it is the one who would notice."""
    with start(folder, start_timeout_s=30.0) as run:
        os.kill(rollout_pid(run, "rollout-0"), signal.SIGKILL)
        members = run.pool.members
        while "rollout-0" not in members._joining:
            members.check()
            time.sleep(0.05)
        assert ray.wait([members._joining["rollout-0"].description], timeout=60)[0]
        with pytest.raises(TrainerLost, match=r"trainer has not answered for"):
            run.trainer.apply_weight_update(None, hang_half_way)
        run.restart_trainer(None)
        wait_until_alive(run, ["rollout-0", "rollout-1"])
        assert "could not be started again" not in caplog.text
        step(run, 0)


def swallow(work, *arguments) -> None:
    """The batch that is under way may fail with its actors."""
    with suppress(RuntimeError):
        work(*arguments)


def test_all_processes_at_once(folder, tmp_path):
    """Nothing survives but the checkpoint: everything starts again from it."""
    with start(folder) as run:
        step(run, 0)
        run.trainer.save_checkpoint(str(tmp_path / "one"))
        pids = [trainer_pid(run), *(rollout_pid(run, name) for name in run.pool.alive)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerLost):
            run.trainer.get_stats()
        version = run.restart_trainer(tmp_path / "one")
        assert list(run.pool.run_batch(PROMPTS, SHORT)) == in_process(
            tmp_path / "one", policy_version=version
        )


def test_every_actor_echoes_the_receipt(run):
    """W13: version, tensors, memory, checksum; and a process that reads something else is found."""
    version = run.trainer.policy_version
    first = run.verify_weights()
    assert set(first) == {"trainer", "rollout-0", "rollout-1"}
    assert len(set(first.values())) == 1
    run.confirm_publication(version)
    with pytest.raises(WeightsDiffer, match=f"version {version + 1} was published, rollout-"):
        run.confirm_publication(version + 1)
    run.trainer.apply_weight_update(None, scale_norm)
    second = run.verify_weights()["rollout-1"]
    assert (second.version, second.tensors) == (version + 1, first["trainer"].tensors)
    assert second.checksum != first["trainer"].checksum
    assert run.verify_weights(checksum=False)["trainer"].checksum is None
