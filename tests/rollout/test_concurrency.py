"""Batches, tasks and administration from several threads, with steps and callbacks that fail.

Whatever happens to the engine around it, a sample that ends by itself is bit for bit what a quiet
engine gives; every task has one last event; nothing is held afterwards.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from rollout import EngineReleased, Rollout, RolloutEngine, SamplingParams, TaskEvent
from tests.folders import word_tokenizer
from tests.models import tiny_model

CONTEXT = 90
OPERATIONS = 40  # of each thread


class InjectedError(MemoryError):
    """What the forward raises now and then."""


def random_prompt(rng: random.Random) -> list[int]:
    """Beginnings are often shared."""
    head = [rng.randrange(2, 6)] * rng.choice([3, 8, 16, 17])
    return head + [rng.randrange(2, 90) for _ in range(rng.randint(1, 20))]


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.2 else off

    return SamplingParams(
        n=rng.choice([1, 1, 2, 4]),
        max_tokens=rng.randint(3, 25),
        seed=rng.randrange(3),
        temperature=rng.choice([0, 0.7, 1, 2.0]),
        ignore_eos=rng.random() < 0.5,
        stop=maybe(("w5 ", "w1"), ()),
        logprobs=maybe(2, None),
        prompt_logprobs=maybe(1, None),
        repetition_penalty=maybe(1.3, 1.0),
        min_tokens=maybe(3, 0),
        top_p=maybe(0.8, 1.0),
    )


class Scene:
    """One engine under fire, and what came of it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.model = tiny_model()
        self.engine = RolloutEngine(
            self.model, word_tokenizer(), num_kv_blocks=14, block_size=8, max_batch_size=4,
            max_num_batched_tokens=24, max_seq_len=CONTEXT,
        )
        self.fails = 0.0  # how often a forward raises
        self.results: list[tuple[list[int], SamplingParams, Rollout]] = []
        self.tasks: list[dict[int, list[int]]] = []
        self.finished = Counter[int]()
        self.done = Counter[str]()
        self.problems: list[BaseException] = []

    def keep(self, prompt: list[int], params: SamplingParams, r: Rollout) -> None:
        ends = [0, *(span.end for span in r.version_spans)]
        assert [span.start for span in r.version_spans] == ends[:-1]
        assert ends[-1] == len(r.token_ids) == len(r.logprobs) == len(r.sampling_logprobs)
        self.results.append((prompt, params, r))

    def batch(self, rng: random.Random) -> None:
        prompts = [random_prompt(rng) for _ in range(rng.randint(1, 3))]
        params = [random_params(rng) for _ in prompts]
        found = iter(self.engine.run_batch(prompts, params, return_details=True))
        for prompt, p in zip(prompts, params, strict=True):
            for _ in range(p.n):
                self.keep(prompt, p, next(found))
        self.done["batch"] += 1

    def task(self, rng: random.Random) -> None:
        prompt, params = random_prompt(rng), random_params(rng)
        number, raises_at = len(self.tasks), rng.choice([0, 0, 0, 2])
        tokens: dict[int, list[int]] = defaultdict(list)
        self.tasks.append(tokens)

        def told(event: TaskEvent) -> None:
            if self.finished[number]:
                self.problems.append(AssertionError("an event after the last"))
            self.finished[number] += event.finished
            tokens[event.sample_index] += event.token_ids
            if event.rollout is not None:
                assert tokens[event.sample_index] == event.rollout.token_ids
                self.keep(prompt, params, event.rollout)
            elif raises_at and len(tokens[event.sample_index]) == raises_at:
                raise OSError("the user's own")

        try:
            task = self.engine.add_task(prompt, params, callback=told)
        except EngineReleased:
            self.finished[number] = 1  # there is no such task
            raise
        self.done["task"] += 1
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
            self.engine.cancel_task(task)
        time.sleep(rng.random() * 0.03)

    def administer(self, rng: random.Random) -> None:
        engine = self.engine
        what = rng.choice(["update", "update", "pause", "release", "restart", "fail"])
        if what == "update":
            mode = rng.choice(["refuse", "drain", "abort", "recompute", "keep"])
            engine.apply_weight_update(None, lambda: None, in_flight=mode)
        elif what == "pause":
            engine.pause()
            time.sleep(0.01)
            engine.resume()
        elif what == "release":
            engine.release(in_flight=rng.choice(["recompute", "abort", "refuse"]))
            time.sleep(0.005)
            engine.restore()
        elif what == "restart":
            engine.stop(drain=rng.random() < 0.3)
            engine.start()
        else:
            self.fails = 0.2
            time.sleep(0.02)
            self.fails = 0.0
        engine.get_stats()
        self.done[what] += 1
        time.sleep(rng.random() * 0.05)

    def thread(self, number: int, act: Callable[[random.Random], None]) -> threading.Thread:
        def run() -> None:
            rng = random.Random(self.seed * 100 + number)
            for _ in range(OPERATIONS):
                try:
                    act(rng)
                except (EngineReleased, InjectedError) as error:
                    self.done[type(error).__name__] += 1
                except RuntimeError as error:
                    if not str(error).startswith("cannot "):
                        self.problems.append(error)
                    self.done["refused"] += 1
                except BaseException as error:
                    self.problems.append(error)

        return threading.Thread(target=run)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_and_no_bit_changes(seed, monkeypatch):
    """S1, S8, S10, S11, S13, L5, K21, W11."""
    scene = Scene(seed)
    engine, quiet = scene.engine, RolloutEngine(scene.model, word_tokenizer(), max_seq_len=CONTEXT)
    forward, rng = type(scene.model).forward, random.Random(seed)

    def failing(self, *arguments):
        if rng.random() < scene.fails:
            raise InjectedError
        return forward(self, *arguments)

    monkeypatch.setattr(type(scene.model), "forward", failing)
    engine.start()
    acts = (scene.batch, scene.batch, scene.task, scene.task, scene.administer)
    threads = [scene.thread(number, act) for number, act in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a lock-up"
    assert engine.stop(drain=True)
    engine.check_integrity()
    stats = engine.get_stats()
    assert (stats["requests_waiting"], stats["requests_running"]) == (0, 0)
    assert stats["kv_blocks_used"] == 0
    assert not scene.problems
    assert [scene.finished[number] for number in range(len(scene.tasks))] == [1] * len(scene.tasks)
    assert stats["preemptions"] > 0 and scene.done["batch"] > 10 and scene.done["task"] > 20

    compared = 0
    whole = [x for x in scene.results if x[2].finish_reason in ("stop", "length")]
    for prompt, params, r in whole[:: max(1, len(whole) // 60)]:
        again = quiet.run_batch([prompt], params, return_details=True)
        same = [q for q in again if q.sample_index == r.sample_index]
        for q in same:  # none for a prompt that its batch had twice
            assert (q.token_ids, q.logprobs, q.sampling_logprobs) == (
                r.token_ids, r.logprobs, r.sampling_logprobs,
            )
            assert (q.finish_reason, q.stop_reason, q.text) == (
                r.finish_reason, r.stop_reason, r.text,
            )
            assert (q.top_logprobs, q.prompt_logprobs) == (r.top_logprobs, r.prompt_logprobs)
            compared += 1
    assert compared > 30
