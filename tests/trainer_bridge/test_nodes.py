"""Two nodes: a raylet each, a mirror of the weights on the one without the trainer."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
import ray

from rollout import SamplingParams
from rollout.remote import ActorTimeout
from tests.trainer_bridge.colocated import PARAMS, PROMPTS, in_process, scale_norm, start
from tests.trainer_bridge.second_node import SecondNode
from trainer_bridge import Colocation, Placement, TrainerLost

pytestmark = pytest.mark.usefixtures("ray_session")

TWO = Placement(nodes=2)
NAMES = ["rollout-0", "rollout-1"]


@pytest.fixture(scope="module")
def second(ray_session):
    node = SecondNode()
    yield node
    node.kill()


@pytest.fixture(scope="module")
def shared(folder, second):
    """One run for the tests that leave it whole: rollout-0 beside the trainer, rollout-1 not."""
    with start(folder, placement=TWO, heartbeat_timeout_s=3.0) as run:
        yield run


@pytest.fixture
def run(shared):
    wait_until_alive(shared)
    shared.pool.members.losses.clear()
    return shared


def wait_until_alive(run: Colocation, names=tuple(NAMES)) -> None:
    deadline = time.monotonic() + 60
    while sorted(run.pool.alive) != list(names):
        assert time.monotonic() < deadline, run.pool.alive
        run.pool.run_batch([[5]], max_tokens=1)  # as a run does, again and again
        time.sleep(0.1)


def step(run: Colocation, seed: int) -> None:
    batch = run.pool.run_batch(PROMPTS, SamplingParams(n=4, max_tokens=24, seed=seed))
    noise = np.random.default_rng(seed).standard_normal(len(batch)).astype(np.float32)
    stats = run.trainer.step(batch, noise)
    assert stats["sampling/sampling_logp_difference/max"] == 0


def mirror_pid(run: Colocation) -> int:
    return run._mirrors.ask("get_stats", 60.0)["mirror-1"]["pid"]


def mirror(run: Colocation):
    return run._mirrors.of_node(1)


def ray_node(handle) -> str:
    """Where Ray runs that process."""
    here = handle.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
    return ray.get(here)


def process_id(run: Colocation, name: str) -> int:
    return ray.get(run.pool.members.serving[name].handle.__ray_call__.remote(lambda _: os.getpid()))


def sigterm_handler(actor):
    return ray.get(actor.__ray_call__.remote(lambda _: signal.getsignal(signal.SIGTERM)))


def versions(batch) -> set[int]:
    return {span.version for rollout in batch for span in rollout.version_spans}


def generated(run: Colocation) -> dict[str, int]:
    return {stats["actor"]: stats["generated_tokens"] for stats in run.pool.get_stats()}


def test_every_process_reads_the_memory_of_its_node(run):
    nodes = {name: ray_node(actor.handle) for name, actor in run.pool.members.serving.items()}
    assert nodes["rollout-0"] == ray.get_runtime_context().get_node_id() != nodes["rollout-1"]
    assert ray_node(mirror(run)) == nodes["rollout-1"]
    echoes = run.verify_weights()
    assert echoes.keys() == {"trainer", "mirror-1", "rollout-0", "rollout-1"}
    assert echoes["trainer"] == echoes["rollout-0"]
    assert echoes["mirror-1"] == echoes["rollout-1"]
    assert echoes["trainer"].memory != echoes["mirror-1"].memory
    assert echoes["trainer"].checksum == echoes["mirror-1"].checksum


def test_sigterm_ends_every_kind_of_actor_without_a_word(run):
    """Ray ends actors by it; with a handler in Python some of them print a traceback first."""
    actors = [mirror(run), *(member.handle for member in run.pool.members.serving.values())]
    for actor in actors:
        assert sigterm_handler(actor) is signal.SIG_DFL
    assert sigterm_handler(run.trainer._actor.handle) is signal.SIG_DFL


def test_rollouts_of_two_nodes_are_those_of_one_process(run, tmp_path):
    """After a training step, to the bit, log-probs and versions too; and the trainer agrees."""
    step(run, 0)
    version = run.trainer.save_checkpoint(tmp_path / "after")
    before = generated(run)
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    assert all(tokens > before[name] for name, tokens in generated(run).items())
    alone = in_process(tmp_path / "after", version)
    assert [(r.token_ids, r.logprobs) for r in batch] == [(r.token_ids, r.logprobs) for r in alone]
    assert versions(batch) == {version}
    step(run, 1)
    run.confirm_publication(version + 1)


def test_no_token_is_sampled_under_a_version_that_a_node_does_not_have_yet(run):
    """The mirror lags: what its node would sample waits for it."""
    stopped = mirror_pid(run)
    old = run.trainer.policy_version
    os.kill(stopped, signal.SIGSTOP)
    try:
        run.trainer.apply_weight_update(None, scale_norm)
        threading.Timer(1.0, os.kill, (stopped, signal.SIGCONT)).start()
        before = generated(run)
        batch = run.pool.run_batch(PROMPTS, PARAMS)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert versions(batch) == {old + 1}
    assert all(tokens > before[name] for name, tokens in generated(run).items())
    assert mirror_pid(run) == stopped
    assert not run.pool.members.losses


def test_without_a_minimum_version_the_lag_would_be_seen(run):
    """The control of the test above; what is sampled says truly what it is."""
    stopped = mirror_pid(run)
    old = run.trainer.policy_version
    os.kill(stopped, signal.SIGSTOP)
    try:
        run.trainer.apply_weight_update(None, scale_norm)
        run.pool.members.min_version = 0
        batch = run.pool.run_batch(PROMPTS, PARAMS)
    finally:
        os.kill(stopped, signal.SIGCONT)
        run.pool.members.min_version = run.trainer.policy_version
    assert versions(batch) == {old, old + 1}


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_mirror_is_replaced_with_those_that_read_it(run, blow):
    expected = list(run.pool.run_batch(PROMPTS, PARAMS))
    assert versions(expected) == {run.trainer.policy_version}
    victim = mirror_pid(run)
    os.kill(victim, blow)
    run.trainer.apply_weight_update(None, partial(scale_norm, factor=2.0))
    run.trainer.apply_weight_update(None, partial(scale_norm, factor=0.5))
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    assert [r.token_ids for r in batch] == [r.token_ids for r in expected]
    assert versions(batch) == {run.trainer.policy_version}
    (loss,) = run.pool.members.losses
    assert "rollout-1 lost its weights: mirror-1" in str(loss)
    wait_until_alive(run)
    assert mirror_pid(run) != victim
    assert list(run.pool.run_batch(PROMPTS, PARAMS)) == list(batch)
    run.verify_weights()


def die_half_way(actor) -> None:
    """From now on that mirror dies in the middle of taking in weights."""
    fill = actor._arena.fill

    def half(pieces) -> None:
        fill([piece * 0 for piece in pieces])
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    actor._arena.fill = half


def test_half_written_mirrors_are_served_to_nobody(run):
    ray.get(mirror(run).__ray_call__.remote(die_half_way))
    run.trainer.apply_weight_update(None, scale_norm)
    version = run.trainer.policy_version
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    assert versions(batch) == {version}
    assert any("rollout-1" in str(loss) for loss in run.pool.members.losses)
    wait_until_alive(run)
    assert list(run.pool.run_batch(PROMPTS, PARAMS)) == list(batch)
    run.confirm_publication(version)


def test_a_new_trainer_is_followed(run, tmp_path):
    """F3 over nodes: the mirror stays, and takes in what the new trainer publishes."""
    run.trainer.save_checkpoint(tmp_path / "kept")
    expected = [r.token_ids for r in run.pool.run_batch(PROMPTS, PARAMS)]
    step(run, 3)
    kept = mirror_pid(run)
    os.kill(run.trainer.get_stats()["pid"], signal.SIGKILL)
    with pytest.raises(TrainerLost):
        run.trainer.get_stats()
    version = run.restart_trainer(tmp_path / "kept")
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    assert [r.token_ids for r in batch] == expected
    assert versions(batch) == {version}
    assert mirror_pid(run) == kept
    run.verify_weights()


@pytest.mark.slow
def test_a_lost_node_costs_nothing_but_time(run, second):
    """Its rollouts are computed by the others; when there is a node again, it joins the run."""
    params = SamplingParams(n=8, max_tokens=150, seed=1, ignore_eos=True)
    expected = list(run.pool.run_batch(PROMPTS, params))
    os.kill(process_id(run, "rollout-1"), signal.SIGSTOP)  # it will not have finished by then
    killer = threading.Timer(0.3, second.kill)
    killer.start()
    assert list(run.pool.run_batch(PROMPTS, params)) == expected
    killer.join()
    assert run.pool.alive == ["rollout-0"]
    step(run, 4)
    another = SecondNode()
    try:
        wait_until_alive(run)
        step(run, 5)
        assert len({echo.memory for echo in run.verify_weights().values()}) == 2
    finally:
        another.kill()


@pytest.mark.slow
def test_gpus_decide_the_node(folder):
    """Logical ones: the trainer goes where they are, and Ray counts the fractions."""
    second = SecondNode(num_gpus=1)
    try:
        placement = Placement(trainer_gpus=0.5, rollout_gpus=0.25)
        with start(folder, placement=placement) as run:
            handles = [actor.handle for actor in run.pool.members.serving.values()]
            assert {ray_node(handle) for handle in handles} == {
                node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU")
            }
            assert ray.available_resources().get("GPU", 0) == 0
            step(run, 0)
            with pytest.raises(ActorTimeout, match=r"'GPU': 0.5.*2 CPUs, 0 GPUs"):
                start(
                    folder, 1, placement=Placement(rollout_gpus=0.5), start_timeout_s=1
                ).__enter__()
    finally:
        second.kill()


def test_what_does_not_fit_is_refused_in_time(folder):
    """And not waited for without a word."""
    wanted = Placement(nodes=5)
    with pytest.raises(ActorTimeout, match=r"no 5 node\(s\).*within 1 s.*2 CPUs, 0 GPUs"):
        start(folder, actors=5, placement=wanted, start_timeout_s=1).__enter__()
    with pytest.raises(ValueError, match="rollout_actors must be at least 2, one for each node"):
        start(folder, actors=1, placement=TWO)
    for wrong in ({"nodes": 0}, {"trainer_gpus": -1}, {"rollout_gpus": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Placement(**wrong)
