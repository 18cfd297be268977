"""R9: logging never ends a run, and steps never go back."""

import json

import numpy as np
import pytest
import wandb

from recipes.metrics import MetricsLog


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def log(tmp_path, warnings):
    with MetricsLog(tmp_path, wandb_mode="disabled", warn=warnings.append) as metrics:
        yield metrics


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class FailingFile:
    """A full disk: every write fails."""

    name = "metrics.jsonl"

    def write(self, text):
        raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


class FailingRun:
    """A wandb run whose service has died."""

    def log(self, values, step):
        raise ConnectionError("service process is gone")

    def finish(self, exit_code):
        raise ConnectionError("service process is gone")


def test_each_call_is_one_line_on_disk_at_once(tmp_path, log):
    log.log(1, {"reward": np.float32(0.5), "num_tokens": 3})
    assert lines(tmp_path) == [{"step": 1, "reward": 0.5, "num_tokens": 3.0}]


def test_steps_are_monotone(tmp_path, log):
    for step in (1, 5, 3, 6):
        log.log(step, {"reward": step})
    assert [line["step"] for line in lines(tmp_path)] == [1, 5, 5, 6]
    assert log.series("reward") == [(1, 1.0), (5, 5.0), (5, 3.0), (6, 6.0)]


def test_values_that_are_not_numbers(tmp_path, log, warnings):
    """NaN becomes null (the file stays JSON); a text is dropped with a warning, the rest kept."""
    log.log(1, {"reward": float("nan"), "bad": "text", "kl": 0.1})
    assert lines(tmp_path) == [{"step": 1, "reward": None, "kl": 0.1}]
    assert log.series("reward") == []
    assert len(warnings) == 1 and "'bad' is not a number" in warnings[0]


def test_a_full_disk_warns_once_and_keeps_the_history(log, warnings):
    log._file = FailingFile()
    log.log(1, {"reward": 1.0})
    log.log(2, {"reward": 2.0})
    assert log.series("reward") == [(1, 1.0), (2, 2.0)]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]


def test_an_unwritable_folder_is_no_end(tmp_path, warnings):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with MetricsLog(blocker, wandb_mode="disabled", warn=warnings.append) as metrics:
        metrics.log(1, {"reward": 1.0})
    assert metrics.series("reward") == [(1, 1.0)]
    assert len(warnings) == 1 and "cannot write" in warnings[0]


def test_wandb_failing_to_start(tmp_path, warnings, monkeypatch):
    def refuse(**settings):
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with MetricsLog(tmp_path, wandb_mode="online", warn=warnings.append) as metrics:
        metrics.log(1, {"reward": 1.0})
    assert lines(tmp_path) == [{"step": 1, "reward": 1.0}]
    assert len(warnings) == 1 and "wandb does not start" in warnings[0]


def test_wandb_dying_mid_run(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **settings: FailingRun())
    with MetricsLog(tmp_path, warn=warnings.append) as metrics:
        metrics.log(1, {"reward": 1.0})
        metrics.log(2, {"reward": 2.0})
    assert [line["reward"] for line in lines(tmp_path)] == [1.0, 2.0]
    assert len(warnings) == 1 and "wandb stopped logging" in warnings[0]


def test_wandb_gets_the_same_numbers(tmp_path, monkeypatch):
    """Offline unless told otherwise, silent, under the run's folder."""
    started, logged, finished = {}, [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self, exit_code):
            finished.append(exit_code)

    def start(**settings):
        started.update(settings)
        return Run()

    monkeypatch.setattr(wandb, "init", start)
    with pytest.raises(RuntimeError), MetricsLog(tmp_path, config={"seed": 1}) as metrics:
        metrics.log(3, {"reward": 1.0})
        metrics.log(2, {"reward": 2.0})
        raise RuntimeError
    assert started["mode"] == "offline" and started["dir"] == str(tmp_path)
    assert started["config"] == {"seed": 1}
    assert logged == [(3, {"reward": 1.0}), (3, {"reward": 2.0})]
    assert finished == [1]


def test_closing_twice_is_fine(tmp_path):
    metrics = MetricsLog(tmp_path, wandb_mode="disabled")
    metrics.close()
    metrics.close()
    metrics.log(1, {"reward": 1.0})
    assert metrics.series("reward") == [(1, 1.0)]
