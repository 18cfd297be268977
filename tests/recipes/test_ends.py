"""F5: how a run ends that cannot go on, over real actors: exit code, one sentence, nothing left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import actors_of, descendants
from tests.recipes.run_process import (
    ENVIRONMENT,
    ROOT,
    command,
    ended,
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
    if os.geteuid() or mount("-t", "tmpfs", "-o", "size=2m", "none", folder):
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


@pytest.mark.slow
def test_disk_full(policy, small_disk):
    """Every checkpoint is kept until the disk is full; with more room the run goes on."""
    output = small_disk / "run"
    arguments = command(policy, output, 15, checkpoint__every=1, checkpoint__keep=100,
                        resume="auto")  # fmt: skip
    run = start(arguments)
    wait_for_step(run, output, 1)
    everyone = descendants(run.pid)
    cause = only_sentence(ended(run, 1))
    require_gone(everyone)
    assert "cannot write checkpoint" in cause and "No space left on device" in cause
    assert 2 <= step_of(output) < 15
    assert mount("-o", "remount,size=64m", small_disk) == 0
    ended(start(arguments))
    assert step_of(output) == 15
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


RAY = str(Path(sys.executable).parent / "ray")


class Head:
    """A Ray cluster that takes jobs: a head with a dashboard, its ports and files its own."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray-")  # short, for the names of its sockets
        ports = [free_port() for _ in range(4)]
        self.dashboard = f"http://127.0.0.1:{ports[0]}"
        self._environment = {
            k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")
        } | {"RAY_TMPDIR": self._folder, "RAY_AUTH_MODE": "disabled",
             "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
        self._head = subprocess.Popen(
            [
                RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={ports[1]}",
                f"--dashboard-port={ports[0]}", f"--dashboard-agent-listen-port={ports[2]}",
                f"--dashboard-agent-grpc-port={ports[3]}", f"--object-store-memory={100 << 20}",
            ],
            env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def call(self, *arguments: str) -> subprocess.CompletedProcess:
        """`ray job ...`, again while the head's job agent is not up yet."""
        deadline = time.monotonic() + 90
        while True:
            done = subprocess.run(
                [RAY, "job", arguments[0], f"--address={self.dashboard}", *arguments[1:]],
                env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, cwd=ROOT, timeout=240,
            )  # fmt: skip
            absent = "No available agent" in done.stdout or "Failed to connect" in done.stdout
            if not absent or time.monotonic() > deadline:
                return done
            time.sleep(1)

    def submit(self, *options: str, run: list[str]) -> subprocess.CompletedProcess:
        environment = [f"{k}={v}" for k, v in ENVIRONMENT.items() if k != "RAY_ADDRESS"]
        return self.call("submit", *options, "--", "env", "-C", str(ROOT), *environment, *run)

    def actors(self) -> list[psutil.Process]:
        """Of any run on it."""
        return actors_of(self._head.pid)

    def close(self) -> None:
        for process in descendants(self._head.pid):
            with suppress(psutil.Error):
                process.kill()
        self._head.kill()
        self._head.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    head = Head()
    yield head
    head.close()


@pytest.mark.slow
def test_a_job_that_finishes(policy, tmp_path, head):
    done = head.submit(run=command(policy, tmp_path / "run", 3))
    assert done.returncode == 0, done.stdout
    assert "**NO**" not in (tmp_path / "run" / "report.md").read_text()
    require_gone(head.actors())


@pytest.mark.slow
def test_a_job_that_fails_says_why(policy, tmp_path, head):
    lost = command(policy, tmp_path / "run", 3, rollout__nodes=2)
    for run, cause in [
        (command(policy, tmp_path / "no" / "hf", 3, model=tmp_path / "no"), str(tmp_path / "no")),
        ([*lost, "--rollout.actors=1"], "rollout.actors must be at least 2"),
    ]:
        done = head.submit(run=run)
        assert done.returncode != 0
        assert "error: " in done.stdout and cause in done.stdout
        require_gone(head.actors())


@pytest.mark.slow
def test_a_job_that_is_stopped(policy, tmp_path, head):
    """Like Ctrl-C: its weights are kept, and it can be gone on with."""
    output = tmp_path / "run"
    run = command(policy, output, 100_000, resume="auto", optimizer__lr_schedule="constant",
                  checkpoint__every=0)  # fmt: skip
    assert head.submit("--no-wait", "--submission-id=long", run=run).returncode == 0
    deadline = time.monotonic() + 120
    while step_of(output) < 3:
        assert time.monotonic() < deadline, head.call("logs", "long").stdout
        time.sleep(0.1)
    actors = head.actors()
    assert len(actors) == 3
    assert head.call("stop", "long").returncode == 0
    require_gone(actors)
    newest = sorted((output / "checkpoints").iterdir())[-1].name
    assert newest == f"step-{step_of(output):06d}"
