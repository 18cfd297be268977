"""Small model folders and tokenizers on disk."""

from __future__ import annotations

import tokenizers
from tokenizers import models, pre_tokenizers

from rollout import Tokenizer
from tests.models import EOS, VOCABULARY


def word_tokenizer() -> Tokenizer:
    """Token i is the word `w{i}`; EOS is that of `tests.models`."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend.to_str(), {}, eos_token_ids=(EOS,))
