"""What can never be served is refused before it queues, by name and with a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.request import PromptTask


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """max_seq_len: prompt + output tokens. kv_tokens: tokens one request alone has KV for."""

    max_seq_len: int
    vocab_size: int
    kv_tokens: int

    @property
    def max_total_tokens(self) -> int:
        """Longest a request may become; the last token it samples needs no KV."""
        return min(self.max_seq_len, self.kv_tokens + 1)

    def problem(self, task: PromptTask) -> tuple[str, str] | None:
        """Why a prompt can never be served: a name and a sentence; None if it can."""
        length, wanted = len(task.token_ids), task.params.max_tokens
        if length == 0:
            return "prompt_empty", "the prompt has no tokens; pass at least one (for example BOS)"
        if length >= self.max_seq_len:
            return "prompt_too_long", (
                f"the prompt has {length} tokens and max_seq_len is {self.max_seq_len}: "
                "no room for a new token"
            )
        if wanted is not None and wanted <= 0:
            return "max_tokens_non_positive", f"max_tokens is {wanted}; ask for at least 1"
        for kind, ids in (("token", task.token_ids), ("stop token", task.params.stop_token_ids)):
            outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
            if outside is not None:
                return "token_out_of_vocabulary", (
                    f"{kind} id {outside} is outside the vocabulary of {self.vocab_size}"
                )
        needed = length if wanted is None else min(length + wanted, self.max_seq_len) - 1
        if needed > self.kv_tokens:
            return "kv_cache_too_small", (
                f"the request needs KV for {needed} tokens and the cache holds "
                f"{self.kv_tokens}; raise num_kv_blocks or lower max_tokens"
            )
        return None
