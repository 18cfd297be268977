"""The trainer's part of a checkpoint: what the next step depends on beside the weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.model.files import CheckpointError
from rollout.model.weight_files import save_state

STATE_FILE = "trainer_state.pt"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """policy_version: of the weights beside it. learner: `Learner.state_dict`."""

    policy_version: int
    learner: Mapping[str, Any]


def write_trainer_state(
    folder: Path, policy_version: int, learner: Mapping[str, Any]
) -> None:
    """Into a checkpoint that is being written; it is not complete before its writer says so."""
    state = {"policy_version": policy_version, "learner": dict(learner)}
    save_state(state, folder / STATE_FILE)


def read_trainer_state(folder: Path) -> TrainerState:
    """CheckpointError if the folder has none, as a plain model folder, or one that is damaged."""
    path = folder / STATE_FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return TrainerState(int(state["policy_version"]), state["learner"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so training cannot go on from there; as first weights of a "
            "new run, give the folder as --model"
        ) from None
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read (damaged or cut off?): {error}") from error
