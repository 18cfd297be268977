"""One whole GRPO step, Lockstep beside TRL: seconds by phase, and the memory of both.

    bash scripts/bench/peers/setup.sh trl              # TRL, once, in a venv of its own
    python -m scripts.bench.step [--models mid,smollm2] [--workloads w1,w2] [--repeats 3]

A step is: sample 8 completions of each of 8 prompts, reward them, loss, backward, clip, AdamW. The
same model folder, prompts, group size, lengths (no EOS ends a sample), learning rate, clipping and
number of updates on both sides; fp32, no reference policy. TRL is `GRPOTrainer` as it is, let go
one step at a time (`peers/trl_step.py`), with the settings that did best in a trial step; Lockstep
is a `Colocation` with as many rollout actors as did best. They take turns, and whoever has no turn
computes nothing. Medians of the repeats, after a step that is not counted.

    rollout_s, update_s     of TRL: its `_generate`, and the rest of the step
    trained_tokens_per_s    completion tokens per second of update
    peak_mib                most memory during one step more, which is not timed (looking costs
                            time), PSS summed: of TRL its process, of Lockstep driver, trainer and
                            rollout actors; ray_mib what Ray's own daemons take beside that

One JSON line per side, model and workload, then one with the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from recipes.algorithms import grpo_advantages
from rollout import EngineConfig, SamplingParams
from scripts.bench.memory import PeakMemory, family
from scripts.bench.peers.catalogue import EngineEntry
from scripts.bench.peers.model_files import DEFAULT_CACHE, MODELS, ModelFiles, model_files
from scripts.bench.peers.process import EngineFailed, EngineProcess
from scripts.bench.peers.protocol import Job
from scripts.bench.workloads import TRIAL_SEED, WORKLOADS, Group, Workload
from trainer_bridge import Colocation, TrainerConfig

LEARNING_RATE = 1e-6
MICRO_BATCH_TOKENS = 1024
"""Of Lockstep: as many as 8 rows of w1, which is what TRL is the fastest with."""
TRL_SETTINGS = (
    {"rows": 8, "continuous_batching": False},
    {"rows": 16, "continuous_batching": False},
    {"rows": 64, "continuous_batching": False},
    {"rows": 16, "continuous_batching": True},  # 3 times as slow on tiny, 4 times on mid
)
ACTORS = (1, 2)


@dataclass(slots=True)
class Steps:
    """What one side's counted steps took."""

    settings: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, answer: dict[str, Any]) -> None:
        self.seconds.append(answer["seconds"])
        self.rollout_seconds.append(answer["rollout_seconds"])

    def line(self, side: str, model: str, workload: Workload) -> dict[str, Any]:
        seconds = statistics.median(self.seconds)
        rollout = statistics.median(self.rollout_seconds)
        tokens = workload.prompts * workload.samples * workload.new_tokens[0]
        return {
            "bench": "step", "side": side, "model": model, "workload": workload.name,
            "settings": self.settings, "step_s": round(seconds, 3),
            "rollout_s": round(rollout, 3), "update_s": round(seconds - rollout, 3),
            "trained_tokens_per_s": round(tokens / (seconds - rollout), 1),
            "peak_mib": round(self.peak_bytes / 2**20),
            "repeats": [round(s, 3) for s in self.seconds], **self.extra,
        }  # fmt: skip


