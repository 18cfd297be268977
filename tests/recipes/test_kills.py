"""F1, F3, F4, F5, R8: one run over real actors, whose processes are killed for real, one after
another.

Then the run's own, and what `--resume auto` goes on with is interrupted by Ctrl-C. It ends in the
weights of a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import actors_of, descendants, title
from tests.recipes.run_process import (
    command,
    ended,
    require_gone,
    start,
    step_of,
    wait_for_step,
)

STEPS = 60


def begin(policy: Path, output: Path) -> subprocess.Popen:
    return start(command(policy, output, STEPS, resume="auto"))


def kill_one(run: subprocess.Popen, name: str) -> None:
    """SIGKILL one actor process of this run."""
    there = descendants(run.pid)
    for process in there:
        if title(process).startswith(name):
            process.kill()
            return
    pytest.fail(f"no process {name} in {[title(p) for p in there]}")


def final_weights(output: Path) -> bytes:
    return (output / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors").read_bytes()


def test_kill_them_all_one_after_another(policy, tmp_path):
    text = ended(begin(policy, tmp_path / "undisturbed"))
    assert "died or was killed" not in text, "an orderly end looks like an accident"
    expected = final_weights(tmp_path / "undisturbed")

    output = tmp_path / "killed"
    run = begin(policy, output)
    wait_for_step(run, output, 5)
    kill_one(run, "ray::Rollout")
    wait_for_step(run, output, 10)
    kill_one(run, "ray::Trainer")
    wait_for_step(run, output, 15)
    # Not Ray's own two agents: they want to tell their dead head of it, for more than a minute.
    ours = [p for p in descendants(run.pid) if "Agent" not in title(p)]
    assert len(actors_of(run.pid)) == 3
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    require_gone(ours)
    assert step_of(output) < STEPS

    run = begin(policy, output)
    wait_for_step(run, output, 30)
    everyone = descendants(run.pid)
    run.send_signal(signal.SIGINT)
    text = ended(run, 130, timeout_s=60)
    assert "saving the weights" in text and "Traceback" not in text
    require_gone(everyone)
    newest = sorted((output / "checkpoints").iterdir())[-1].name
    assert newest == f"step-{step_of(output):06d}", "Ctrl-C lost a step"

    text = ended(begin(policy, output))
    assert final_weights(output) == expected
    assert "left" in text
    report = (output / "report.md").read_text()
    assert "Gone on with after step" in report and "**NO**" not in report
