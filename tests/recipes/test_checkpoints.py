"""Checkpoints: complete or absent, pruned, with errors that say what to do (F5, F6)."""

import json

import pytest

from recipes.checkpoints import STATE_FILE, CheckpointError, Checkpoints


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
    checkpoints = Checkpoints(tmp_path / "checkpoints", save_weights, keep=2)
    for step in (1, 2, 10, 100):
        path = checkpoints.write(step, {"seed": 7})
    assert [p.name for p in checkpoints.existing()] == ["step-000010", "step-000100"]
    assert path == checkpoints.existing()[-1]
    assert json.loads((path / STATE_FILE).read_text()) == {
        "step": 100,
        "policy_version": 5,
        "seed": 7,
    }
    assert (path / "model.safetensors").read_text() == "weights"


def test_writing_a_step_twice_is_one_checkpoint(tmp_path):
    saved = []

    def save(folder):
        saved.append(folder)
        return save_weights(folder)

    checkpoints = Checkpoints(tmp_path, save)
    assert checkpoints.write(3, {}) == checkpoints.write(3, {})
    assert len(saved) == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_interrupted_while_writing(tmp_path, interruption):
    """The older one stays, nothing looks finished, and the next write clears the remains."""
    def save(folder):
        save_weights(folder)
        if folder.name.endswith("2"):
            raise interruption
        return 1

    checkpoints = Checkpoints(tmp_path, save)
    checkpoints.write(1, {})
    with pytest.raises(interruption):
        checkpoints.write(2, {})
    assert [p.name for p in checkpoints.existing()] == ["step-000001"]
    checkpoints.write(3, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RemoteDiskFull()])
def test_disk_full(tmp_path, error):
    """F6: one sentence that says where and what to do; the older checkpoint is untouched."""
    def save(folder):
        save_weights(folder)
        if folder.name.endswith("2"):
            raise error
        return 1

    checkpoints = Checkpoints(tmp_path, save)
    checkpoints.write(1, {})
    with pytest.raises(CheckpointError, match=r"step-000002: No space left on device.*--output"):
        checkpoints.write(2, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    checkpoints = Checkpoints(tmp_path / "checkpoints", save_weights)
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoints.write(1, {})


def test_an_incomplete_folder_is_not_a_checkpoint(tmp_path):
    (tmp_path / "step-000001").mkdir()
    assert Checkpoints(tmp_path, save_weights).existing() == []


def test_keep_is_checked(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, save_weights, keep=0)
