"""The critic: predicts, before each token, the return of the rest of the rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attention import AttentionBackend
from rollout.model import Decoder
from trainer_bridge.scoring import hidden_rows
from trainer_bridge.trainer_config import CriticConfig
from trainer_bridge.trajectory import MicroBatch


class Critic:
    """A linear value head on the hidden states of a trunk, with an optimizer of its own.

    Everything here is private memory of the trainer, except that a shared trunk is the policy.
    The head starts at 0, so the first values are 0.
    """

    def __init__(self, policy: Decoder, config: CriticConfig, backend: AttentionBackend) -> None:
        self._config = config
        self._policy = policy
        self._backend = backend
        weight = policy.output_weight
        self.head = nn.Linear(policy.config.hidden_size, 1, device=weight.device)
        self.trunk: Decoder | None = None
        self._parameters = list(self.head.parameters())
        if config.trunk == "own":
            self.trunk = Decoder(
                policy.config, weight.dtype, str(weight.device), operators=policy.operators
            )
            self.trunk.lm_head = None  # it has no logits
            self.trunk.gradient_checkpointing = policy.gradient_checkpointing
            self._parameters += self.trunk.parameters()
        self.reset()

    def reset(self) -> None:
        """From the beginning: the trunk a copy of the policy as it is, the head 0, no moments."""
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()
            if self.trunk is not None:
                for name, parameter in self.trunk.named_parameters():
                    parameter.copy_(self._policy.get_parameter(name))
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._config.learning_rate,
            betas=self._config.betas,
            weight_decay=self._config.weight_decay,
            fused=True,
        )

    @property
    def coefficient(self) -> float:
        """Of the value loss: 1 where nobody else reads its gradient."""
        return self._config.coefficient if self.trunk is None else 1.0

    @property
    def shares_trunk(self) -> bool:
        return self.trunk is None

    def values(self, micro: MicroBatch, policy_hidden: Tensor | None) -> Tensor:
        """The value before each response token of one pack, fp32 `[T]`, with grad.

        policy_hidden: `hidden_rows` of the policy, which a shared trunk needs.
        """
        if self.trunk is not None:
            hidden = hidden_rows(self.trunk, micro, self._backend)
        else:
            assert policy_hidden is not None
            hidden = policy_hidden
        values: Tensor = self.head(hidden.float())
        return values.squeeze(-1)

    def step(self) -> float:
        """Clip, then one optimizer step; returns the norm. Of a gradient that is not finite the
        norm alone."""
        bound = self._config.max_grad_norm
        norm = float(
            nn.utils.clip_grad_norm_(self._parameters, math.inf if bound is None else bound)
        )
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """All that its next step depends on; tensors are not copied."""
        return {
            "head": self.head.state_dict(),
            "trunk": None if self.trunk is None else self.trunk.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s value, to the bit."""
        self.head.load_state_dict(state["head"])
        if self.trunk is not None:
            self.trunk.load_state_dict(state["trunk"])
        self.optimizer.load_state_dict(state["optimizer"])
