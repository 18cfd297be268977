"""The benchmark's side of `protocol.py`: one process per engine, started, asked and ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench.peers.catalogue import ROOT, EngineEntry
from scripts.bench.peers.protocol import Job
from scripts.bench.workloads import Group

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For every engine; those that do not know a variable ignore it. The KV space is in GiB."""
END_SECONDS = 20.0


class EngineFailed(RuntimeError):
    """An engine could not start or answer; the message is its own reason."""


class EngineProcess:
    """An engine in a process of its own, with a session of its own so that it ends whole.

    Between its answers it is stopped (SIGSTOP), with all its threads: workers that spin while they
    wait would take the cores of the engine whose turn it is.

    log: file that takes whatever the engine's libraries print. timeout_s: the most that one answer,
    or the start, may take. Use it as a context manager, or call `close`.
    """

    def __init__(self, entry: EngineEntry, job: Job, log: Path, timeout_s: float) -> None:
        self.name = entry.name
        self._log = log
        self._timeout_s = timeout_s
        self._rest = b""
        self._closed = False
        if not entry.python.exists():
            raise EngineFailed(
                f"{entry.name} is not installed: no .venv-peers/{entry.venv}; "
                f"run bash scripts/bench/peers/setup.sh {entry.venv}"
            )
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [entry.python, "-m", f"scripts.bench.peers.{entry.module}"],
                cwd=ROOT,
                env=environment(job.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        try:
            self.ready: dict[str, Any] = self._ask({"job": asdict(job)})["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Seconds, tokens and the last sample of one run of these groups."""
        return self.ask("run", groups=[asdict(group) for group in groups])

    def ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        """The answer to one operation. EngineFailed: it says error, is late, or has ended."""
        return self._ask({"op": operation, **fields})

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended: reading says so, with the reason
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._read_line())
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + self._timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self.close()
                raise EngineFailed(f"no answer within {self._timeout_s:.0f} s; it was ended")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                code = self._process.wait()
                raise EngineFailed(f"its process ended with code {code}: {self._last_words()}")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it printed nothing"

    def _signal(self, number: signal.Signals) -> None:
        """To the process and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the process and whatever it has started; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)  # its children may outlive it
        self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment(threads: int) -> dict[str, str]:
    """What an engine's process sees: this process's environment, the threads, no word outside."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    return {
        **os.environ,
        **ENVIRONMENT,
        "OMP_NUM_THREADS": f"{threads}",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
