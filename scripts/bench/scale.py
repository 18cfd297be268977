"""How far one step of this design scales: a simulation from measured costs, for 1 to 256 GPUs.

    python -m scripts.bench.scale [--gpus 1,2,4,…,256] [--costs costs.json] [--overlap]
    python -m scripts.bench.scale --measure mid > costs.json      # the costs of this machine

A step samples a fixed number of rollouts, so more GPUs mean fewer of them each (strong scaling).
The assumptions, all of them:

- One trainer process; it computes on one GPU of the first node, and its time does not depend on
  how many there are. A rollout actor on every GPU. While the trainer computes the actors wait, or
  with `--overlap` sample the next step's rollouts on the other GPUs.
- An engine's step takes `step_s + sequence_s · b` with b sequences running, each of which gets a
  token; the prompt of a group is computed once, at `prefill_s` per token. At most `max_batch` run.
- A rollout's length is drawn from a lognormal distribution of a mean and a sigma, cut at a longest
  one. Groups go out whole, dealt to actors by how many they have, without knowing their lengths.
- A step ends with its longest actor: the tail. Nothing is taken from a busy actor to an idle one.
- Publishing takes `publish_s`, and where there is a second node `mirror_s_per_gb` for the weights;
  all nodes take them at once, each actor of them waits for its own node's.
- The update takes `update_s` per token of the batch. Rewards and advantages take nothing.

Of each number of GPUs: seconds by phase, the share of the actors' time in which they wait for the
longest, how many times as fast as one GPU, that over their number, and what costs the most.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout import RolloutBatch, RolloutEngine, SamplingParams
from rollout.model import Decoder
from rollout.model.checkpoint import load_weights
from scripts.bench.peers.model_files import DEFAULT_CACHE, model_files
from trainer_bridge import TrainerConfig
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.learner import Learner
from trainer_bridge.publication import GateSettings, SharedGate

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, of one process. The defaults stand for a 7 B model in bf16 on a GPU of 80 GB, by
    its bandwidth and arithmetic: they are no measurement, and `--costs` puts one in their place."""

    step_s: float = 8e-3
    sequence_s: float = 6e-5
    prefill_s: float = 4e-5
    update_s: float = 1.2e-4
    publish_s: float = 1e-4
    mirror_s_per_gb: float = 0.1
    weights_gb: float = 15.0
    max_batch: int = 256


