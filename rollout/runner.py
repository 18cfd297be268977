"""Runs one planned step on the device: inputs → forward → logits of sampled rows → tokens."""

from __future__ import annotations

import torch

from attention import AttentionBackend, PagedAttention
from kvcache import KVCacheManager
from kvcache.storage import KVStorage
from rollout.batch import StepInputs
from rollout.model import Decoder
from rollout.sampler import sample
from rollout.scheduler import Sampled, Scheduled


class ModelRunner:
    """Stateless between steps but for the KV pages it writes."""

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        backend: AttentionBackend,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._storage = storage
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads

    @torch.no_grad()
    def execute(self, plan: list[Scheduled], kv: KVCacheManager[int]) -> list[Sampled]:
        """Compute the plan's tokens; one result per entry that samples, in the plan's order.

        Returns after the device is done, so the caller may let go of the weights.
        """
        inputs = StepInputs.build(plan, kv, self._storage.block_size)
        device = self._storage.device
        attention = PagedAttention(
            inputs.metadata, self._storage.pages, self._backend, self._group
        )
        hidden = self._model(
            torch.from_numpy(inputs.input_ids).to(device),
            torch.from_numpy(inputs.metadata.positions).to(device),
            attention,
        )
        if not inputs.requests:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return []
        logits = self._model.logits(hidden[torch.from_numpy(inputs.rows).to(device)])
        return sample(logits, inputs.requests, self._eos_token_ids)
