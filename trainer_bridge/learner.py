"""The training step: packed forward and backward, then one optimizer step inside the gate."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from trainer_bridge.critic import Critic
from trainer_bridge.losses import LossTokens, column, policy_loss, value_loss
from trainer_bridge.metrics import StepMetrics
from trainer_bridge.receipt import PublicationReceipt
from trainer_bridge.reference import ReferencePolicy
from trainer_bridge.scoring import hidden_rows, score_hidden, score_micro_batch
from trainer_bridge.token_columns import TokenColumns, advantages_per_token
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


class Learner:
    """Owns the optimizer. Mutates the model's parameters in place, only inside `gate.write`.

    Everything that can fail does so before the gate closes: forward, backward, clipping and the
    check that the gradient is finite. Critic and reference policy, if the configuration asks for
    them, are the learner's own: nobody else reads them.
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
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        # device_placement=False: `.to(device)` would re-bind parameters away from the arena.
        self._accelerator = Accelerator(device_placement=False, mixed_precision="no")
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, config.learning_rate_factor)
        self.model, self.optimizer, self._schedule = self._accelerator.prepare(
            model, optimizer, schedule
        )
        self.updates = 0
        self._before_update: Callable[[], None] | None = None
        self._initial_state = copy.deepcopy(self._optimizer_state())
        self.critic = Critic(model, config.critic, self._backend) if config.critic else None
        self.reference = ReferencePolicy(model, self._backend) if config.reference else None

    @torch.no_grad()
    def score_tokens(self, batch: RolloutBatch) -> TokenColumns:
        """What critic and reference policy say of the batch's tokens; None of one there is not."""
        columns = {
            name: np.zeros(batch.num_tokens, dtype=np.float32)
            for name, judge in (("reference_logprobs", self.reference), ("values", self.critic))
            if judge is not None
        }
        if columns:
            for micro in micro_batches(batch, range(len(batch)), self._config.micro_batch_tokens):
                if self.reference is not None:
                    temperature = self._column(batch.temperatures, micro.rollout_index)
                    scores = self.reference.logprobs(micro, temperature)
                    columns["reference_logprobs"][micro.token_index] = scores.cpu().numpy()
                if self.critic is not None:
                    hidden = None
                    if self.critic.shares_trunk:
                        hidden = hidden_rows(self.model, micro, self._backend)
                    values = self.critic.values(micro, hidden)
                    columns["values"][micro.token_index] = values.cpu().numpy()
        return TokenColumns(**columns)

    def reset_from_policy(self, *names: str) -> None:
        """Let "critic", "reference" or both begin anew from the policy as it is."""
        for name in names:
            part = {"critic": self.critic, "reference": self.reference}[name]
            if part is None:
                raise ValueError(f"this trainer has no {name}: set TrainerConfig.{name}")
            part.reset()

    def step(
        self,
        batch: RolloutBatch,
        advantages: NDArray[np.float32] | None,
        algorithm: Algorithm | str,
        columns: TokenColumns | None = None,
        before_first_update: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Train on a batch: `num_iterations` passes, one publication per minibatch.

        advantages fp32: one per rollout `[N]`, or one per token `[total tokens]`, rollouts end to
        end, of which those that the policy did not choose are not read; None for losses that use
        none. columns: what else the algorithm reads of each token.
        before_first_update: called once, when the first gradient is there and nothing has changed.
        Metrics carry the names of the field: `actor/*`, `critic/*`,
        `sampling/*` (of the first minibatch, before any update: difference 0 and ratio 1 exactly
        when on-policy), `correction/*` (if one was applied), `publication/*`, `timing_s/*`.
        """
        algorithm = resolve_algorithm(algorithm)
        columns = columns or TokenColumns()
        columns.check(batch.num_tokens)
        self._require(algorithm, columns)
        self._before_update = before_first_update
        metrics = StepMetrics()
        started = time.perf_counter()
        tokens = LossTokens(advantages_per_token(batch, advantages), batch.logprobs, columns)
        tokens = self._corrected(tokens, batch, algorithm, metrics)
        size = self._config.minibatch_size or max(len(batch), 1)
        first = True
        for _ in range(self._config.num_iterations):
            for start in range(0, len(batch), size):
                rollouts = np.arange(start, min(start + size, len(batch)))
                if not batch.response_lengths[rollouts].sum():
                    continue
                self._minibatch(batch, rollouts, tokens, algorithm, metrics, first)
                first = False
        metrics.set("rollout/policy_version", float(self._gate.version))
        metrics.set("timing_s/train", time.perf_counter() - started)
        return metrics.result()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on beside weights and batch; tensors are not copied."""
        return {
            **self._optimizer_state(),
            **({} if self.critic is None else {"critic": self.critic.state_dict()}),
            **({} if self.reference is None else {"reference": self.reference.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict`'s value, to the bit; None = from the beginning, critic and
        reference as the policy is now, and so for one that `state` does not have."""
        if state is None:
            state = self._initial_state
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["lr_scheduler"])
        self.optimizer.zero_grad()
        self.updates = int(state["updates"])
        for name, part in (("critic", self.critic), ("reference", self.reference)):
            if part is not None:
                part.load_state_dict(state[name]) if name in state else part.reset()

    def _optimizer_state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self._schedule.state_dict(),
            "updates": self.updates,
        }

    def _require(self, algorithm: Algorithm, columns: TokenColumns) -> None:
        """ValueError for an algorithm that reads what trainer or caller do not have."""
        if algorithm.policy_loss is None and algorithm.value_loss is None:
            raise ValueError(f"{algorithm.name} has neither a policy loss nor a value loss")
        if algorithm.reference_penalty is not None and columns.reference_logprobs is None:
            raise ValueError(
                f"{algorithm.name} has a reference penalty and needs columns.reference_logprobs; "
                "score_tokens gives them, with TrainerConfig.reference"
            )
        if algorithm.value_loss is None:
            return
        if self.critic is None or columns.values is None or columns.returns is None:
            raise ValueError(
                f"{algorithm.name} has a value loss and needs TrainerConfig.critic, "
                "columns.values from score_tokens, and columns.returns"
            )

    def _minibatch(
        self,
        batch: RolloutBatch,
        rollouts: NDArray[np.int64],
        tokens: LossTokens,
        algorithm: Algorithm,
        metrics: StepMetrics,
        first: bool,
    ) -> None:
        weights = np.zeros(len(batch), dtype=np.float32)
        lengths = batch.response_lengths[rollouts]
        weights[rollouts] = algorithm.token_weights(lengths)
        num_tokens = int(lengths.sum())
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()
        loss = 0.0
        for micro in micro_batches(batch, rollouts, self._config.micro_batch_tokens):
            loss += self._accumulate(
                batch, micro, tokens, weights, num_tokens, algorithm, metrics, first
            )
        if algorithm.policy_loss is not None and not self._update_policy(loss, metrics):
            return
        if algorithm.value_loss is not None:
            assert self.critic is not None
            norm = self.critic.step()
            metrics.mean("critic/grad_norm", norm)
            metrics.add("critic/skipped_updates", float(not math.isfinite(norm)))

    def _update_policy(self, loss: float, metrics: StepMetrics) -> bool:
        """Publish; False, and nothing written, if the gradient is not finite."""
        metrics.mean("actor/pg_loss", loss)
        norm = self._gradient_norm()
        metrics.mean("actor/grad_norm", norm)
        metrics.set("actor/lr", self._schedule.get_last_lr()[0])
        if not math.isfinite(norm):
            # Nothing was written: the old weights and their version stand.
            metrics.add("actor/skipped_updates", 1.0)
            return False
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
        return True

    def _accumulate(
        self,
        batch: RolloutBatch,
        micro: MicroBatch,
        tokens: LossTokens,
        weights: NDArray[np.float32],
        num_tokens: int,
        algorithm: Algorithm,
        metrics: StepMetrics,
        first: bool,
    ) -> float:
        """Add the gradients of one micro-batch; returns its part of the policy's loss."""
        critic = self.critic if algorithm.value_loss is not None else None
        hidden, loss, reported = None, None, 0.0
        if algorithm.policy_loss is not None:
            hidden = hidden_rows(self.model, micro, self._backend)
            temperature = self._column(batch.temperatures, micro.rollout_index)
            logprobs, entropy = score_hidden(self.model, hidden, micro, temperature)
            loss = policy_loss(algorithm, logprobs, entropy, tokens, micro, weights, metrics)
            reported = float(loss.detach())
            if first and batch.has_behaviour:
                difference = logprobs.detach() - self._column(batch.logprobs, micro.token_index)
                metrics.extremes("sampling/sampling_logp_difference", difference.abs())
                metrics.extremes("sampling/importance_sampling_ratio", difference.exp())
        if critic is not None and critic.shares_trunk:
            if hidden is None:  # the policy is not trained: its hidden states are given
                with torch.no_grad():
                    hidden = hidden_rows(self.model, micro, self._backend)
            values = critic.values(micro, hidden)
            of_values = value_loss(algorithm, values, tokens, micro, num_tokens, metrics)
            of_values = critic.coefficient * of_values
            loss = of_values if loss is None else loss + of_values
        if loss is not None:
            self._accelerator.backward(loss)
        if critic is not None and not critic.shares_trunk:
            values = critic.values(micro, None)
            self._accelerator.backward(
                value_loss(algorithm, values, tokens, micro, num_tokens, metrics)
            )
        return reported

    def _corrected(
        self, tokens: LossTokens, batch: RolloutBatch, algorithm: Algorithm, metrics: StepMetrics
    ) -> LossTokens:
        """With the trainer's own log-probs and a weight, if other versions sampled some tokens."""
        if algorithm.correction is None or not batch.has_behaviour:
            return tokens
        chosen = batch.response_mask
        older = chosen & (batch.token_versions != self._gate.version)
        metrics.set("correction/corrected_tokens", float(older.sum()))
        if not older.any():
            return tokens
        proximal, index = batch.logprobs.copy(), np.empty(batch.num_tokens, dtype=np.int64)
        with torch.no_grad():
            for micro in micro_batches(batch, range(len(batch)), self._config.micro_batch_tokens):
                temperature = self._column(batch.temperatures, micro.rollout_index)
                logprobs, _ = score_micro_batch(self.model, micro, temperature, self._backend)
                proximal[micro.token_index] = logprobs.cpu().numpy()
                index[micro.token_index] = micro.rollout_index
            proximal[~older] = batch.logprobs[~older]  # so that their weight is 1 by itself
            weight = np.ones(batch.num_tokens, dtype=np.float32)
            weight[chosen] = algorithm.correction(
                *(torch.from_numpy(column[chosen]) for column in (proximal, batch.logprobs, index))
            ).numpy()
        metrics.extremes("correction/weight", torch.from_numpy(weight[older]))
        return replace(tokens, old_logprobs=proximal, correction=weight)

    def _column(self, values: NDArray[np.float32], index: NDArray[np.int64]) -> Tensor:
        return column(values, index, next(self.model.parameters()).device)

    def _gradient_norm(self) -> float:
        bound = self._config.max_grad_norm
        norm = self._accelerator.clip_grad_norm_(
            self.model.parameters(), math.inf if bound is None else bound
        )
        return float(norm)
