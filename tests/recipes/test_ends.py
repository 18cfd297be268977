"""F5: how a run ends that cannot go on, over real actors: exit code, one sentence, nothing left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.run_process import (
    command,
    ended,
    processes_of,
    require_gone,
    start,
    step_of,
    wait_for_step,
)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, with room for a few checkpoints."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or mount("-t", "tmpfs", "-o", "size=4m", "none", folder):
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def read_only(small_disk) -> Path:
    assert mount("-o", "remount,ro", small_disk) == 0
    return small_disk


def mount(*arguments: str | Path) -> int:
    return subprocess.run(["mount", *arguments], stderr=subprocess.DEVNULL).returncode


def only_sentence(text: str) -> str:
    """The last line, which is the one about an error."""
    *before, last = text.strip().splitlines()
    assert last.startswith("error: ")
    assert not any("error: " in line or "Traceback" in line for line in before), text
    return last


def test_disk_full(policy, small_disk):
    """Every checkpoint is kept until the disk is full; with more room the run goes on."""
    output = small_disk / "run"
    arguments = command(policy, output, 40, checkpoint__every=1, checkpoint__keep=100,
                        resume="auto")  # fmt: skip
    run = start(arguments)
    wait_for_step(run, output, 1)
    everyone = processes_of(run)
    cause = only_sentence(ended(run, 1))
    require_gone(everyone)
    assert "cannot write checkpoint" in cause and "No space left on device" in cause
    assert step_of(output) >= 2
    assert mount("-o", "remount,size=64m", small_disk) == 0
    ended(start(arguments))
    assert step_of(output) == 40
    report = (output / "report.md").read_text()
    assert "Gone on with after step" in report and "**NO**" not in report


def test_an_output_on_a_read_only_disk(policy, read_only):
    text = ended(start(command(policy, read_only / "run", 3)), 1)
    assert "Read-only file system; choose another folder with --output" in only_sentence(text)


def test_a_temporary_folder_on_a_read_only_disk(policy, tmp_path, read_only):
    """Ray has nowhere to start."""
    run = start(command(policy, tmp_path / "run", 3), RAY_TMPDIR=str(read_only))
    cause = only_sentence(ended(run, 1))
    assert f"Ray did not start: {read_only}/ray: Read-only file system" in cause
    assert "RAY_TMPDIR names another place" in cause
    assert "Ray did not start" in (tmp_path / "run" / "report.md").read_text()
