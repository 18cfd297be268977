"""What the tests over real actors share: a policy, prompts, a small run, an engine beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout import EngineConfig, RolloutEngine, SamplingParams, load_pretrained
from trainer_bridge import Colocation, TrainerConfig

PROMPTS = [[5, 6, 7], [9] * 40, [30, 2], [8], [11, 12, 13, 14], [70] * 17]
PARAMS = SamplingParams(n=4, max_tokens=24, seed=5)


def start(
    folder: Path, actors: int = 2, undo: bool | None = None, **settings: Any
) -> Colocation:
    return Colocation(
        folder,
        rollout_actors=actors,
        trainer=TrainerConfig(learning_rate=1e-3, num_threads=1, undo=undo),
        engine=EngineConfig(max_batch_size=8, num_threads=1),
        **settings,
    )


def in_process(folder: Path, policy_version: int = 0) -> list:
    """The rollouts of an engine without actors."""
    model, tokenizer = load_pretrained(folder)
    engine = RolloutEngine(model, tokenizer, policy_version=policy_version)
    return engine.run_batch(PROMPTS, PARAMS, return_details=True)


def scale_norm(model, factor: float = 1.5) -> str:
    model.model.norm.weight.mul_(factor)
    return "scaled"
