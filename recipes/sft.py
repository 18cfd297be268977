"""Warm start: a few supervised steps on demonstrations, through the same trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from recipes.algorithms import presets
from recipes.environment import Content, encode_observation, end_of_turn
from recipes.tasks.task import Demonstrates, encode_prompt
from rollout import RolloutBatch
from rollout.tokenizer import Tokenizer
from trainer_bridge.algorithm import Algorithm


class SupervisedTrainer(Protocol):
    """The part of the trainer this needs."""

    def step(
        self, batch: RolloutBatch, advantages: None, algorithm: Algorithm
    ) -> dict[str, float]:
        """One update on the batch, published as a new policy version; its metrics."""


def warm_start(
    trainer: SupervisedTrainer, batches: Iterable[RolloutBatch]
) -> Iterator[dict[str, float]]:
    """Maximum-likelihood steps over `batches` (`RolloutBatch.from_demonstrations`), in order.

    Lazy: each step is taken when its metrics are asked for. Every step is a real update and
    raises the policy version.
    """
    algorithm = presets.SFT
    for batch in batches:
        yield trainer.step(batch, None, algorithm)


def demonstration_batches(
    task: Demonstrates, tokenizer: Tokenizer, num_batches: int, batch_size: int, seed: int
) -> Iterator[RolloutBatch]:
    """The task's demonstrations as batches of `batch_size`, each turn closed by `end_of_turn`. What
    the policy is told in a conversation is read and not imitated."""
    samples = iter(task.demonstrations(num_batches * batch_size, seed))
    for _ in range(num_batches):
        pairs = list(islice(samples, batch_size))
        answers = [
            _encode(tokenizer, completion, not isinstance(prompt, str))
            for prompt, completion in pairs
        ]
        yield RolloutBatch.from_demonstrations(
            [encode_prompt(tokenizer, prompt) for prompt, _ in pairs],
            [token_ids for token_ids, _ in answers],
            [mask for _, mask in answers],
        )


def _encode(
    tokenizer: Tokenizer, completion: str | Sequence[Content], chat: bool
) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them the policy says."""
    turns = [completion] if isinstance(completion, str) else completion
    end = end_of_turn(tokenizer, chat)
    token_ids: list[int] = []
    mask: list[bool] = []
    for place, text in enumerate(turns):
        says = place % 2 == 0
        if says:
            assert isinstance(text, str), "what the policy says is text"
            ids = tokenizer.encode(text) + end
        else:
            ids = encode_observation(tokenizer, text, token_ids[-1])
        token_ids += ids
        mask += [says] * len(ids)
    return token_ids, mask
