"""Held-out evaluation on the engines that train: greedy, and by samples (pass@k)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from recipes.episodes import RunBatch, sample_rows
from recipes.rewards import RewardTable, score_rollouts
from recipes.tasks.task import Row, Task, prompt_text
from rollout import RolloutBatch, SamplingParams
from rollout.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation. `reward` is the mean over scored prompts (NaN when none was scored);
    `examples` are the first few `(prompt, completion, reward)`. These, `columns` and `truncated`
    are of the greedy completions.

    pass_rates: `pass@<k>`, where completions were sampled too; tasks: `reward` and `pass@<k>` of
    the prompts of each task, where rows name theirs. What nothing could be scored for is absent.
    """

    reward: float
    columns: dict[str, float]
    num_prompts: int
    truncated: float
    seconds: float
    examples: tuple[tuple[str, str, float | None], ...]
    pass_rates: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Evaluation:
        """What `dataclasses.asdict` made, also after a way through JSON."""
        examples = tuple(tuple(example) for example in values["examples"])
        return Evaluation(**{**values, "examples": examples})

    def metrics(self) -> dict[str, float]:
        """`heldout/...`, all finite; `heldout/<task>/...` of each task."""
        values = {"reward": self.reward, "truncated_ratio": self.truncated, **self.pass_rates}
        values |= {n: value for n, value in self.columns.items() if n.endswith("/mean")}
        for task, rates in self.tasks.items():
            values |= {f"{task}/{name}": rate for name, rate in rates.items()}
        finite = {f"heldout/{n}": value for n, value in values.items() if math.isfinite(value)}
        return {**finite, "timing_s/evaluation": self.seconds}


def evaluate(
    run_batch: RunBatch,
    tokenizer: Tokenizer,
    task: Task,
    *,
    max_tokens: int,
    max_turns: int = 8,
    num_prompts: int | None = None,
    num_examples: int = 5,
    num_samples: int = 0,
    pass_at: Sequence[int] = (1,),
    temperature: float = 1.0,
    pass_reward: float = 1.0,
    seed: int = 0,
) -> Evaluation:
    """Complete the first `num_prompts` held-out prompts greedily and score them.

    With `num_samples` also sample as many completions of each at `temperature`, and estimate
    pass@k for every k of `pass_at`: the chance that one of k completions has a reward of at least
    `pass_reward`. A completion without a reward is not counted; a prompt with fewer than k that
    are is left out of pass@k. Rows with a column `task` are also reported by its values.

    Changes no weights, and all noise comes from `seed`, so equal weights give an equal evaluation.
    ValueError for a k that is not in 1..num_samples.
    """
    if num_samples and not all(1 <= k <= num_samples for k in pass_at):
        raise ValueError(f"pass_at must lie in 1..num_samples ({num_samples}), got {pass_at}")
    started = time.monotonic()
    rows: Sequence[Row] = [
        task.heldout[i] for i in range(min(num_prompts or len(task.heldout), len(task.heldout)))
    ]
    greedy = SamplingParams(n=1, temperature=0.0, max_tokens=max_tokens)
    batch, completions, table = _complete(run_batch, tokenizer, task, rows, greedy, max_turns)
    tallies = [Tally(0, 0)] * len(rows)
    if num_samples:
        params = SamplingParams(
            n=num_samples, temperature=temperature, max_tokens=max_tokens, seed=seed
        )
        sampled, _, rewards = _complete(run_batch, tokenizer, task, rows, params, max_turns)
        tallies = _tallies(rewards.total, sampled.prompt_index.tolist(), len(rows), pass_reward)

    rates = _rates(table.total, tallies, pass_at)
    prompts = [prompt_text(row["prompt"]) for row in rows]
    return Evaluation(
        reward=rates.pop("reward", math.nan),
        columns=table.metrics(),
        num_prompts=len(rows),
        truncated=batch.finish_reasons.count("length") / max(len(batch), 1),
        seconds=time.monotonic() - started,
        examples=tuple(
            list(zip(prompts, completions, table.total, strict=True))[:num_examples]
        ),
        pass_rates=rates,
        tasks={
            name: _rates([table.total[i] for i in at], [tallies[i] for i in at], pass_at)
            for name, at in _rows_by_task(rows).items()
        },
    )


def pass_at_k(correct: int, num_samples: int, k: int) -> float:
    """The chance that k of the samples, drawn without replacement, hold a correct one.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n samples with c correct ones
    (Chen et al. 2021, arXiv:2107.03374). In whole numbers, rounded once. ValueError unless
    0 <= correct <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"correct must lie in 0..num_samples and k in 1..num_samples, "
            f"got correct {correct}, num_samples {num_samples}, k {k}"
        )
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - correct, k)) / subsets


class Tally(NamedTuple):
    """Samples of one prompt: those that reached the reward, among those with a reward."""

    correct: int
    scored: int


def _complete(
    run_batch: RunBatch,
    tokenizer: Tokenizer,
    task: Task,
    rows: Sequence[Row],
    params: SamplingParams,
    max_turns: int,
) -> tuple[RolloutBatch, list[str], RewardTable]:
    """Rollouts of the rows' prompts, with their text and rewards."""
    batch, earned = sample_rows(run_batch, tokenizer, task, rows, params, max_turns)
    completions, table = score_rollouts(task.rewards, tokenizer, rows, batch, earned)
    return batch, completions, table


def _tallies(
    rewards: Sequence[float | None],
    prompt_index: Sequence[int],
    num_prompts: int,
    pass_reward: float,
) -> list[Tally]:
    correct, scored = [0] * num_prompts, [0] * num_prompts
    for prompt, reward in zip(prompt_index, rewards, strict=True):
        if reward is not None:
            scored[prompt] += 1
            correct[prompt] += reward >= pass_reward
    return [Tally(*counts) for counts in zip(correct, scored, strict=True)]


def _rates(
    rewards: Sequence[float | None], tallies: Sequence[Tally], pass_at: Sequence[int]
) -> dict[str, float]:
    """Means over prompts, of `reward` and each `pass@<k>`; absent where there is no prompt."""
    values = {"reward": [reward for reward in rewards if reward is not None]}
    for k in pass_at:
        values[f"pass@{k}"] = [pass_at_k(*tally, k) for tally in tallies if tally.scored >= k]
    return {name: float(np.mean(found)) for name, found in values.items() if found}


def _rows_by_task(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Indices of the rows that name a task, by that name."""
    places: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.get("task") is not None:
            places.setdefault(str(row["task"]), []).append(index)
    return places
