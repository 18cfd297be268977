"""End to end over real Ray actors: shared weights, publication, faults, the end of a run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch

from rollout import (
    EngineConfig,
    Exactness,
    ExactnessRefused,
    SamplingParams,
    load_pretrained,
)
from rollout.policy import PoisonedWeights, ReadOnlyWeights
from tests.processes import actors_of, title
from tests.trainer_bridge.colocated import PARAMS, PROMPTS, in_process, scale_norm, start
from trainer_bridge import Colocation, TrainerConfig, score
from trainer_bridge.agreement import check_same_bits
from trainer_bridge.attach import attach_engine

pytestmark = pytest.mark.usefixtures("ray_session")

@pytest.fixture(scope="module")
def run(folder, ray_session):
    with start(folder) as colocation:
        yield colocation


def advantages(batch) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(len(batch)).astype(np.float32)


def scale_values(model) -> None:
    """A change that old KV does not have."""
    model.model.layers[0].self_attn.v_proj.weight.mul_(0.7)


def test_processes_have_shown_each_other_the_same_bits(run):
    assert set(run.exactness) == {"trainer", "rollout-0", "rollout-1"}
    assert all(e.on for e in run.exactness.values())
    other = dataclasses.replace(run.exactness["rollout-1"].probe, fingerprint="other")
    with pytest.raises(ExactnessRefused, match=r"\{trainer, rollout-0\} and \{rollout-1\}"):
        check_same_bits(run.exactness | {"rollout-1": Exactness(True, "", other)})


def test_the_trainer_computes_with_what_the_actors_were_given(folder):
    """Kernels of one's choice are as exact: both sides get them, or the first step tells."""
    engine = EngineConfig(
        max_batch_size=8, num_threads=1, attention_backend="tiled", operators="portable"
    )
    trainer = TrainerConfig(num_threads=1)
    with Colocation(folder, rollout_actors=1, trainer=trainer, engine=engine) as run:
        batch = run.pool.run_batch(PROMPTS, PARAMS)
        stats = run.trainer.step(batch, advantages(batch))
    assert stats["sampling/sampling_logp_difference/max"] == 0
    assert list(batch) != in_process(folder)  # other kernels, other bits


