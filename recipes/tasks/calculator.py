"""The same tiny policy with a tool: it learns to ask a calculator instead of guessing.

Problems are sums like those of `embedded.py`, of three or more numbers. A turn that ends in `=` is
a question to the calculator, which adds or subtracts two numbers and answers; any other turn is the
policy's answer and ends the conversation.

    48+75-69=                a guess
     51
    48+75-69=                asked: two numbers at a time, the last result first
    48+75=                                                                        (the policy)
    123                                                                           (the calculator)
    123-69=                                                                       (the policy)
    54                                                                            (the calculator)
    54                                                                            (the policy)

Demonstrations are guesses for the most part, so the policy that imitates them guesses.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from datasets import Dataset

from recipes.config import TaskConfig
from recipes.environment import Done, Environment, Observation
from recipes.tasks.embedded import GUESS_ERROR, GUESS_SHARE, ProblemSource, terms_of
from recipes.tasks.task import RewardFunction, Row, assert_disjoint

_QUESTION = re.compile(r"(-?\d+)([+-]\d+)=")


class Calculator:
    """The `Environment`. A conversation earns 1 if its last turn is the answer, else 0."""

    def reset(self, row: Row) -> str:
        self._answer = str(row["answer"])
        return str(row["prompt"])

    def step(self, token_ids: Sequence[int], text: str) -> Observation | Done:
        if text.endswith("="):
            return Observation(f"{calculated(text)}\n")
        return Done(float(text.strip(" ") == self._answer))


@dataclass(frozen=True, slots=True)
class CalculatorTask:
    """A `Task` that is `Interactive` and `Demonstrates`. Rows are those of `EmbeddedTask`."""

    problems: ProblemSource
    train: Dataset
    heldout: Dataset
    name: str = "calculator"
    rewards: Mapping[str, RewardFunction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert_disjoint(self)

    def environment(self) -> Environment:
        return Calculator()

    def demonstrations(
        self, num_samples: int, seed: int
    ) -> Iterator[tuple[str, str | Sequence[str]]]:
        """`num_samples` conversations, a pure function of `seed`; a share `GUESS_SHARE` of one
        turn, a guess that is right or off by up to `GUESS_ERROR`."""
        choices = random.Random(f"demonstrations {seed}")
        for row in islice(self.problems.stream("demonstrations", seed, False), num_samples):
            if choices.random() < GUESS_SHARE:
                guess = int(row["answer"]) + choices.randint(-GUESS_ERROR, GUESS_ERROR)
                yield row["prompt"], f" {guess}"
            else:
                yield row["prompt"], asked(row["expression"])


def load(config: TaskConfig, seed: int) -> CalculatorTask:
    """The task of a configuration. The held-out problems are the same for every seed."""
    problems = ProblemSource(
        config.min_terms, config.max_terms, config.min_digits, config.max_digits
    )
    return CalculatorTask(
        problems=problems,
        train=problems.distinct("train", seed, False, config.train_size),
        heldout=problems.distinct("heldout", 0, True, config.heldout_size),
    )


def calculated(question: str) -> str:
    """What the calculator answers to `48+75=`; nothing to what is no sum of two numbers."""
    numbers = _QUESTION.fullmatch(question)
    return "" if numbers is None else str(int(numbers[1]) + int(numbers[2]))


def asked(expression: str) -> list[str]:
    """The conversation that finds the sum: questions and answers in turn, then the result."""
    (_, result), *rest = terms_of(expression)
    turns = []
    for sign, digits in rest:
        turns.append(f"{result}{sign}{digits}=")
        result = calculated(turns[-1])
        turns.append(f"{result}\n")
    return [*turns, result]
