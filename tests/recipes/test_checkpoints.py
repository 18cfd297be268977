"""Checkpoints: complete or absent, pruned, with errors that say what to do (F5, F6)."""

import json
from pathlib import Path

import pytest

from recipes.checkpoints import STATE_FILE, CheckpointError, Checkpoints, read_checkpoint


def save_weights(folder):
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    return 5


class RemoteDiskFull(RuntimeError):
    """An error as it arrives from another process: a traceback as text, the original as cause."""

    def __init__(self):
        super().__init__("remote process: Traceback (most recent call last): ...")
        self.cause = OSError(28, "No space left on device")


def test_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 10, 100):
        path = checkpoints.write(step, {"seed": 7}, save_weights)
    assert [p.name for p in checkpoints.existing()] == ["step-000010", "step-000100"]
    assert path == checkpoints.existing()[-1]
    content = json.loads((path / STATE_FILE).read_text())
    assert (content["step"], content["policy_version"]) == (100, 5)
    assert content["state"] == {"seed": 7}
    assert content["files"]["model.safetensors"][0] == len("weights")
    assert (path / "model.safetensors").read_text() == "weights"


def test_writing_a_step_twice_is_one_checkpoint(tmp_path):
    saved = []

    def save(folder):
        saved.append(folder)
        return save_weights(folder)

    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.write(3, {}, save) == checkpoints.write(3, {}, save)
    assert len(saved) == 1


def test_another_state_of_a_step_replaces_it(tmp_path):
    """A warm start is all before step 1."""
    checkpoints = Checkpoints(tmp_path)
    for done in (4, 9):
        checkpoints.write(0, {"warm_start_done": done}, save_weights)
    assert checkpoints.newest(print).state == {"warm_start_done": 9}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000"]


@pytest.mark.parametrize("renames", [1, 2, 3])
@pytest.mark.parametrize("killed", [KeyboardInterrupt, OSError])
def test_killed_while_one_is_replaced(tmp_path, monkeypatch, renames, killed):
    """After any of the renames: the newest is the old one or the new one, whole."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(0, {"done": 4}, save_weights)
    rename, calls = Path.rename, []

    def cut(self, target):
        calls.append(target)
        if len(calls) == renames:
            raise killed("at a rename")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", cut)
    if renames < 3:
        with pytest.raises(KeyboardInterrupt if killed is KeyboardInterrupt else CheckpointError):
            checkpoints.write(0, {"done": 9}, save_weights)
    else:
        checkpoints.write(0, {"done": 9}, save_weights)
    monkeypatch.undo()
    assert checkpoints.newest(print).state == {"done": 9 if renames == 3 else 4}
    checkpoints.write(0, {"done": 12}, save_weights)
    assert checkpoints.newest(print).state == {"done": 12}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_interrupted_while_writing(tmp_path, interruption):
    """The older one stays, nothing looks finished, and the next write clears the remains."""
    def save(folder):
        save_weights(folder)
        if folder.name.endswith("2"):
            raise interruption
        return 1

    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, {}, save)
    with pytest.raises(interruption):
        checkpoints.write(2, {}, save)
    assert [p.name for p in checkpoints.existing()] == ["step-000001"]
    checkpoints.write(3, {}, save)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RemoteDiskFull()])
def test_disk_full(tmp_path, error):
    """F6: one sentence that says where and what to do; the older checkpoint is untouched."""
    def save(folder):
        save_weights(folder)
        if folder.name.endswith("2"):
            raise error
        return 1

    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, {}, save)
    with pytest.raises(CheckpointError, match=r"step-000002: No space left on device.*--output"):
        checkpoints.write(2, {}, save)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoints.write(1, {}, save_weights)


def test_an_incomplete_folder_is_not_a_checkpoint(tmp_path):
    (tmp_path / "step-000001").mkdir()
    assert Checkpoints(tmp_path).existing() == []


def test_keep_is_checked(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_read_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    warnings = []
    assert checkpoints.newest(warnings.append) is None
    folder = checkpoints.write(3, {"seed": 7}, save_weights)
    found = checkpoints.newest(warnings.append)
    assert (found.folder, found.step, found.policy_version) == (folder, 3, 5)
    assert found.state == {"seed": 7} and warnings == []


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    path.write_bytes(b"W" + path.read_bytes()[1:])


@pytest.mark.parametrize("name", ["model.safetensors", STATE_FILE])
@pytest.mark.parametrize("damage", [cut_off, flip, lambda path: path.unlink()])
def test_a_damaged_one_is_named_and_passed_over(tmp_path, name, damage):
    """F6: one byte is enough; an earlier one is taken, and if there is none the run says so."""
    checkpoints = Checkpoints(tmp_path)
    earlier = checkpoints.write(1, {}, save_weights)
    damaged = checkpoints.write(2, {}, save_weights)
    damage(damaged / name)
    with pytest.raises(CheckpointError, match=r"step-000002.*delete .* to go on without it"):
        read_checkpoint(damaged)
    warnings = []
    assert checkpoints.newest(warnings.append).folder == earlier
    if (damaged / STATE_FILE).exists():
        (warning,) = warnings
        assert "step-000002" in warning
    damage(earlier / "model.safetensors")
    with pytest.raises(CheckpointError, match="step-000001"):
        checkpoints.newest(warnings.append)