def test_a_conversation_goes_on_where_its_kv_is(run):
    """All full blocks of the turns before are found again. The control: with the sessions swapped
    each prompt goes to the other actor, and gets the same tokens without them."""
    prompts = [[11 + i] * 40 for i in range(6)]
    params = SamplingParams(max_tokens=8, seed=2)

    def hits() -> int:
        return sum(stats["prefix_hit_tokens"] for stats in run.pool.get_stats())

    def turn(contexts, session_ids) -> tuple[list, int]:
        before = hits()
        batch = run.pool.run_batch(contexts, params, session_ids=session_ids)
        return list(batch), hits() - before

    first, _ = turn(prompts, range(6))
    contexts = [[*r.prompt_token_ids, *r.token_ids, 7, 7] for r in first]
    found = [(len(r.prompt_token_ids + r.token_ids) - 1) // 16 * 16 for r in first]
    moved, missed = turn(contexts, range(1, 7))
    assert missed == 0
    run.pool.release()  # forgets all of it
    run.pool.restore()
    again, _ = turn(prompts, range(6))
    stayed, hit = turn(contexts, range(6))
    assert again == first and stayed == moved
    assert hit == sum(found) > 0
    with pytest.raises(ValueError, match="2 session_ids for 6 prompts"):
        run.pool.run_batch(prompts, params, session_ids=[0, 1])


def test_each_prompt_is_told_of_once(run):
    """With all its rollouts, before the call returns; what the callback raises ends the call."""
    told = {}

    def take(place, rollouts):
        assert place not in told
        told[place] = rollouts

    batch = run.pool.run_batch(PROMPTS, PARAMS, on_finished=take)
    assert [rollout for place in range(len(PROMPTS)) for rollout in told[place]] == list(batch)

    def refuse(place, rollouts):
        raise KeyError("no")

    with pytest.raises(KeyError):
        run.pool.run_batch(PROMPTS, PARAMS, on_finished=refuse)
    assert list(run.pool.run_batch(PROMPTS, PARAMS)) == list(batch)


def test_a_step_over_actors(folder, run, tmp_path):
    """L5, L6, W1, W6: the whole circle, each stage against an engine without actors."""
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    assert list(batch) == in_process(folder)

    stats = run.trainer.step(batch, advantages(batch), algorithm="grpo")
    assert stats["sampling/sampling_logp_difference/max"] == 0
    assert stats["sampling/importance_sampling_ratio/max"] == 1
    assert stats["sampling/importance_sampling_ratio/min"] == 1
    weights_bytes = run.trainer.get_stats()["arena_bytes"]
    assert stats["publication/bytes_copied"] == weights_bytes  # the undo copy; nothing is sent
    assert run.trainer.policy_version == 1

    after = run.pool.run_batch(PROMPTS, PARAMS)
    assert run.trainer.save_checkpoint(str(tmp_path / "after")) == 1
    assert list(after) == in_process(tmp_path / "after", policy_version=1)
    assert after.logprobs.tolist() != batch.logprobs.tolist()
    model, _ = load_pretrained(tmp_path / "after")
    scored = torch.cat(score(model, after)).detach().numpy()
    assert np.array_equal(scored, after.logprobs)

    assert run.trainer.apply_weight_update(None, scale_norm) == "scaled"
    assert {s.version for r in run.pool.run_batch(PROMPTS, PARAMS) for s in r.version_spans} == {2}
    assert {stats["policy_version"] for stats in run.pool.get_stats()} == {2}


def test_the_promise_holds_step_after_step(run, tmp_path):
    """L5, L6, W6: after every step the actors' rollouts are those of the checkpoint saved then."""
    start_version = run.trainer.policy_version
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    for step in range(1, 4):
        stats = run.trainer.step(batch, advantages(batch), algorithm="rloo")
        assert stats["sampling/sampling_logp_difference/max"] == 0
        version = run.trainer.save_checkpoint(str(tmp_path / f"{step}"))
        assert version == run.trainer.policy_version == start_version + step
        batch = run.pool.run_batch(PROMPTS, PARAMS)
        assert list(batch) == in_process(tmp_path / f"{step}", policy_version=version)
    model, _ = load_pretrained(tmp_path / "3")
    for temperature, n in ((0.7, 3), (1.3, 1)):
        params = SamplingParams(n=n, max_tokens=9, temperature=temperature, seed=2)
        found = run.pool.run_batch(PROMPTS, params)
        scored = torch.cat(score(model, found, micro_batch_tokens=60)).detach().numpy()
        assert np.array_equal(scored, found.logprobs)
    stale, _ = load_pretrained(tmp_path / "2")  # the control: one step behind
    assert not np.array_equal(torch.cat(score(stale, found)).detach().numpy(), found.logprobs)


def test_an_update_waits_for_the_rollouts_it_is_told_to_wait_for(run):
    """Overlap: sampled beside the gradient, all under the version before; the control does not
    wait, and the same rollouts meet the new weights on the way."""
    long = SamplingParams(n=8, max_tokens=200, seed=3, ignore_eos=True)
    batch = run.pool.run_batch(PROMPTS, PARAMS)
    live = run.trainer.policy_version
    found = []
    run.trainer.step(
        batch,
        advantages(batch),
        wait_for_rollouts=lambda: found.append(run.pool.run_batch(PROMPTS, long)),
    )
    assert {span.version for r in found[0] for span in r.version_spans} == {live}
    assert run.trainer.policy_version == live + 1

    worker = threading.Thread(target=lambda: found.append(run.pool.run_batch(PROMPTS, long)))
    worker.start()
    while not any(s["requests_running"] for s in run.pool.get_stats()):
        time.sleep(0.005)
    run.trainer.step(batch, advantages(batch))
    worker.join()
    assert {span.version for r in found[1] for span in r.version_spans} == {live + 1, live + 2}
    # Nothing to wait for, and said before the trainer came to it: no lock-up.
    run.trainer.step(batch, advantages(batch), wait_for_rollouts=lambda: None)
    assert run.trainer.policy_version == live + 3


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_rollouts_in_flight_meet_an_update(folder, mode):
    """W6: spans say which version gave which token. "recompute" goes on as if the prompt had been
    computed under the new weights; "keep" does not, and is never found as a prefix."""
    engine = EngineConfig(max_batch_size=8, num_threads=1, in_flight=mode)
    with Colocation(
        folder, rollout_actors=1, trainer=TrainerConfig(num_threads=1), engine=engine
    ) as run:
        long = SamplingParams(n=48, max_tokens=200, seed=3, ignore_eos=True)
        found: list = []
        worker = threading.Thread(target=lambda: found.extend(run.pool.run_batch([[5, 6]], long)))
        worker.start()
        while not any(s["generated_tokens"] > 50 for s in run.pool.get_stats()):
            time.sleep(0.005)
        run.trainer.apply_weight_update(None, scale_values)
        worker.join()
        model, _ = load_pretrained(folder)
        with torch.no_grad():
            scale_values(model)
        crossing = [r for r in found if len(r.version_spans) > 1]
        assert crossing, "no rollout met the update"
        for rollout, scored in zip(crossing, score(model, crossing), strict=True):
            first, second = rollout.version_spans
            assert (first.version, second.version) == (0, 1)
            new = slice(second.start, second.end)
            same = np.array_equal(scored.detach().numpy()[new], np.float32(rollout.logprobs[new]))
            assert same == (mode == "recompute")
        again = run.pool.run_batch([[5, 6]], long)
        assert np.array_equal(torch.cat(score(model, again)).detach().numpy(), again.logprobs)


def test_rollouts_in_flight_can_be_aborted(run):
    """The batch returns at once with the tokens so far, and the next one is whole."""
    long = SamplingParams(n=8, max_tokens=200, seed=3, ignore_eos=True)
    found: list = []
    worker = threading.Thread(target=lambda: found.extend(run.pool.run_batch(PROMPTS, long)))
    worker.start()
    while not any(s["requests_running"] for s in run.pool.get_stats()):
        time.sleep(0.005)
    run.pool.abort()
    worker.join(30)
    assert len(found) == 8 * len(PROMPTS)
    assert {r.finish_reason for r in found} <= {"aborted", "length"}
    assert "aborted" in {r.finish_reason for r in found}
    assert {r.finish_reason for r in run.pool.run_batch(PROMPTS, long)} == {"length"}


class Intruder:
    """A process with all that a rollout actor has, which tries to write."""

    def __init__(self, weights) -> None:
        self.engine = attach_engine(weights, EngineConfig(num_threads=1))

    def publish(self) -> int:
        return self.engine.apply_weight_update(None, self.scale)

    def scale(self) -> None:
        with torch.no_grad():
            self.engine.model.model.norm.weight.mul_(2)


def test_a_rollout_process_cannot_write_the_weights(run):
    """The gate refuses it; past the gate the page table does, and only that process ends."""
    trainer = run.trainer._actor.handle
    before = run.trainer.weights_echo(checksum=True)
    expected = run.pool.run_batch(PROMPTS, PARAMS)
    intruder = ray.remote(Intruder).options(num_cpus=0).remote(ray.get(trainer.weights.remote()))
    with pytest.raises(ReadOnlyWeights):
        ray.get(intruder.publish.remote(), timeout=60)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(intruder.scale.remote(), timeout=60)
    assert run.trainer.weights_echo(checksum=True) == before
    assert list(run.pool.run_batch(PROMPTS, PARAMS)) == list(expected)
    assert run.trainer.apply_weight_update(None, scale_norm) == "scaled"  # its lock went with it
    assert run.trainer.policy_version == before.version + 1


def test_one_actor_gives_the_same(folder):
    """L5: the number of actors changes no bit."""
    with start(folder, actors=1) as alone:
        assert list(alone.pool.run_batch(PROMPTS, PARAMS)) == in_process(folder)


def test_a_bad_prompt_fails_alone(run):
    """S14, R6: over the wire too, ids beyond int32 included."""
    good = run.pool.run_batch([[5, 6, 7], [8]], PARAMS)
    mixed = run.pool.run_batch([[5, 6, 7], [2**40], [8], []], PARAMS)
    assert [r.error_reason for r in mixed][::4] == [
        None, "token_out_of_vocabulary", None, "prompt_empty",
    ]
    assert mixed.select([*range(4), *range(8, 12)]).token_ids.tolist() == good.token_ids.tolist()


def test_stats_are_answered_while_a_batch_runs(run):
    long = SamplingParams(n=8, max_tokens=100, seed=1, ignore_eos=True)
    worker = threading.Thread(target=run.pool.run_batch, args=(PROMPTS, long))
    worker.start()
    seen = 0
    while worker.is_alive():
        seen = max(seen, sum(s["requests_running"] for s in run.pool.get_stats()))
    worker.join()
    assert seen > 0


def shared_memory(pids) -> set[int]:
    """Inodes of our memfds that these processes hold; a process that is gone holds none."""
    found = set()
    for pid in pids:
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if "memfd:lockstep" in os.readlink(entry.path):
                    found.add(os.stat(entry.path).st_ino)
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:lockstep" in line:
                    found.add(int(line.split()[4]))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def break_down(model) -> None:
    model.model.norm.weight.mul_(3)
    raise ArithmeticError("half-way")


def test_an_update_that_breaks_down_leaves_the_old_weights(folder):
    """W3: the undo copy, kept while there is room; the number is burnt."""
    with start(folder, actors=1) as colocation:
        before = list(colocation.pool.run_batch(PROMPTS, PARAMS))
        with pytest.raises(ArithmeticError, match="half-way"):
            colocation.trainer.apply_weight_update(None, break_down)
        assert list(colocation.pool.run_batch(PROMPTS, PARAMS)) == before
        colocation.trainer.apply_weight_update(None, scale_norm)
        assert colocation.trainer.policy_version == 2


def test_nothing_is_left_behind(folder, tmp_path):
    """F4 (orderly part), W3: not even after an update that broke down and poisoned the weights."""
    with start(folder, undo=False) as colocation:
        pids = [colocation.trainer.get_stats()["pid"]]
        actors = colocation.pool.members.serving.values()
        pids += [ray.get(actor.handle.describe.remote())["pid"] for actor in actors]
        assert len(set(pids)) == 3 and all(map(psutil.pid_exists, pids))
        memory = colocation.memory()
        assert memory.keys() == {"trainer", "rollout-0", "rollout-1"}
        assert all(uss > 0 for uss in memory.values())
        shared = shared_memory(pids)
        assert len(shared) == 2 == len(shared_memory(pids[:1]))  # weights and control page
        with pytest.raises(ArithmeticError, match="half-way"):
            colocation.trainer.apply_weight_update(None, break_down)
        with pytest.raises(PoisonedWeights, match="1"):
            colocation.pool.run_batch(PROMPTS, PARAMS)
        with pytest.raises(PoisonedWeights, match="1"):
            colocation.trainer.save_checkpoint(str(tmp_path / "half"))
        assert not (tmp_path / "half").exists()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
    assert not shared & shared_memory(psutil.pids())


def actors_alive() -> list[str]:
    """Actor processes of this session's Ray."""
    return [title(process) for process in actors_of()]


def test_wrong_folders_fail_before_anything_starts(tmp_path):
    """F6: one sentence."""
    before = sorted(actors_alive())
    with pytest.raises(RuntimeError, match=r"config\.json") as error:
        Colocation(tmp_path / "nowhere")
    assert "nowhere" in str(error.value) and "\n" not in str(error.value)
    assert sorted(actors_alive()) == before
    with pytest.raises(ValueError, match="rollout_actors"):
        Colocation(tmp_path, rollout_actors=0)


def test_an_error_in_the_trainer_comes_through(run):
    with pytest.raises(ValueError, match="shape"):
        batch = run.pool.run_batch([[5]], SamplingParams(max_tokens=2))
        run.trainer.step(batch, np.zeros(3, np.float32), algorithm="grpo")
    with pytest.raises(TypeError, match="callable"):
        run.trainer.apply_weight_update(None, "no function")


def test_a_broken_checkpoint_names_the_cause_and_leaves_no_actor(folder, tmp_path):
    """F6: the weights are found to be broken in the trainer; the driver is told, in a sentence."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    before = sorted(actors_alive())
    with pytest.raises(RuntimeError) as error, start(broken):
        pass
    message = str(error.value)
    assert "model.safetensors" in message and "\n" not in message, message
    deadline = time.monotonic() + 20
    while sorted(actors_alive()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sorted(actors_alive()) == before
