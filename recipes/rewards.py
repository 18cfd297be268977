"""From completions to rewards: the task's functions, checked, and summed per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.algorithms.advantages import reward_array
from recipes.tasks.task import RewardFunction, Row, prompt_text
from rollout import RolloutBatch
from rollout.tokenizer import Tokenizer

UNFINISHED = frozenset({"rejected", "error", "aborted"})
ENVIRONMENT = "environment"


class RewardError(ValueError):
    """A reward function broke its contract; the message names the function and the sample."""


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Rewards of N samples. `total[i]` is the sum of the functions that scored sample i, or None
    where none did; `columns` has the float64[N] of each function, NaN for None."""

    total: list[float | None]
    columns: dict[str, NDArray[np.float64]]

    @staticmethod
    def concat(tables: Sequence[RewardTable]) -> RewardTable:
        """Tables of the same functions end to end."""
        return RewardTable(
            [reward for table in tables for reward in table.total],
            {name: np.concatenate([t.columns[name] for t in tables]) for name in tables[0].columns},
        )

    def select(self, indices: NDArray[np.int64]) -> RewardTable:
        """The samples at `indices`, in that order."""
        return RewardTable(
            [self.total[i] for i in indices], {n: c[indices] for n, c in self.columns.items()}
        )

    def of_sample(self, index: int) -> dict[str, float | None]:
        """What each function gave one sample."""
        return {
            name: None if np.isnan(column[index]) else float(column[index])
            for name, column in self.columns.items()
        }

    def metrics(self) -> dict[str, float]:
        """`rewards/<function>/{mean,std}` over the samples each function scored."""
        values: dict[str, float] = {}
        for name, column in self.columns.items():
            scored = column[~np.isnan(column)]
            if len(scored):
                values[f"rewards/{name}/mean"] = float(scored.mean())
                values[f"rewards/{name}/std"] = float(scored.std())
        return values


def score_completions(
    functions: Mapping[str, RewardFunction],
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    finish_reasons: Sequence[str],
) -> RewardTable:
    """Call every reward function once on the samples that finished, and add up per sample.

    A sample that was rejected, aborted or ended in an error is not shown to the functions and has
    no reward. RewardError when a function returns the wrong number of rewards, or one that is
    neither None nor a finite number; an exception of the function itself passes unchanged.
    """
    num_samples = len(completions)
    if not len(prompts) == len(rows) == len(finish_reasons) == num_samples:
        raise ValueError(
            f"prompts ({len(prompts)}), completions ({num_samples}), rows ({len(rows)}) and "
            f"finish_reasons ({len(finish_reasons)}) must have one entry per sample"
        )
    shown = [i for i, reason in enumerate(finish_reasons) if reason not in UNFINISHED]
    columns: dict[str, NDArray[np.float64]] = {}
    for name, function in functions.items():
        rewards = function(
            [prompts[i] for i in shown], [completions[i] for i in shown], [rows[i] for i in shown]
        )
        if len(rewards) != len(shown):
            raise RewardError(
                f"reward function {name!r} returned {len(rewards)} rewards "
                f"for {len(shown)} completions"
            )
        column = np.full(num_samples, np.nan)
        column[shown] = _checked(f"reward function {name!r}", rewards)
        columns[name] = column
    return RewardTable(_sum_scored(columns, num_samples), columns)


def score_rollouts(
    functions: Mapping[str, RewardFunction],
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    batch: RolloutBatch,
    earned: Sequence[float | None] | None = None,
) -> tuple[list[str], RewardTable]:
    """The text of each rollout and what it earns. rows: those that the batch's prompts came from,
    one for each. earned: what an environment gave each rollout, the column `ENVIRONMENT`; one that
    it cannot score has no reward, whatever the functions say."""
    completions = [tokenizer.decode(batch.tokens(i).tolist()) for i in range(len(batch))]
    of_sample = [rows[i] for i in batch.prompt_index]
    prompts = [prompt_text(row["prompt"]) for row in of_sample]
    table = score_completions(functions, prompts, completions, of_sample, batch.finish_reasons)
    if earned is not None:
        table = _with_environment(table, earned)
    return completions, table


def teaching_samples(finish_reasons: Sequence[str], mask_truncated: bool) -> NDArray[np.bool_]:
    """Which samples may enter the loss, `bool[N]`.

    Never one that was rejected, aborted or ended in an error: its tokens are not the policy's
    answer. With `mask_truncated` also not one that ran into its length limit.
    """
    dropped = UNFINISHED | {"length"} if mask_truncated else UNFINISHED
    return np.array([reason not in dropped for reason in finish_reasons], dtype=np.bool_)


def _with_environment(table: RewardTable, earned: Sequence[float | None]) -> RewardTable:
    if ENVIRONMENT in table.columns:
        raise RewardError(
            f"a reward function is called {ENVIRONMENT!r}, the name of what the task's "
            "environment gives; choose another"
        )
    columns = {ENVIRONMENT: _checked("the environment", earned), **table.columns}
    total = [
        None if of_environment is None else reward
        for of_environment, reward in zip(earned, _sum_scored(columns, len(earned)), strict=True)
    ]
    return RewardTable(total, columns)


def _checked(who: str, rewards: Sequence[float | None]) -> NDArray[np.float64]:
    try:
        return reward_array(rewards)
    except ValueError as error:
        raise RewardError(f"{who}: {error}") from None


def _sum_scored(
    columns: Mapping[str, NDArray[np.float64]], num_samples: int
) -> list[float | None]:
    total: list[float | None] = [None] * num_samples
    for column in columns.values():
        for sample in np.flatnonzero(~np.isnan(column)):
            total[sample] = (total[sample] or 0.0) + float(column[sample])
    return total
