"""R7, R8, F3: a run that was interrupted anywhere and is gone on with equals one that was not."""

import json
import math
import re
import signal
from pathlib import Path

import pytest
import tiny_run
import torch

from recipes.checkpoints import STATE_FILE
from rollout import TornWeights
from trainer_bridge import TrainerLost
from trainer_bridge.learner import Learner

OPTIONS = (
    "--steps=4", "--warm_start.steps=2", "--evaluation.every=2", "--checkpoint.every=2",
    "--optimizer.minibatch_size=20", "--optimizer.lr_schedule=cosine", "--resume=auto",
    "--rollout.prompts_per_step=10", "--task.train_size=17", "--evaluation.samples=2",
    "--logging.samples_every=1", "--logging.samples_keep=3",
)  # fmt: skip
TIMES = re.compile(r"timing_s|step_time|tokens_per_second|_s$|prefix_hit|preemptions")


def records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not TIMES.search(k)} for line in lines
    ]


def outcome(folder: Path, versions: bool = True) -> dict:
    """All that a run leaves behind, but for times (and what an engine's cache held)."""
    (last,) = (folder / "checkpoints").glob("step-000004")
    trainer = torch.load(last / "trainer_state.pt", weights_only=True)
    content = json.loads((last / STATE_FILE).read_text())
    for _, evaluation in content["state"]["evaluations"]:
        del evaluation["seconds"]
    del content["files"], content["state"]["resumes"]
    metrics = records(folder)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted({sample["step"] for sample in samples}) == [2, 3, 4]
    if not versions:
        for sample in samples:
            del sample["versions"]
        del content["policy_version"], trainer["policy_version"]
        for record in metrics:
            for name in [name for name in record if name.endswith("policy_version")]:
                del record[name]
    return {
        "weights": (last / "model.safetensors").read_bytes(),
        "trainer": flat(trainer),
        "state": content,
        "metrics": metrics,
        "samples": samples,
    }


