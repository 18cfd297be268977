"""The training step: packed forward and backward, then one optimizer step inside the gate."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from attention import AttentionBackend
from rollout.model import Decoder, attention_for
from rollout.rollout_batch import RolloutBatch
from trainer_bridge.algorithm import Algorithm, resolve_algorithm
from trainer_bridge.metrics import StepMetrics
from trainer_bridge.receipt import PublicationReceipt
from trainer_bridge.scoring import score_micro_batch
from trainer_bridge.trainer_config import TrainerConfig
from trainer_bridge.trajectory import MicroBatch, micro_batches


class Publisher(Protocol):
    """The writer's side of a gate, with the receipt of its last publication."""

    @property
    def version(self) -> int: ...

    last_receipt: PublicationReceipt | None

    def write(
        self,
        version: int | None,
        update: Callable[[int], None],
        validate: Callable[[], None] | None = None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What a loss reads beside the log-probs of the moment, fp32 `[total tokens]` each."""

    advantages: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    correction: NDArray[np.float32] | None = None


class Learner:
    """Owns the optimizer. Mutates the model's parameters in place, only inside `gate.write`.

    Everything that can fail does so before the gate closes: forward, backward, clipping and the
    check that the gradient is finite.
    """

    def __init__(
        self,
        model: Decoder,
        gate: Publisher,
        config: TrainerConfig,
        attention_backend: str | AttentionBackend | None = None,
    ) -> None:
        self._gate = gate
        self._config = config
        self._backend = attention_for(model, attention_backend)
        # device_placement=False: `.to(device)` would re-bind parameters away from the arena.
        self._accelerator = Accelerator(device_placement=False, mixed_precision="no")
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _lr_factor(config))
        self.model, self.optimizer, self._schedule = self._accelerator.prepare(
            model, optimizer, schedule
        )
        self.updates = 0
        self._before_update: Callable[[], None] | None = None
        self._initial_state = copy.deepcopy(self.state_dict())

    def step(
        self,
        batch: RolloutBatch,
        advantages: NDArray[np.float32] | None,
        algorithm: Algorithm | str,
        before_first_update: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Train on a batch: `num_iterations` passes, one publication per minibatch.

        before_first_update: called once, when the first gradient is there and nothing has changed.

        advantages fp32: one per rollout `[N]`, or one per token `[total tokens]`, rollouts end to
        end; None for losses that use none. Metrics carry the names of the field: `actor/*`,
        `sampling/*` (of the first minibatch, before any update: difference 0 and ratio 1 exactly
        when on-policy), `correction/*` (if one was applied), `publication/*`, `timing_s/*`.
        """
        algorithm = resolve_algorithm(algorithm)
        self._before_update = before_first_update
        metrics = StepMetrics()
        started = time.perf_counter()
        tokens = _Tokens(advantages_per_token(batch, advantages), batch.logprobs)
        tokens = self._corrected(tokens, batch, algorithm, metrics)
        size = self._config.minibatch_size or max(len(batch), 1)
        first = True
        for _ in range(self._config.num_iterations):
            for start in range(0, len(batch), size):
                rollouts = np.arange(start, min(start + size, len(batch)))
                if not batch.lengths[rollouts].sum():
                    continue
                self._minibatch(batch, rollouts, tokens, algorithm, metrics, first)
                first = False
        metrics.set("rollout/policy_version", float(self._gate.version))
        metrics.set("timing_s/train", time.perf_counter() - started)
        return metrics.result()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on beside weights and batch; tensors are not copied."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self._schedule.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict`'s value, to the bit; None = from the beginning."""
        if state is None:
            state = self._initial_state
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["lr_scheduler"])
        self.optimizer.zero_grad()
        self.updates = int(state["updates"])

    def _minibatch(
        self,
        batch: RolloutBatch,
        rollouts: NDArray[np.int64],
        tokens: _Tokens,
        algorithm: Algorithm,
        metrics: StepMetrics,
        first: bool,
    ) -> None:
        weights = np.zeros(len(batch), dtype=np.float32)
        weights[rollouts] = algorithm.token_weights(batch.lengths[rollouts])
        self.optimizer.zero_grad()
        loss = 0.0
        for micro in micro_batches(batch, rollouts, self._config.micro_batch_tokens):
            loss += self._accumulate(batch, micro, tokens, weights, algorithm, metrics, first)
        metrics.mean("actor/pg_loss", loss)
        norm = self._gradient_norm()
        metrics.mean("actor/grad_norm", norm)
        metrics.set("actor/lr", self._schedule.get_last_lr()[0])
        if not math.isfinite(norm):
            # Nothing was written: the old weights and their version stand.
            metrics.add("actor/skipped_updates", 1.0)
            return
        if self._before_update is not None:
            before_update, self._before_update = self._before_update, None
            before_update()
        self._gate.write(None, lambda version: self.optimizer.step())
        self._schedule.step()
        self.updates += 1
        receipt = self._gate.last_receipt
        assert receipt is not None
        metrics.add("publication/wait_s", receipt.wait_s)
        metrics.add("publication/update_s", receipt.held_s)
        metrics.add("publication/bytes_copied", float(receipt.bytes_copied))

    def _accumulate(
        self,
        batch: RolloutBatch,
        micro: MicroBatch,
        tokens: _Tokens,
        weights: NDArray[np.float32],
        algorithm: Algorithm,
        metrics: StepMetrics,
        first: bool,
    ) -> float:
        """Add the gradient of one micro-batch; returns its part of the minibatch's loss."""
        column = self._column
        logprobs, entropy = self._score(batch, micro)
        losses = algorithm.policy_loss(
            logprobs,
            column(tokens.old_logprobs, micro.token_index),
            column(tokens.advantages, micro.token_index),
            torch.from_numpy(micro.rollout_index).to(logprobs.device),
        )
        weight = column(weights, micro.rollout_index)
        if tokens.correction is not None:
            weight = weight * column(tokens.correction, micro.token_index)
        loss = (losses.loss * weight).sum()
        self._accelerator.backward(loss)
        metrics.mean_of("entropy", entropy.detach())
        for name, values in losses.metrics.items():
            metrics.mean_of(name, values)
        if first and batch.has_behaviour:
            difference = logprobs.detach() - column(batch.logprobs, micro.token_index)
            metrics.extremes("sampling/sampling_logp_difference", difference.abs())
            metrics.extremes("sampling/importance_sampling_ratio", difference.exp())
        return float(loss.detach())

    def _corrected(
        self, tokens: _Tokens, batch: RolloutBatch, algorithm: Algorithm, metrics: StepMetrics
    ) -> _Tokens:
        """With the trainer's own log-probs and a weight, if other versions sampled some tokens."""
        if algorithm.correction is None or not batch.has_behaviour:
            return tokens
        older = batch.token_versions != self._gate.version
        metrics.set("correction/corrected_tokens", float(older.sum()))
        if not older.any():
            return tokens
        proximal, index = batch.logprobs.copy(), np.empty(batch.num_tokens, dtype=np.int64)
        with torch.no_grad():
            for micro in micro_batches(batch, range(len(batch)), self._config.micro_batch_tokens):
                logprobs, _ = self._score(batch, micro)
                proximal[micro.token_index] = logprobs.cpu().numpy()
                index[micro.token_index] = micro.rollout_index
            proximal[~older] = batch.logprobs[~older]  # so that their weight is 1 by itself
            weight = algorithm.correction(
                torch.from_numpy(proximal),
                torch.from_numpy(batch.logprobs),
                torch.from_numpy(index),
            )
        metrics.extremes("correction/weight", weight[torch.from_numpy(older)])
        return _Tokens(tokens.advantages, proximal, weight.numpy())

    def _score(self, batch: RolloutBatch, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        temperature = self._column(batch.temperatures, micro.rollout_index)
        return score_micro_batch(self.model, micro, temperature, self._backend)

    def _column(self, values: NDArray[np.float32], index: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values[index]).to(next(self.model.parameters()).device)

    def _gradient_norm(self) -> float:
        bound = self._config.max_grad_norm
        norm = self._accelerator.clip_grad_norm_(
            self.model.parameters(), math.inf if bound is None else bound
        )
        return float(norm)


def advantages_per_token(
    batch: RolloutBatch, advantages: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """`[N]` or `[total tokens]` to `[total tokens]`, checked; None to zeros."""
    if advantages is None:
        return np.zeros(batch.num_tokens, dtype=np.float32)
    values = np.asarray(advantages, dtype=np.float32)
    if values.shape not in ((len(batch),), (batch.num_tokens,)):
        raise ValueError(
            f"advantages have shape {values.shape}, the batch has {len(batch)} rollouts of "
            f"{batch.num_tokens} tokens; pass one number per rollout or one per token"
        )
    if len(batch) == batch.num_tokens and (batch.lengths == 0).any():
        raise ValueError(
            f"the batch has as many rollouts as tokens ({len(batch)}), some without any: one "
            "advantage per rollout and one per token look alike. Drop the rollouts without tokens"
        )
    per_rollout = len(values) == len(batch)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"the advantage of {'rollout' if per_rollout else 'token'} {bad[0]} is "
            f"{values[bad[0]]}; it must be finite"
        )
    return np.repeat(values, batch.lengths) if per_rollout else values


def _lr_factor(config: TrainerConfig) -> Callable[[int], float]:
    """Factor on the peak learning rate by optimizer step: linear warm-up, then the schedule."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.lr_schedule == "constant" or config.total_steps is None:
            return 1.0
        span = max(config.total_steps - config.warmup_steps, 1)
        left = max(0.0, 1.0 - (step - config.warmup_steps) / span)
        return left if config.lr_schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))

    return factor
