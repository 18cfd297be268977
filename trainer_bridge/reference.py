"""The reference policy: the policy as it was, in an arena of its own that nobody trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attention import AttentionBackend
from rollout.model import Decoder
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.scoring import score_micro_batch
from trainer_bridge.trajectory import MicroBatch


class ReferencePolicy:
    """Scores tokens by the policy's own function: equal weights, equal bits."""

    def __init__(self, policy: Decoder, backend: AttentionBackend) -> None:
        self._policy = policy
        self._backend = backend
        self._arena = WeightArena.create(ArenaLayout.for_module(policy))
        self._model = Decoder(policy.config, device="meta", operators=policy.operators)
        self._arena.bind(self._model, requires_grad=False)

    def reset(self) -> None:
        """Become the policy as it is now."""
        self._arena.copy_from(self._policy)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, temperature: Tensor) -> Tensor:
        """Of every response token of one pack, fp32 `[T]`; temperature fp32 `[T]`."""
        return score_micro_batch(self._model, micro, temperature, self._backend)[0]

    def state_dict(self) -> dict[str, Tensor]:
        """Its weights; not copied."""
        return dict(self._model.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Become what `state_dict` returned."""
        self._model.load_state_dict(state)
