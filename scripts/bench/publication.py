"""What it costs to publish new weights, against their size.

    python -m scripts.bench.publication --sizes-mb 10,100,500,2000 --actors 2

For each size, with rollout readers in Ray actors that step through the gate all the while:
  word      a publication whose update changes nothing, while nobody reads
  undo      the same with an undo copy, made before the gate closes (`GateSettings.undo`)
  serving   as "word", while every actor is in a step most of the time: the wait for the boundary
  commit    as "serving", and every actor answers that it sees the new version
  ray       put, get and copy of all weights into each actor's own memory, as the alternative
            (as NumPy arrays, which the object store hands out without a copy)
A table goes to stdout and one JSON line last. Times are medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import ray
import torch
from torch import nn

from trainer_bridge.arena import ArenaHandle, ArenaLayout, WeightArena
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.publication import GateSettings, SharedGate

NUM_TENSORS = 16
MB = 1_000_000


class Weights(nn.Module):
    """Nothing but parameters, `num_bytes` of them."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        count = num_bytes // NUM_TENSORS // 4
        self.layers = nn.ParameterList([torch.empty(count) for _ in range(NUM_TENSORS)])


class RolloutReader:
    """A rollout actor's share in a publication: a thread that steps, and answers to calls."""

    def __init__(self, arena_handle: ArenaHandle, gate_handle: MemoryHandle, step_s: float) -> None:
        torch.set_num_threads(1)
        self._arena = WeightArena.attach(arena_handle)
        self._gate = SharedGate.attach(self._arena, gate_handle)
        self._step_s = step_s
        self._serving = threading.Event()
        self._steps = 0
        self._own: dict[str, np.ndarray] = {}
        threading.Thread(target=self._loop, daemon=True).start()

    def serve(self, on: bool) -> int:
        """Start or pause the steps; returns how many were done so far."""
        if on:
            self._serving.set()
        else:
            self._serving.clear()
        return self._steps

    def seen_version(self) -> int:
        with self._gate.read() as version:
            return version

    def gate_cost_us(self, count: int) -> float:
        """What one step pays for the gate."""
        began = time.perf_counter()
        for _ in range(count):
            with self._gate.read():
                pass
        return (time.perf_counter() - began) / count * 1e6

    def load(self, weights: dict[str, np.ndarray]) -> int:
        """The alternative: copy what Ray delivered into weights of this actor's own."""
        for name, array in weights.items():
            if name not in self._own:
                self._own[name] = np.empty_like(array)
            np.copyto(self._own[name], array)
        return sum(array.nbytes for array in self._own.values())

    def _loop(self) -> None:
        while self._serving.wait():
            with self._gate.read():
                time.sleep(self._step_s)
            self._steps += 1


def timed_ms(act: Callable[[], object], repeats: int, pause_s: float = 0.0) -> list[float]:
    """`pause_s` lets the readers get into a step again before each, as training would."""
    times = []
    for repeat in range(repeats):
        time.sleep(pause_s * (1 + repeat / repeats))
        began = time.perf_counter()
        act()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def median_ms(act: Callable[[], object], repeats: int, pause_s: float = 0.0) -> float:
    return statistics.median(timed_ms(act, repeats, pause_s))


def measure(size_mb: int, num_actors: int, step_s: float, repeats: int) -> dict[str, float]:
    with torch.device("meta"):
        module = Weights(size_mb * MB)
    arena = WeightArena.create(ArenaLayout.for_module(module))
    arena.bind(module, requires_grad=True)
    gate = SharedGate.create(arena, module, GateSettings(undo=False))
    gate.open()
    careful = SharedGate.attach(arena, gate.handle(), module, GateSettings(undo=True))
    actor_class = ray.remote(num_cpus=0, max_concurrency=2)(RolloutReader)
    actors = [actor_class.remote(arena.handle(), gate.handle(), step_s) for _ in range(num_actors)]
    gate_us = max(ray.get([actor.gate_cost_us.remote(5000) for actor in actors]))

    def publish() -> None:
        gate.write(None, lambda target: None)

    def publish_and_ask() -> None:
        publish()
        seen = ray.get([actor.seen_version.remote() for actor in actors])
        if set(seen) != {gate.version}:
            raise RuntimeError(f"published {gate.version}, the actors see {seen}")

    def send_through_ray() -> None:
        weights = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
        reference = ray.put(weights)
        ray.get([actor.load.remote(reference) for actor in actors])

    word_ms = median_ms(publish, 10 * repeats)
    undo_ms = median_ms(lambda: careful.write(None, lambda target: None), 5)
    careful.close()
    ray.get([actor.serve.remote(True) for actor in actors])
    serving_ms = timed_ms(publish, repeats, pause_s=3 * step_s)
    commit_ms = median_ms(publish_and_ask, repeats, pause_s=3 * step_s)
    receipt = gate.last_receipt
    steps = sum(ray.get([actor.serve.remote(False) for actor in actors]))
    if not steps or receipt is None:
        raise RuntimeError("no actor made a step: there was nothing to wait for")
    ray_ms = median_ms(send_through_ray, 3)
    total = arena.layout.total_bytes
    for actor in actors:
        ray.kill(actor)
    gate.close()
    arena.close()
    return {
        "size_mb": size_mb,
        "word_ms": round(word_ms, 4),
        "undo_ms": round(undo_ms, 3),
        "serving_ms": round(statistics.median(serving_ms), 3),
        "serving_p95_ms": round(statistics.quantiles(serving_ms, n=20)[-1], 3),
        "commit_ms": round(commit_ms, 3),
        "bytes_copied": receipt.bytes_copied,
        "ray_ms": round(ray_ms, 1),
        "ray_bytes_copied": total * (1 + num_actors),
        "gate_us_per_step": round(gate_us, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes-mb", default="10,100,500,2000", help="comma-separated")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a reader's step")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes_mb.split(",")]

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray leaves a token in the home folder
    torch.set_num_threads(1)
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 * max(sizes) * MB + 256 * MB,
    )
    rows = []
    print(
        f"{'MB':>6} {'word':>9} {'undo':>9} {'serving':>9} {'p95':>9} {'commit':>9} {'copied':>7}"
        f" {'ray':>10} {'ray copied':>11} {'gate/step':>10}"
    )
    try:
        for size in sizes:
            row = measure(size, options.actors, options.step_ms / 1e3, options.repeats)
            rows.append(row)
            print(
                f"{size:>6} {row['word_ms']:>6.3f} ms {row['undo_ms']:>6.1f} ms"
                f" {row['serving_ms']:>6.1f} ms {row['serving_p95_ms']:>6.1f} ms"
                f" {row['commit_ms']:>6.1f} ms {row['bytes_copied']:>5} B {row['ray_ms']:>7.0f} ms"
                f" {row['ray_bytes_copied'] / MB:>8.0f} MB {row['gate_us_per_step']:>7.1f} us",
                flush=True,
            )
    finally:
        ray.shutdown()
    print(
        json.dumps(
            {
                "bench": "publication",
                "actors": options.actors,
                "step_ms": options.step_ms,
                "torch": torch.__version__,
                "ray": ray.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
