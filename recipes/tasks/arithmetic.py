"""Arithmetic questions from reasoning-gym for a chat model: `chain_sum` and `basic_arithmetic`.

A question belongs to the held-out set or to the training set by a hash of its own text, so the
two are disjoint whatever the seeds and sizes. (Two seeds of reasoning-gym would not do: item i of
seed s is item i - 1 of seed s + 1.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import Any

import reasoning_gym
from datasets import Dataset

from recipes.config import TaskConfig
from recipes.tasks.task import RewardFunction, Row, assert_disjoint

GENERATORS = ("chain_sum", "basic_arithmetic")
INSTRUCTION = "Answer with the number only."

_HELDOUT_SHARE = 5
_ENDLESS = 2**31
_FRUITLESS_ATTEMPTS = 5000
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MARK = r"(?:<answer>|\\boxed\{|####|answer is|=)[\s:*$]*"
_MARKED = re.compile(f"{_MARK}({_NUMBER.pattern})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ArithmeticTask:
    """A `Task` over questions with one number as the answer.

    Rows: `prompt` (one user message), `question`, `answer` (text of the number).
    """

    name: str
    train: Dataset
    heldout: Dataset
    rewards: Mapping[str, RewardFunction] = field(default_factory=lambda: {"correct": correct})

    def __post_init__(self) -> None:
        assert_disjoint(self)


def arithmetic_task(
    generator: str = "chain_sum",
    *,
    train_size: int = 2000,
    heldout_size: int = 100,
    min_terms: int = 2,
    max_terms: int = 2,
    min_digits: int = 1,
    max_digits: int = 2,
    seed: int = 0,
) -> ArithmeticTask:
    """Distinct questions in the generator's seeded order: the first sizes of each half.

    ValueError for an unknown generator, and when the generator has fewer distinct questions of
    this difficulty than were asked for.
    """
    if generator not in GENERATORS:
        raise ValueError(f"generator must be one of {', '.join(GENERATORS)}, got {generator!r}")
    if train_size < 1 or heldout_size < 1:
        raise ValueError(
            f"train_size and heldout_size must be at least 1, got {train_size}, {heldout_size}"
        )
    source = reasoning_gym.create_dataset(
        generator,
        seed=seed,
        size=_ENDLESS,
        min_terms=min_terms,
        max_terms=max_terms,
        min_digits=min_digits,
        max_digits=max_digits,
    )
    train: dict[str, dict[str, Any]] = {}
    heldout: dict[str, dict[str, Any]] = {}
    last_new = 0
    for index in range(_ENDLESS):
        complete = len(train) == train_size and len(heldout) == heldout_size
        if complete or index - last_new > _FRUITLESS_ATTEMPTS:
            break
        entry = source[index]
        question = entry["question"]
        rows, size = (heldout, heldout_size) if _is_heldout(question) else (train, train_size)
        if len(rows) < size and question not in rows:
            rows[question] = _row(question, entry["answer"])
            last_new = index
    for split, rows, size in (("train", train, train_size), ("heldout", heldout, heldout_size)):
        if len(rows) < size:
            raise ValueError(
                f"{generator} has only about {len(rows)} distinct {split} questions of this "
                f"difficulty, but {split}_size is {size}; lower it, or raise max_terms, max_digits"
            )
    return ArithmeticTask(
        name=generator,
        train=Dataset.from_list(list(train.values())),
        heldout=Dataset.from_list(list(heldout.values())),
    )


def load(config: TaskConfig, seed: int) -> ArithmeticTask:
    """The task that `task.name` and the sizes of a configuration ask for."""
    return arithmetic_task(
        config.name,
        train_size=config.train_size,
        heldout_size=config.heldout_size,
        min_terms=config.min_terms,
        max_terms=config.max_terms,
        min_digits=config.min_digits,
        max_digits=config.max_digits,
        seed=seed,
    )


def extract_number(completion: str) -> str | None:
    """The number a completion gives as its answer, without thousands separators, or None.

    The last number that is marked as an answer (`<answer>`, `\\boxed{`, `####`, `answer is`, `=`);
    without a mark, the last number of the text. The sign belongs to a number only where no digit
    or letter precedes it, so "12-5" ends in 5 and "= -7" in -7.
    """
    marked = _MARKED.findall(completion)
    found = marked or _NUMBER.findall(completion)
    return found[-1].replace(",", "") if found else None


def correct(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]
) -> list[float | None]:
    """1.0 where the extracted number equals the row's `answer` in value ("+07.0" is 7), else 0."""
    return [
        1.0 if _same_number(extract_number(completion), row["answer"]) else 0.0
        for completion, row in zip(completions, rows, strict=True)
    ]


def _same_number(candidate: str | None, answer: str) -> bool:
    if candidate is None:
        return False
    try:
        return Decimal(candidate) == Decimal(answer)
    except InvalidOperation:
        return False


def _is_heldout(question: str) -> bool:
    digest = blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELDOUT_SHARE == 0


def _row(question: str, answer: str) -> dict[str, Any]:
    content = f"{question} {INSTRUCTION}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "question": question,
        "answer": answer,
    }
