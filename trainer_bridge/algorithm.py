"""What the trainer needs to know of an algorithm: a loss, a weight, a correction per token."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PRESETS_MODULE = "recipes.algorithms.presets"


class TokenLosses(Protocol):
    """What a policy loss returns: `loss[T]` with gradient and detached `metrics` of `[T]` each."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def metrics(self) -> dict[str, Tensor]: ...


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLosses]
"""(logprobs[T], old_logprobs[T], advantages[T], sequence_index[T]) -> losses per token."""

TokenWeights = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""How many tokens the policy chose in each rollout of a minibatch `[N]` -> weight of each of these
tokens `[N]`."""

ReferencePenalty = Callable[[Tensor, Tensor], TokenLosses]
"""(logprobs[T], reference_logprobs[T]) -> what is added to the policy's loss, per token."""

ValueLoss = Callable[[Tensor, Tensor, Tensor], TokenLosses]
"""(values[T], old_values[T], returns[T]) -> the critic's loss per token."""

Correction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(proximal_logprobs[T], behaviour_logprobs[T], sequence_index[T]) -> weight[T], no gradient."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The loss of a minibatch is Σ_t token_weights(lengths)[sequence of t] · policy_loss[t].

    Weights are computed once over the minibatch, so micro-batches merely add up. Travels to the
    trainer by pickle: use module-level functions and `functools.partial`.

    correction: if some tokens of a batch are of another version than the trainer's, their
    old_logprobs are what the trainer's weights say before the step, and the loss of each token is
    multiplied by this weight. None: old_logprobs are those sampled under, whatever the version.
    reference_penalty: added to the policy loss of each token (`TrainerConfig.reference`).
    entropy_coefficient: times the entropy of each token's distribution, taken off its loss.

    value_loss: the critic's (`TrainerConfig.critic`); the mean over the tokens of a minibatch.
    policy_loss None trains the critic alone: nothing is published.
    """

    name: str
    policy_loss: PolicyLoss | None
    token_weights: TokenWeights
    correction: Correction | None = None
    reference_penalty: ReferencePenalty | None = None
    entropy_coefficient: float = 0.0
    value_loss: ValueLoss | None = None


def resolve_algorithm(algorithm: Algorithm | str) -> Algorithm:
    """An `Algorithm` as it is; a name is a preset of `recipes.algorithms.presets`.

    The presets are looked up when they are named, so this package does not depend on the recipes.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    preset: Algorithm = importlib.import_module(PRESETS_MODULE).algorithm(algorithm)
    return preset