def flat(value, path=""):
    """Nested containers as `{path: plain value}`, tensors as their bytes."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        plain = value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
        return {path: plain}
    return {k: v for key, item in items for k, v in flat(item, f"{path}/{key}").items()}


_undisturbed: list[tuple[dict, dict]] = []  # one run serves all tests of this file


@pytest.fixture
def undisturbed(run_grpo):
    """What an uninterrupted run leaves behind: with policy versions, and without."""
    if not _undisturbed:
        code, folder = run_grpo(*OPTIONS, output="uninterrupted")
        assert code == 0
        _undisturbed.append((outcome(folder), outcome(folder, versions=False)))
    return _undisturbed[0]


@pytest.fixture
def uninterrupted(undisturbed):
    return undisturbed[0]


POINTS = [
    *[(tiny_run.LocalPool, "run_batch", call) for call in (1, 2, 3, 4, 7)],
    *[(tiny_run.TrainerActor, "step", call) for call in (1, 2, 3, 5, 6)],
    *[(tiny_run.TrainerActor, "save_checkpoint", call) for call in (1, 2, 3)],
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "method", "call"), POINTS)
def test_interrupted_anywhere(run_grpo, uninterrupted, interrupt, owner, method, call, after):
    """Weights, optimizer, schedule, versions, prompts, seeds, metrics, evaluations: to the bit."""
    calls = interrupt(owner, method, call, after=after)
    code, folder = run_grpo(*OPTIONS)
    assert code == 1 and len(calls) >= call
    code, folder = run_grpo(*OPTIONS)
    assert code == 0
    assert outcome(folder) == uninterrupted


def test_going_on_without_the_optimizer_shows(run_grpo, uninterrupted, interrupt, monkeypatch):
    """The control: the comparison sees a state that is not quite restored."""
    interrupt(tiny_run.TrainerActor, "step", 6)
    assert run_grpo(*OPTIONS)[0] == 1
    load = Learner.load_state_dict

    def forgetful(self, state):
        load(self, state and {**state, "optimizer": self._initial_state["optimizer"]})

    monkeypatch.setattr(Learner, "load_state_dict", forgetful)
    code, folder = run_grpo(*OPTIONS)
    assert code == 0
    found = outcome(folder)
    assert found["weights"] != uninterrupted["weights"]
    assert found["state"]["policy_version"] == uninterrupted["state"]["policy_version"]


@pytest.mark.parametrize("call", [1, 4, 6, 9])
def test_stopped_by_a_signal_at_any_moment(run_grpo, uninterrupted, monkeypatch, call):
    """Also in the middle of an update: it is finished, and the checkpoint says what it holds."""
    moments = []

    def with_signal(owner, method):
        original = getattr(owner, method)

        def wrapper(self, *arguments, **keywords):
            moments.append(method)
            if len(moments) == call:
                signal.raise_signal(signal.SIGTERM)
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(owner, method, wrapper)

    with_signal(tiny_run.LocalPool, "run_batch")
    with_signal(tiny_run.TrainerActor, "step")
    code, folder = run_grpo(*OPTIONS)
    assert code == 143
    code, folder = run_grpo(*OPTIONS)
    assert code == 0
    assert outcome(folder) == uninterrupted


def test_a_second_signal_in_an_update_saves_nothing(run_grpo, uninterrupted, monkeypatch):
    """What is half done has no name; the run goes on from the checkpoint before."""
    step, calls = tiny_run.TrainerActor.step, []

    def impatient(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(tiny_run.TrainerActor, "step", impatient)
    code, folder = run_grpo(*OPTIONS)
    assert code == 130
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-000000", "step-000002"]
    assert run_grpo(*OPTIONS)[0] == 0
    assert outcome(folder) == uninterrupted


@pytest.mark.parametrize("error", [TrainerLost, TornWeights])
@pytest.mark.parametrize("call", [1, 3, 4, 6])
def test_a_lost_trainer_changes_nothing_but_the_numbers_of_versions(
    run_grpo, undisturbed, interrupt, capsys, error, call
):
    """F3: the recipe starts another one by itself and repeats the steps since the checkpoint."""
    calls = interrupt(tiny_run.TrainerActor, "step", call, error)
    code, folder = run_grpo(*OPTIONS)
    assert code == 0, capsys.readouterr().err
    assert len(calls) > 6
    assert outcome(folder, versions=False) == undisturbed[1]
    assert "a new trainer goes on after step" in capsys.readouterr().out
    versions = [r["rollout/policy_version"] for r in records(folder) if "reward" in r]
    assert versions == sorted(set(versions)), "a version was used twice"
    assert "**NO**" not in (folder / "report.md").read_text()


def test_a_trainer_that_dies_again_and_again_ends_the_run(run_grpo, monkeypatch, capsys):
    calls = []

    def dies(self, *arguments):
        calls.append(1)
        raise TrainerLost("trainer died during 'step': out of luck")

    monkeypatch.setattr(tiny_run.TrainerActor, "step", dies)
    code, folder = run_grpo("--trainer_restarts=2")
    assert code == 1 and len(calls) == 3
    assert "trainer died during 'step': out of luck" in capsys.readouterr().err
    assert "failed: trainer died" in (folder / "report.md").read_text()


def test_a_damaged_checkpoint_is_passed_over_and_written_again(run_grpo, uninterrupted, capsys):
    _, folder = run_grpo(*OPTIONS)
    damaged = folder / "checkpoints" / "step-000004" / "trainer_state.pt"
    with damaged.open("r+b") as file:
        file.seek(100)
        file.write(b"?")
    assert run_grpo(*OPTIONS)[0] == 0
    assert "step-000004/trainer_state.pt is not what was written" in capsys.readouterr().err
    assert outcome(folder) == uninterrupted


def test_other_settings_are_not_the_same_run(run_grpo, capsys):
    """R8: refused by name, nothing touched; what changes no token may differ."""
    code, folder = run_grpo("--resume=auto")
    before = (folder / "metrics.jsonl").read_bytes()
    assert run_grpo("--resume=auto", "--seed=1")[0] == 1
    assert "holds a run with seed = 0, now it is 1" in capsys.readouterr().err
    assert run_grpo("--resume=auto", "--optimizer.learning_rate=0.5")[0] == 1
    assert "optimizer.learning_rate" in capsys.readouterr().err
    assert run_grpo()[0] == 1
    assert "--resume auto" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before
    code, _ = run_grpo("--resume=auto", "--steps=5", "--rollout.max_batch_size=3")
    assert code == 0
    assert [r["step"] for r in records(folder) if "reward" in r] == [1, 2, 3, 4, 5]


def test_a_finished_run_is_left_as_it_is(run_grpo):
    _, folder = run_grpo(*OPTIONS)
    before = outcome(folder)
    assert run_grpo(*OPTIONS)[0] == 0
    assert outcome(folder) == before


def test_the_report_says_that_it_was_interrupted(run_grpo, interrupt):
    interrupt(tiny_run.TrainerActor, "step", 6)
    run_grpo(*OPTIONS)
    _, folder = run_grpo(*OPTIONS)
    assert "Gone on with after step 2" in (folder / "report.md").read_text()
    assert not any(math.isnan(r["reward"]) for r in records(folder) if "reward" in r)


def test_a_warm_start_that_is_interrupted_twice_keeps_what_it_did(run_grpo, monkeypatch):
    """All of it is before step 1: a later checkpoint of that step must replace the earlier."""
    step, calls = tiny_run.TrainerActor.step, []
    options = ("--warm_start.steps=12", "--steps=1", "--resume=auto")

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) in (4, 8):
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    def done(folder):
        (checkpoint,) = (folder / "checkpoints").glob("step-000000")
        return json.loads((checkpoint / STATE_FILE).read_text())["state"]["warm_start_done"]

    monkeypatch.setattr(tiny_run.TrainerActor, "step", interrupted)
    for expected in (4, 8):
        code, folder = run_grpo(*options)
        assert code == 130 and done(folder) == expected
    assert run_grpo(*options)[0] == 0
    assert len(calls) == 12 + 1, "no step was taken twice"
    assert done(folder) == 12
