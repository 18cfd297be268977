"""What a task is: two disjoint datasets of prompts, and named reward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from datasets import Dataset

from rollout.tokenizer import Tokenizer

Row: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
RewardFunction: TypeAlias = Callable[
    [Sequence[str], Sequence[str], Sequence[Row]], Sequence[float | None]
]
"""`(prompts, completions, rows) -> rewards`, one entry per sample.

`prompts` and `completions` are text; `rows` are the dataset rows the prompts came from. None
says "cannot be scored": the sample is left out of its group's baseline and of the loss.
"""


class Task(Protocol):
    """Read-only. Rows carry `prompt`: text, or a list of chat messages (`role`, `content`)."""

    @property
    def name(self) -> str:
        """One word, for titles."""

    @property
    def train(self) -> Dataset:
        """Rows to sample training prompts from."""

    @property
    def heldout(self) -> Dataset:
        """Rows that are never trained on; no prompt of `train` occurs here."""

    @property
    def rewards(self) -> Mapping[str, RewardFunction]:
        """Reward functions by name; a sample's reward is their sum."""


@runtime_checkable
class Demonstrates(Protocol):
    """A task that can also show what good completions look like."""

    def demonstrations(
        self, num_samples: int, seed: int
    ) -> Iterable[tuple[Prompt, str | Sequence[Prompt]]]:
        """`num_samples` pairs of a prompt that is not held out and a completion, from `seed`. A
        conversation is a list: what the policy says, what it is told (text, or chat messages), what
        it says, and so on."""


def prompt_text(prompt: Prompt) -> str:
    """A prompt as plain text, for reward functions and reports."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: text as it is, chat messages through the model's own template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True)


def with_rewards(task: Task, rewards: Mapping[str, RewardFunction]) -> Task:
    """The same prompts, with demonstrations and environment if it has any, and other reward
    functions."""
    fields: dict[str, Any] = {"name": task.name, "train": task.train, "heldout": task.heldout}
    for extra in ("demonstrations", "environment"):
        if hasattr(task, extra):
            fields[extra] = getattr(task, extra)
    return cast(Task, SimpleNamespace(**fields, rewards=rewards))


def assert_disjoint(task: Task) -> None:
    """ValueError naming the first prompt that is both trained on and held out."""
    trained = {prompt_text(prompt) for prompt in task.train["prompt"]}
    for row, prompt in enumerate(task.heldout["prompt"]):
        if prompt_text(prompt) in trained:
            raise ValueError(
                f"task {task.name!r}: held-out row {row} is also a training prompt: "
                f"{prompt_text(prompt)!r}"
            )
