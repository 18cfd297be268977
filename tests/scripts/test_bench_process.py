"""The benchmark's hold on an engine: who has no turn takes no core, whatever its threads do."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.bench.peers.process import EngineFailed, EngineProcess
from scripts.bench.peers.protocol import Job

JOB = Job(folder="", gguf="", threads=1, max_batch=1, max_seq_len=1, settings={})
ENGINE = """#!{python}
import json, os, sys, threading

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()
for line in sys.stdin:
    request = json.loads(line)
    if request.get("op") == "fail":
        answer = {{"error": "as asked"}}
    else:
        answer = {{"ready": {{}}, "pid": os.getpid()}}
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Entry:
    python: Path
    name: str = "spinner"
    module: str = "spinner"
    venv: str = "spinner"


@pytest.fixture
def engine(tmp_path):
    program = tmp_path / "engine"
    program.write_text(ENGINE.format(python=sys.executable))
    program.chmod(0o755)
    with EngineProcess(Entry(program), JOB, tmp_path / "log", timeout_s=60) as process:
        yield process


def status(pid: int) -> tuple[str, int]:
    """State of a process, T where it is stopped, and its user and system time in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def settled(pid: int) -> tuple[str, int]:
    """The status once the process has been seen stopped."""
    deadline = time.monotonic() + 10
    while status(pid)[0] != "T":
        assert time.monotonic() < deadline, "the process was never stopped"
        time.sleep(0.01)
    return status(pid)


@pytest.mark.parametrize("operation", ["run", "fail"])
def test_an_engine_computes_nothing_between_its_answers(engine, operation):
    pid = engine.ask("run")["pid"]
    if operation == "fail":
        with pytest.raises(EngineFailed, match="as asked"):
            engine.ask("fail")
    before = settled(pid)
    time.sleep(0.2)
    assert status(pid) == before
    assert engine.ask("run")["pid"] == pid


def test_a_stopped_engine_ends(engine):
    pid = engine.ask("run")["pid"]
    settled(pid)
    engine.close()
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