class Lockstep:
    """A colocation, one step at a time. Use it as a context manager."""

    def __init__(self, files: ModelFiles, workload: Workload, actors: int) -> None:
        self._workload = workload
        self._colocation = Colocation(
            str(files.folder),
            rollout_actors=actors,
            trainer=TrainerConfig(
                learning_rate=LEARNING_RATE, micro_batch_tokens=MICRO_BATCH_TOKENS
            ),
            engine=EngineConfig(max_batch_size=64, max_seq_len=workload.max_seq_len),
        )

    def __enter__(self) -> Lockstep:
        self._run = self._colocation.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._colocation.__exit__(*error)

    def step(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Seconds, and by phase; the ratio of the step's first minibatch."""
        params = SamplingParams(
            n=self._workload.samples, max_tokens=self._workload.new_tokens[0], ignore_eos=True
        )
        started = time.perf_counter()
        batch = self._run.pool.run_batch([group.prompt for group in groups], params)
        rolled_out = time.perf_counter()
        even = [float(np.mean(batch.tokens(i) % 2 == 0)) for i in range(len(batch))]
        advantages = grpo_advantages(even, batch.prompt_index)
        stats = self._run.trainer.step(batch, advantages, "grpo")
        self._run.confirm_publication(int(stats["rollout/policy_version"]))
        ended = time.perf_counter()
        return {
            "seconds": ended - started,
            "rollout_seconds": rolled_out - started,
            "ratio": [stats[f"sampling/importance_sampling_ratio/{m}"] for m in ("min", "max")],
            "gate_ms": stats["publication/update_s"] * 1e3,
        }


def of_run() -> list[psutil.Process]:
    """Driver, trainer and rollout actors; not Ray's daemons and the processes it keeps ready."""
    return [p for p in family(os.getpid()) if p.pid == os.getpid() or _is_actor(p)]


def of_ray() -> list[psutil.Process]:
    """What Ray itself keeps running."""
    here = [p for p in family(os.getpid()) if p.pid != os.getpid() and not _is_actor(p)]
    return [p for p in here if "peers.trl_step" not in " ".join(_words(p))]


def _is_actor(process: psutil.Process) -> bool:
    title = " ".join(_words(process))
    return title.startswith("ray::") and "IDLE" not in title


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def trl(
    files: ModelFiles,
    workload: Workload,
    settings: dict[str, Any],
    seeds: Sequence[int],
    threads: int,
    stack: ExitStack,
) -> EngineProcess:
    """TRL's trainer with the steps of these seeds before it. EngineFailed says why it cannot."""
    job = Job(str(files.folder), "", threads, 64, workload.max_seq_len, settings)
    logs = DEFAULT_CACHE.expanduser() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    entry = EngineEntry("trl-step", "trl_step", "trl")
    process = stack.enter_context(EngineProcess(entry, job, logs / "trl-step.log", 7200))
    steps = [[asdict(g) for g in workload.draw(s, files.config.vocab_size)] for s in seeds]
    process.ask("prepare", steps=steps, learning_rate=LEARNING_RATE)
    return process


def best_of_trl(files: ModelFiles, workload: Workload, threads: int) -> dict[str, Any]:
    """The settings whose first step was the fastest."""
    seconds = {}
    for number, settings in enumerate(TRL_SETTINGS):
        with ExitStack() as stack:
            try:
                process = trl(files, workload, settings, [TRIAL_SEED], threads, stack)
                seconds[number] = process.ask("train")["seconds"]
                say(f"trial of TRL {settings}: {seconds[number]:.2f} s")
            except EngineFailed as error:
                say(f"trial of TRL {settings}: {error}")
    if not seconds:
        raise EngineFailed("no settings of TRL could take a step")
    return TRL_SETTINGS[min(seconds, key=lambda number: seconds[number])]


def best_of_lockstep(files: ModelFiles, workload: Workload) -> int:
    """How many rollout actors were the fastest, likewise."""
    seconds = {}
    for actors in ACTORS:
        with Lockstep(files, workload, actors) as lockstep:
            groups = workload.draw(TRIAL_SEED, files.config.vocab_size)
            seconds[actors] = lockstep.step(groups)["seconds"]
            say(f"trial of Lockstep, {actors} rollout actors: {seconds[actors]:.2f} s")
    return min(seconds, key=lambda actors: seconds[actors])


def measure(
    files: ModelFiles,
    workload: Workload,
    repeats: int,
    threads: int,
    settings: dict[str, Any] | None,
    actors: int | None,
) -> list[dict[str, Any]]:
    """The lines of one cell. settings, actors: None = those that do best."""
    settings = settings or best_of_trl(files, workload, threads)
    actors = actors or best_of_lockstep(files, workload)
    seeds = range(repeats + 2)  # the first warms up, the last is looked at
    theirs, ours = Steps(settings), Steps({"actors": actors})
    with ExitStack() as stack:
        process = trl(files, workload, settings, seeds, threads, stack)
        lockstep = stack.enter_context(Lockstep(files, workload, actors))
        for seed in seeds[:-1]:
            answer = lockstep.step(workload.draw(seed, files.config.vocab_size))
            say(f"Lockstep, step {seed}: {answer['seconds']:.2f} s")
            counted = process.ask("train")
            say(f"TRL, step {seed}: {counted['seconds']:.2f} s")
            if counted["mean_length"] != workload.new_tokens[0]:
                raise EngineFailed(f"TRL's completions have {counted['mean_length']} tokens")
            if seed:
                ours.add(answer)
                theirs.add(counted)
        with PeakMemory(of_run) as peak, PeakMemory(of_ray) as ray:
            lockstep.step(workload.draw(seeds[-1], files.config.vocab_size))
        ours.peak_bytes = peak.bytes
        with PeakMemory(lambda: family(process.pid)) as peak:
            process.ask("train")
        theirs.peak_bytes = peak.bytes
        ours.extra = {
            "ray_mib": round(ray.bytes / 2**20), "ratio": answer["ratio"],
            "gate_ms": round(answer["gate_ms"], 2),
        }  # fmt: skip
    mine = ours.line("lockstep", files.name, workload)
    other = theirs.line("trl", files.name, workload)
    ratios = {
        "bench": "step", "side": "trl ÷ lockstep", "model": files.name, "workload": workload.name,
        "load": round(os.getloadavg()[0], 2),
        **{n: round(other[n] / mine[n], 2) for n in ("step_s", "rollout_s", "update_s")},
        "lockstep_peak_of_trl": round(mine["peak_mib"] / other["peak_mib"], 2),
    }  # fmt: skip
    return [mine, other, ratios]


def say(what: str) -> None:
    """Progress, apart from the results."""
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mid,smollm2", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--workloads", default="w1,w2", help="w1, w2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--trl", type=json.loads, help="JSON of one of TRL_SETTINGS: no search")
    parser.add_argument("--actors", type=int, help="of Lockstep: no search")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    options = parser.parse_args()
    # A stopped process does not see that its input has ended: it must be closed, whatever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for model in options.models.split(","):
        files = model_files(model, options.cache.expanduser())
        for name in options.workloads.split(","):
            try:
                lines = measure(
                    files, WORKLOADS[name], options.repeats, options.threads, options.trl,
                    options.actors,
                )  # fmt: skip
            except EngineFailed as error:
                print(f"error: {model} {name}: {error}", file=sys.stderr)
                return 1
            for line in lines:
                print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
