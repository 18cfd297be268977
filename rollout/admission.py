"""From prompts to requests. What can never be served is refused before it queues, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout.detokenizer import Detokenizer
from rollout.logit_edits import LogitEdits, out_of_vocabulary
from rollout.request import PromptTask, Request
from rollout.stopping import stop_ids
from rollout.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """max_seq_len: prompt + output tokens. kv_tokens: tokens one request alone has KV for."""

    max_seq_len: int
    vocab_size: int
    kv_tokens: int
    has_tokenizer: bool

    @property
    def max_total_tokens(self) -> int:
        """Longest a request may become; the last token it samples needs no KV."""
        return min(self.max_seq_len, self.kv_tokens + 1)

    def problem(self, task: PromptTask) -> tuple[str, str] | None:
        """Why a prompt can never be served: a name and a sentence; None if it can."""
        params = task.params
        length, wanted = len(task.token_ids), params.max_tokens
        if length == 0:
            return "prompt_empty", "the prompt has no tokens; pass at least one (for example BOS)"
        if length >= self.max_seq_len:
            return "prompt_too_long", (
                f"the prompt has {length} tokens and max_seq_len is {self.max_seq_len}: "
                "no room for a new token"
            )
        if wanted is not None and wanted <= 0:
            return "max_tokens_non_positive", f"max_tokens is {wanted}; ask for at least 1"
        for name, ids in (("prompt", task.token_ids), ("stop_token_ids", params.stop_token_ids)):
            outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
            if outside is not None:
                return "token_out_of_vocabulary", self._outside(name, outside)
        field = out_of_vocabulary(params, self.vocab_size)
        if field is not None:
            return "token_out_of_vocabulary", self._outside(*field)
        text = params.needs_text or any(isinstance(word, str) for word in params.bad_words)
        if text and not self.has_tokenizer:
            return "tokenizer_missing", (
                "stop, detokenize and bad_words given as text need a tokenizer; build the engine "
                "with one"
            )
        needed = length if wanted is None else min(length + wanted, self.max_seq_len) - 1
        if needed > self.kv_tokens:
            return "kv_cache_too_small", (
                f"the request needs KV for {needed} tokens and the cache holds "
                f"{self.kv_tokens}; raise num_kv_blocks or lower max_tokens"
            )
        return None

    def _outside(self, name: str, token: int) -> str:
        return f"{name} has token id {token}, outside the vocabulary of {self.vocab_size}"


class Admission:
    """Makes requests of prompts, `n` of each, with everything that is prepared once."""

    def __init__(
        self,
        limits: AdmissionLimits,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._next_id = 0

    def requests(self, tasks: Sequence[PromptTask]) -> list[Request]:
        """In order; a rejected one has its finish reason already. Not thread-safe."""
        made: list[Request] = []
        for task in tasks:
            problem = self._limits.problem(task)
            samples = [self._request(task, sample) for sample in range(task.params.n)]
            made += samples
            if problem is not None:
                for request in samples:
                    request.fail("rejected", *problem)
                continue
            stops = stop_ids(task.params, self._eos_token_ids)
            try:
                edits = LogitEdits.build(task.params, stops, self._tokenizer)
            except ValueError as error:
                for request in samples:
                    request.fail("rejected", "bad_words_not_encodable", str(error))
                continue
            tokens = np.array(task.token_ids, np.int32)
            for request in samples:
                request.admit(
                    tokens, self._limits.max_total_tokens, edits, self._detokenizer(task)
                )
        return made

    def _request(self, task: PromptTask, sample: int) -> Request:
        self._next_id += 1
        return Request(self._next_id, task, sample)

    def _detokenizer(self, task: PromptTask) -> Detokenizer | None:
        params = task.params
        if not params.needs_text or self._tokenizer is None:
            return None
        return Detokenizer(
            self._tokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens
        )
