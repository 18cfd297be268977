"""A tiny policy on disk, and the loop run on it without Ray."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_run

from recipes import grpo, loop


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return tiny_run.build_policy(tmp_path_factory.mktemp("policy") / "hf")


@pytest.fixture
def run_grpo(policy, tmp_path, monkeypatch):
    """`run_grpo(*options)` -> (exit code, output folder)."""
    monkeypatch.setattr(loop, "Colocation", tiny_run.LocalColocation)

    def run(*options, output="run"):
        folder = tmp_path / output
        fixed = {
            "model": policy,
            "output": folder,
            "task.name": "tiny_run:load",
            "steps": 3,
            "rollout.max_tokens": 3,
            "rollout.prompts_per_step": 8,
            "rollout.group_size": 4,
            "optimizer.learning_rate": 3e-3,
            "optimizer.lr_schedule": "constant",
            "warm_start.steps": 0,
            "logging.wandb": "disabled",
        }
        arguments = [f"--{name}={value}" for name, value in fixed.items()]
        return grpo.main([*arguments, *options]), folder

    return run


class Interrupted(Exception):
    """Stands for the end of the process: raised once, at a chosen call."""


@pytest.fixture
def interrupt(monkeypatch):
    """`interrupt(owner, method, call, error)`: that call of the method raises, before or after it
    did its work; all others are as ever."""

    def set_up(owner, method, call, error=Interrupted, after=False):
        original, calls = getattr(owner, method), []

        def wrapper(self, *arguments, **keywords):
            calls.append(method)
            if len(calls) != call:
                return original(self, *arguments, **keywords)
            if after:
                original(self, *arguments, **keywords)
            raise error(f"call {call} of {method}")

        monkeypatch.setattr(owner, method, wrapper)
        return calls

    return set_up
