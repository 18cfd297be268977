"""F1, F3, F4, F5, R8: one run over real actors, whose processes are killed for real, one after
another.

Then the run's own, and what `--resume auto` goes on with is interrupted by Ctrl-C. It ends in the
weights of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

STEPS = 60


def start(policy: Path, output: Path) -> subprocess.Popen:
    options = {
        "model": policy, "output": output, "resume": "auto", "task.name": "tiny_run:load",
        "steps": STEPS, "warm_start.steps": 2, "checkpoint.every": 4, "evaluation.every": 0,
        "rollout.max_tokens": 3, "rollout.prompts_per_step": 8, "rollout.group_size": 4,
        "optimizer.learning_rate": 3e-3, "optimizer.lr_schedule": "cosine",
        "logging.wandb": "disabled",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    here = str(Path(__file__).parent)
    environment = os.environ | {
        "PYTHONPATH": here, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.grpo", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


def step_of(output: Path) -> int:
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


def processes_of(run: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def kill_one(run: subprocess.Popen, name: str) -> None:
    """SIGKILL one actor process of this run."""
    for process in processes_of(run):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(name):
                process.kill()
                return
        except psutil.Error:
            continue
    pytest.fail(f"no process {name} in {[p.name() for p in processes_of(run)]}")


def finished(run: subprocess.Popen) -> str:
    try:
        text, _ = run.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGABRT)  # its last words are where it stands
        pytest.fail(f"still running after 240 s: {run.communicate()[0]}")
    assert run.returncode == 0, text
    return text


def final_weights(output: Path) -> bytes:
    return (output / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors").read_bytes()


def test_kill_them_all_one_after_another(policy, tmp_path):
    text = finished(start(policy, tmp_path / "undisturbed"))
    assert "died or was killed" not in text, "an orderly end looks like an accident"
    expected = final_weights(tmp_path / "undisturbed")

    output = tmp_path / "killed"
    run = start(policy, output)
    wait_for_step(run, output, 5)
    kill_one(run, "ray::Rollout")
    wait_for_step(run, output, 10)
    kill_one(run, "ray::Trainer")
    wait_for_step(run, output, 15)
    everyone = processes_of(run)
    # Not Ray's own two agents: they want to tell their dead head of it, for more than a minute.
    ours = [p for p in everyone if "Agent" not in p.cmdline()[0]]
    assert sum(p.cmdline()[0].startswith(("ray::Rollout", "ray::Trainer")) for p in ours) == 3
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(ours, timeout=30)
    assert not alive, f"left behind: {[p.cmdline()[:2] for p in alive]}"
    assert step_of(output) < STEPS

    run = start(policy, output)
    wait_for_step(run, output, 30)
    everyone = processes_of(run)
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 130, text
    assert "saving the weights" in text and "Traceback" not in text
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not alive, f"left behind: {[p.cmdline()[:2] for p in alive]}"
    newest = sorted((output / "checkpoints").iterdir())[-1].name
    assert newest == f"step-{step_of(output):06d}", "Ctrl-C lost a step"

    text = finished(start(policy, output))
    assert final_weights(output) == expected
    assert "left" in text
    report = (output / "report.md").read_text()
    assert "Gone on with after step" in report and "**NO**" not in report