@dataclass(frozen=True, slots=True)
class Job:
    """One step's work. Lengths in tokens."""

    groups: int = 128
    samples: int = 16
    prompt: int = 512
    mean: float = 1024.0
    sigma: float = 0.8
    longest: int = 8192
    gpus_per_node: int = 8

    def lengths(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Of each rollout `[groups, samples]`; before the cut their mean is `mean`."""
        center = np.log(self.mean) - self.sigma**2 / 2
        drawn = rng.lognormal(center, self.sigma, (self.groups, self.samples))
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step. waiting: share of the actors' time."""

    gpus: int
    rollout_s: float
    update_s: float
    publish_s: float
    step_s: float
    waiting: float

    @property
    def costliest(self) -> str:
        """The phase that takes the most; of rollouts, work or waiting for the tail."""
        phases = {"update": self.update_s, "publication": self.publish_s}
        phases["rollout"] = self.rollout_s * (1 - self.waiting)
        phases["tail of the rollouts"] = self.rollout_s * self.waiting
        return max(phases, key=lambda name: phases[name])


def rollout_seconds(lengths: list[int], prompts: int, prompt: int, costs: Costs) -> float:
    """One actor's: continuous batching over its rollouts, in order, at most `max_batch` at once."""
    waiting = lengths[::-1]
    ends: list[int] = []  # steps at which running sequences end
    done_steps, seconds = 0, prompts * prompt * costs.prefill_s
    while waiting or ends:
        while waiting and len(ends) < costs.max_batch:
            heapq.heappush(ends, done_steps + waiting.pop())
        running, until = len(ends), ends[0]
        seconds += (until - done_steps) * (costs.step_s + costs.sequence_s * running)
        done_steps = until
        while ends and ends[0] == done_steps:
            heapq.heappop(ends)
    return seconds


def simulate(gpus: int, job: Job, costs: Costs, overlap: bool, rng: np.random.Generator) -> Step:
    """One step with lengths drawn anew."""
    lengths = job.lengths(rng)
    actors = max(gpus - 1, 1) if overlap else gpus
    shares = [lengths[actor::actors] for actor in range(actors)]
    each = [
        rollout_seconds(share.ravel().tolist(), len(share), job.prompt, costs) for share in shares
    ]
    rollout = max(each)
    update = costs.update_s * (int(lengths.sum()) + job.groups * job.prompt)
    nodes = -(-gpus // job.gpus_per_node)
    publish = costs.publish_s + (costs.mirror_s_per_gb * costs.weights_gb if nodes > 1 else 0.0)
    beside = overlap and gpus > 1
    step = (max(rollout, update) if beside else rollout + update) + publish
    return Step(gpus, rollout, update, publish, step, 1 - sum(each) / (actors * rollout))


def scaled(
    job: Job, costs: Costs, gpus: list[int], overlap: bool, repeats: int = 5, seed: int = 0
) -> list[Step]:
    """For each number of GPUs the medians of `repeats` steps, the same lengths for all."""
    steps = []
    for number in gpus:
        rng = np.random.default_rng(seed)
        drawn = [asdict(simulate(number, job, costs, overlap, rng)) for _ in range(repeats)]
        steps.append(Step(**{n: statistics.median(d[n] for d in drawn) for n in drawn[0]}))
    return steps


def table(steps: list[Step], job: Job) -> str:
    """Markdown. Speed against the first row's number of GPUs."""
    head = ("GPUs", "rollout s", "waiting", "update s", "publish s", "step s", "times as fast",
            "efficiency", "costs the most")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    first = steps[0]
    for step in steps:
        faster = first.step_s / step.step_s
        share = faster * first.gpus / step.gpus
        lines.append(
            f"| {step.gpus:.0f} | {step.rollout_s:.1f} | {step.waiting:.0%} | {step.update_s:.1f} "
            f"| {step.publish_s:.2g} | {step.step_s:.1f} | {faster:.1f} | {share:.0%} "
            f"| {step.costliest} |"
        )
    ends = next((s for s in steps if first.step_s / s.step_s * first.gpus / s.gpus < 0.5), None)
    verdict = "more than half of every GPU is used up to the last row"
    if ends is not None:
        verdict = f"less than half of each GPU is used from {ends.gpus:.0f} on: {ends.costliest}"
    rollouts = job.groups * job.samples
    return "\n".join([*lines, "", f"{rollouts} rollouts a step; {verdict}"])


def measure(name: str) -> Costs:
    """Of this machine: steps of an engine at two batch sizes, a prefill, an update."""
    files = model_files(name, DEFAULT_CACHE.expanduser())
    model = Decoder(files.config, device="meta")
    arena = WeightArena.create(ArenaLayout.for_module(model))
    arena.bind(model, requires_grad=True)
    load_weights(model, files.folder)
    gate = SharedGate.create(arena, model, GateSettings(undo=False))
    gate.open()
    engine = RolloutEngine(model, max_seq_len=640, gate=gate)
    rng = np.random.default_rng(0)

    def timed(count: int, prompt: int, new: int) -> tuple[float, RolloutBatch]:
        prompts = [rng.integers(2, files.config.vocab_size, prompt).tolist() for _ in range(count)]
        params = SamplingParams(max_tokens=new, ignore_eos=True, seed=int(rng.integers(2**31)))
        started = time.perf_counter()
        found = engine.run_batch(prompts, params, return_details=True)
        return time.perf_counter() - started, RolloutBatch.from_rollouts(found)

    timed(4, 16, 4)  # warm
    few, many = ((timed(b, 16, 48)[0] - timed(b, 16, 16)[0]) / 32 for b in (4, 64))
    sequence = max((many - few) / 60, 0.0)
    prefill = timed(8, 512, 1)[0] / (8 * 512)
    learner = Learner(model, gate, TrainerConfig(learning_rate=1e-6))
    _, batch = timed(16, 64, 64)
    advantages = np.ones(len(batch), np.float32)
    learner.step(batch, advantages, "grpo")
    started = time.perf_counter()
    stats = learner.step(batch, advantages, "grpo")
    update = (time.perf_counter() - started) / (16 * 128)
    size = arena.layout.total_bytes / 1e9
    return Costs(
        step_s=max(few - 4 * sequence, 1e-6), sequence_s=sequence, prefill_s=prefill,
        update_s=update, publish_s=stats["publication/wait_s"], mirror_s_per_gb=1.4,
        weights_gb=size, max_batch=64,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--costs", type=Path, help="JSON of the fields of Costs, some or all")
    parser.add_argument("--job", type=json.loads, default={}, help="JSON of fields of Job")
    parser.add_argument("--overlap", action="store_true", help="rollouts of the next step beside")
    parser.add_argument("--measure", metavar="MODEL", help="print this machine's costs instead")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(measure(options.measure)), indent=2))
        return 0
    costs = Costs(**json.loads(options.costs.read_text())) if options.costs else Costs()
    job = Job(**options.job)
    gpus = [int(number) for number in options.gpus.split(",")]
    steps = scaled(job, costs, gpus, options.overlap)
    print(table(steps, job))
    line = {"bench": "scale", "costs": asdict(costs), "job": asdict(job)}
    line |= {"overlap": options.overlap, "steps": [asdict(step) for step in steps]}
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
