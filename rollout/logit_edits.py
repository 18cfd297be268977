"""What one request does to its logits before the temperature, prepared once per request.

Order: allowed ids → bad words → min_tokens → bias → penalties. The first three only ban ids, and a
banned id stays banned whatever follows, so a step collects all bans and applies them first.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.sampling import SamplingParams

Ids = NDArray[np.int64]


class TextEncoder(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode(self, text: str, /) -> list[int]: ...


class Penalties(NamedTuple):
    """Columns over the ids that occur, each once: x -> (x / divisor or x · divisor) - subtract."""

    ids: Ids
    subtract: NDArray[np.float32]  # frequency · count + presence


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Everything of one request that edits logits. Frozen; the samples of a prompt share it.

    allowed: ids that may be sampled, ascending, each once; None allows all.
    bad_words: the last id of a word is banned while the output ends with the ids before it.
    hold_back: stop ids, banned while the output has less than `min_tokens` tokens.
    bias_ids, bias_values: ids, each once, and what is added to their logits.
    repetition_penalty: over prompt and output; frequency_penalty, presence_penalty: the output.
    """

    allowed: Ids | None
    bad_words: tuple[tuple[int, ...], ...]
    hold_back: Ids
    min_tokens: int
    bias_ids: Ids
    bias_values: NDArray[np.float32]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float

    @classmethod
    def build(
        cls, params: SamplingParams, stop_ids: frozenset[int], tokenizer: TextEncoder | None
    ) -> LogitEdits | None:
        """None when no edit is on. Bad words that are text are encoded: ValueError without a
        tokenizer. Ids are not checked against a vocabulary: `out_of_vocabulary` does that."""
        hold_back = sorted(stop_ids) if params.min_tokens > 0 else []
        if not params.edits or not (hold_back or dataclasses.replace(params, min_tokens=0).edits):
            return None
        allowed = params.allowed_token_ids
        return cls(
            None if allowed is None else np.unique(np.array(allowed, np.int64)),
            _encoded(params.bad_words, tokenizer),
            np.array(hold_back, np.int64),
            params.min_tokens,
            np.array([token for token, _ in params.logit_bias], np.int64),
            np.array([value for _, value in params.logit_bias], np.float32),
            float(params.repetition_penalty),
            float(params.frequency_penalty),
            float(params.presence_penalty),
        )

    def active(self, num_output: int) -> bool:
        """Whether a row with so many output tokens may have a logit edited at all."""
        return (
            num_output < self.min_tokens
            or self.allowed is not None
            or bool(self.bad_words)
            or len(self.bias_ids) > 0
            or self.repetition_penalty != 1
            or (num_output > 0 and (self.frequency_penalty != 0 or self.presence_penalty != 0))
        )

    def banned(self, output: NDArray[np.int32]) -> Ids:
        """Ids that bad words and min_tokens forbid after `output`; an id may come twice."""
        last = self._last_of_bad_words(output) if self.bad_words else []
        if len(output) >= self.min_tokens:
            return np.array(last, np.int64)
        return np.append(self.hold_back, np.array(last, np.int64)) if last else self.hold_back

    def _last_of_bad_words(self, output: NDArray[np.int32]) -> list[int]:
        longest = max(map(len, self.bad_words)) - 1
        tail = tuple(output[max(len(output) - longest, 0) :].tolist())
        return [
            word[-1]
            for word in self.bad_words
            if len(word) - 1 <= len(tail) and tail[len(tail) - len(word) + 1 :] == word[:-1]
        ]

    def penalties(
        self, prompt: NDArray[np.int32], output: NDArray[np.int32]
    ) -> Penalties | None:
        """The ids that are penalised after `output`, and by how much; None when there are none."""
        by_count = self.frequency_penalty != 0 or self.presence_penalty != 0
        if self.repetition_penalty == 1 and not by_count:
            return None
        ids, counts = np.unique(output, return_counts=True)
        subtract = self.frequency_penalty * counts + self.presence_penalty
        if self.repetition_penalty != 1:
            every = np.union1d(prompt, ids)
            by_id = np.zeros(len(every))
            by_id[np.searchsorted(every, ids)] = subtract
            ids, subtract = every, by_id
        if not len(ids):
            return None
        return Penalties(ids.astype(np.int64), subtract.astype(np.float32))


def out_of_vocabulary(params: SamplingParams, vocab_size: int) -> tuple[str, int] | None:
    """The first id that the model does not have, with its field; bad words that are text aside."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    fields = (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", list(params.allowed_token_ids or ())),
        ("bad_words", [token for word in words for token in word]),
    )
    for name, ids in fields:
        for token in ids:
            if not 0 <= token < vocab_size:
                return name, token
    return None


def _encoded(
    words: tuple[str | tuple[int, ...], ...], tokenizer: TextEncoder | None
) -> tuple[tuple[int, ...], ...]:
    """Words as ids, each once. Text is taken as it stands and after a space, because most
    tokenizers write a word differently at the start of a text and inside it."""
    encoded: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            encoded[word] = None
            continue
        if tokenizer is None:
            raise ValueError(
                f"SamplingParams.bad_words has the text {word!r}, which needs a tokenizer; build "
                "the engine with one, or give the word's token ids"
            )
        forms = [tuple(tokenizer.encode(text)) for text in (word, f" {word}")]
        if not any(forms):
            raise ValueError(
                f"SamplingParams.bad_words has the text {word!r}, which the tokenizer turns into "
                "no token; give the word's token ids"
            )
        encoded.update(dict.fromkeys(form for form in forms if form))
    return tuple(encoded)
