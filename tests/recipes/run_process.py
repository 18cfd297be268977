"""A run of the recipe as its user starts it: a process of its own, with real actors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import title

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent),
    "RAY_ADDRESS": "local",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "",  # as most users have it: the order of what is printed is the run's own
}


def command(policy: Path, output: Path, steps: int, **settings: Any) -> list[str]:
    """`settings`: fields of the configuration, with __ for the dot."""
    options = {
        "model": policy, "output": output, "task.name": "tiny_run:load", "steps": steps,
        "warm_start.steps": 2, "checkpoint.every": 4, "evaluation.every": 0,
        "rollout.max_tokens": 3, "rollout.prompts_per_step": 8, "rollout.group_size": 4,
        "optimizer.learning_rate": 3e-3, "optimizer.lr_schedule": "cosine",
        "logging.wandb": "disabled",
    } | {name.replace("__", "."): value for name, value in settings.items()}  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "recipes.grpo", *arguments]


def start(arguments: Sequence[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=os.environ | ENVIRONMENT | environment,
    )  # fmt: skip


def step_of(output: Path) -> int:
    """The last training step that the run has recorded."""
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines if "reward" in line), default=0)
    except (OSError, ValueError):
        return 0


def wait_for_step(run: subprocess.Popen, output: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while step_of(output) < step:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def require_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, f"left behind: {[title(p)[:100] for p in alive]}"


def ended(run: subprocess.Popen, exit_code: int = 0, timeout_s: float = 240) -> str:
    """What it printed; it must end with that code."""
    try:
        text, _ = run.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGABRT)  # its last words are where it stands
        pytest.fail(f"still running after {timeout_s:.0f} s: {run.communicate()[0]}")
    assert run.returncode == exit_code, text
    return text
