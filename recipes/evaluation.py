"""Held-out evaluation on the engines that train: greedy, one completion per prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from recipes.rewards import score_completions
from recipes.tasks.task import Task, encode_prompt, prompt_text
from rollout import RolloutBatch, SamplingParams
from rollout.tokenizer import Tokenizer

RunBatch: TypeAlias = Callable[[list[list[int]], SamplingParams], RolloutBatch]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation. `reward` is the mean over scored prompts (NaN when none was scored);
    `examples` are the first few `(prompt, completion, reward)`."""

    reward: float
    columns: dict[str, float]
    num_prompts: int
    truncated: float
    seconds: float
    examples: tuple[tuple[str, str, float | None], ...]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Evaluation:
        """What `dataclasses.asdict` made, also after a way through JSON."""
        examples = tuple(tuple(example) for example in values["examples"])
        return Evaluation(**{**values, "examples": examples})

    def metrics(self) -> dict[str, float]:
        values = {
            "heldout/reward": self.reward,
            "heldout/truncated_ratio": self.truncated,
            "timing_s/evaluation": self.seconds,
        }
        return values | {
            f"heldout/{name}": value
            for name, value in self.columns.items()
            if name.endswith("/mean")
        }


def evaluate(
    run_batch: RunBatch,
    tokenizer: Tokenizer,
    task: Task,
    *,
    max_tokens: int,
    num_prompts: int | None = None,
    num_examples: int = 5,
) -> Evaluation:
    """Complete the first `num_prompts` held-out prompts greedily and score them.

    Changes no weights and uses no random numbers, so equal weights give an equal evaluation.
    """
    started = time.monotonic()
    rows: Sequence[Any] = [
        task.heldout[i] for i in range(min(num_prompts or len(task.heldout), len(task.heldout)))
    ]
    prompts = [prompt_text(row["prompt"]) for row in rows]
    batch = run_batch(
        [encode_prompt(tokenizer, row["prompt"]) for row in rows],
        SamplingParams(n=1, temperature=0.0, max_tokens=max_tokens),
    )
    reasons = batch.finish_reasons
    completions = [tokenizer.decode(batch.tokens(i).tolist()) for i in range(len(batch))]
    table = score_completions(task.rewards, prompts, completions, rows, reasons)
    scored = [reward for reward in table.total if reward is not None]
    return Evaluation(
        reward=float(np.mean(scored)) if scored else float("nan"),
        columns=table.metrics(),
        num_prompts=len(rows),
        truncated=reasons.count("length") / max(len(reasons), 1),
        seconds=time.monotonic() - started,
        examples=tuple(
            list(zip(prompts, completions, table.total, strict=True))[:num_examples]
        ),
    )
