"""What the benchmark and an engine's process say to each other: one JSON object per line.

    benchmark ─► {"job": {...}}                       once: the model, the limits, the settings
              ◄─ {"ready": {"version": ..., "settings": ...}}
              ─► {"op": "run", "groups": [...]}       as often as it likes
              ◄─ {"seconds": ..., "tokens": ..., "sample": {...}}
              ─► end of file                          the process ends

An engine may know further operations (`Engine.operations`). What fails is answered with
`{"error": reason}` and ends nothing. Between two lines the process waits in a read and computes
nothing. Everything else that a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from scripts.bench.workloads import Group, Sample, check_samples, groups_from_json

Operation = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is built for. `settings` are those of its entry in `catalogue.py`."""

    folder: str
    """the model in the Hugging Face form"""
    gguf: str
    """the same weights as an F32 GGUF file"""
    threads: int
    max_batch: int
    """samples that run at once"""
    max_seq_len: int
    """prompt + output tokens of the longest sample"""
    settings: dict[str, Any]


class Engine(Protocol):
    """An engine on one model. version: of its package. operations: what it knows beside "run"."""

    version: str
    operations: dict[str, Operation]

    def run(self, groups: Sequence[Group]) -> list[Sample]:
        """All samples in the order of the groups, at temperature 1 with nothing filtered."""


def run_timed(engine: Engine, groups: Sequence[Group]) -> dict[str, Any]:
    """Answer to "run": wall seconds, tokens, and the last sample with its prompt."""
    started = time.perf_counter()
    samples = engine.run(groups)
    seconds = time.perf_counter() - started
    tokens = check_samples(groups, samples)
    sample = {"prompt": groups[-1].prompt, **asdict(samples[-1])}
    return {"seconds": seconds, "tokens": tokens, "sample": sample}


def answer(engine: Engine, request: Mapping[str, Any]) -> dict[str, Any]:
    """What one line is answered with."""
    try:
        if request["op"] == "run":
            return run_timed(engine, groups_from_json(request["groups"]))
        return engine.operations[request["op"]](request)
    except Exception as error:
        traceback.print_exc()
        return {"error": reason(error)}


def reason(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def serve(build: Callable[[Job], Engine]) -> None:
    """Build the engine of the job on standard input, then answer until the input ends."""
    answers = _own_standard_output()

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    job = Job(**json.loads(sys.stdin.readline())["job"])
    try:
        engine = build(job)
    except Exception as error:
        traceback.print_exc()
        say({"error": reason(error)})
        return
    say({"ready": {"version": engine.version, "settings": job.settings}})
    for line in sys.stdin:
        say(answer(engine, json.loads(line)))


def _own_standard_output() -> TextIO:
    """The present standard output; from now on whatever is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
