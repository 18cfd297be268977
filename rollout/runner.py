"""Runs one planned step on the device: inputs → forward → logits of sampled rows → tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attention import AttentionBackend, PagedAttention
from kvcache.storage import KVStorage
from rollout.batch import ScoredPrompt, StepInputs
from rollout.logprobs import ROWS_PER_CHUNK
from rollout.model import Decoder
from rollout.model.vocabulary import tempered
from rollout.recorded import RecordedForward
from rollout.request import ranked
from rollout.running import RunningBatch
from rollout.sampler import best_tokens, sample
from rollout.sampling_rows import SampledRows
from rollout.step_plan import StepPlan


class ModelRunner:
    """Stateless between steps but for the KV pages it writes; the memory of the logits is kept."""

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        backend: AttentionBackend,
        enforce_eager: bool = False,
    ) -> None:
        self._model = model
        self._storage = storage
        self._backend = backend
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._workspace: Tensor | None = None
        self.recorded: RecordedForward | None = None
        if not enforce_eager:
            self.recorded = RecordedForward(model, storage, backend, self._group)

    @torch.no_grad()
    def execute(self, plan: StepPlan, batch: RunningBatch) -> SampledRows:
        """Compute the plan's tokens and sample; one row for each that samples, in plan order.

        Scores of prompts that were asked for go straight to their requests. Returns after the
        device is done, so the caller may let go of the weights.
        """
        inputs = StepInputs.build(plan, batch)
        device = self._storage.device
        self._storage.copy(plan.copies_before)
        attention = PagedAttention(
            inputs.metadata, self._storage.pages, self._backend, self._group
        )
        hidden = self._forward(
            torch.from_numpy(inputs.input_ids).to(device),
            torch.from_numpy(inputs.metadata.positions).to(device),
            attention,
        )
        self._storage.copy(plan.copies_after)
        for scored in inputs.scored:
            self._score_prompt(hidden, scored, batch)
        if not len(inputs.sampled):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return SampledRows.none()
        rows = hidden
        if len(inputs.sampled) != hidden.shape[0] or len(plan.forked):
            rows = hidden[torch.from_numpy(inputs.sampled).to(device)]
        vocabulary = self._model.operators.vocabulary
        return sample(self._logits(rows), inputs.sampling, vocabulary)

    def _forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        if self.recorded is not None:
            hidden = self.recorded(input_ids, positions, attention)
            if hidden is not None:
                return hidden
        computed: Tensor = self._model(input_ids, positions, attention)
        return computed

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of these rows, valid until the next call."""
        rows = hidden.shape[0]
        if self._workspace is None or len(self._workspace) < rows:
            weight = self._model.output_weight
            self._workspace = self._model.operators.workspace(rows, weight)
        return self._model.logits(hidden, self._workspace)

    def _score_prompt(self, hidden: Tensor, scored: ScoredPrompt, batch: RunningBatch) -> None:
        """Log-probs of the prompt's own tokens, some rows of logits at a time."""
        request = batch.request(scored.row)
        scores, k = request.prompt_scores, request.params.prompt_logprobs or 0
        assert scores is not None
        for first in range(scored.first, scored.last, ROWS_PER_CHUNK):
            last = min(first + ROWS_PER_CHUNK, scored.last)
            start = scored.flat_start + first - scored.first
            logits = self._model.logits(hidden[start : start + last - first])
            temperature = logits.new_full((last - first,), request.params.temperature or 1.0)
            vocabulary = self._model.operators.vocabulary
            lse, _ = vocabulary.log_normalizers(logits, temperature)
            ids = torch.from_numpy(batch.tokens[scored.row, first:last].astype(np.int64))
            logprobs = vocabulary.gather(logits, temperature, ids.to(logits.device), lse)
            scores.logprobs[first:last] = logprobs.cpu().numpy()
            if k:
                top_ids, top_logprobs = best_tokens(tempered(logits, temperature), lse, k)
                for offset in range(last - first):
                    scores.top[first + offset] = ranked(top_ids[offset], top_logprobs[offset], k)
