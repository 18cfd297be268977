"""The loss of one micro-batch: what an `Algorithm` says per token, weighted and summed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_bridge.algorithm import Algorithm
from trainer_bridge.metrics import StepMetrics
from trainer_bridge.token_columns import Column, TokenColumns
from trainer_bridge.trajectory import MicroBatch


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What a loss reads beside the log-probs of the moment, fp32 `[total tokens]` each."""

    advantages: Column
    old_logprobs: Column
    columns: TokenColumns
    correction: Column | None = None


def column(values: Column, index: NDArray[np.int64], device: torch.device) -> Tensor:
    """The entries at `index`, as a tensor on the model's device."""
    return torch.from_numpy(values[index]).to(device)


def policy_loss(
    algorithm: Algorithm,
    logprobs: Tensor,
    entropy: Tensor,
    tokens: LossTokens,
    micro: MicroBatch,
    weights: Column,
    metrics: StepMetrics,
) -> Tensor:
    """One micro-batch's part of the minibatch's loss, a scalar with grad.

    logprobs, entropy `[T]` of the pack; weights `[N]`: of each token of a rollout.
    """
    assert algorithm.policy_loss is not None
    device, index = logprobs.device, micro.token_index
    losses = algorithm.policy_loss(
        logprobs,
        column(tokens.old_logprobs, index, device),
        column(tokens.advantages, index, device),
        torch.from_numpy(micro.rollout_index).to(device),
    )
    metrics.mean_of("entropy", entropy.detach())
    _note(losses.metrics, metrics)
    loss = losses.loss
    if algorithm.reference_penalty is not None:
        assert tokens.columns.reference_logprobs is not None
        reference = column(tokens.columns.reference_logprobs, index, device)
        penalty = algorithm.reference_penalty(logprobs, reference)
        _note(penalty.metrics, metrics)
        loss = loss + penalty.loss
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * entropy
    weight = column(weights, micro.rollout_index, device)
    if tokens.correction is not None:
        weight = weight * column(tokens.correction, index, device)
    return (loss * weight).sum()


def value_loss(
    algorithm: Algorithm,
    values: Tensor,
    tokens: LossTokens,
    micro: MicroBatch,
    num_tokens: int,
    metrics: StepMetrics,
) -> Tensor:
    """One micro-batch's part of the mean over the minibatch's `num_tokens`, a scalar with grad."""
    assert algorithm.value_loss is not None
    assert tokens.columns.values is not None and tokens.columns.returns is not None
    losses = algorithm.value_loss(
        values,
        column(tokens.columns.values, micro.token_index, values.device),
        column(tokens.columns.returns, micro.token_index, values.device),
    )
    metrics.mean_of("critic/vf_loss", losses.loss.detach())
    _note(losses.metrics, metrics)
    return losses.loss.sum() / num_tokens


def _note(values: dict[str, Tensor], metrics: StepMetrics) -> None:
    for name, per_token in values.items():
        metrics.mean_of(name, per_token)
