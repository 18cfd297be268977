"""What one request does to its logits, as ids and numbers: no tensor in sight."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from rollout.logit_edits import LogitEdits, out_of_vocabulary
from rollout.sampling import SamplingParams

STOPS = frozenset({7, 2})


class Letters:
    """A byte-level tokenizer that merges two words, differently after a space."""

    def __init__(self) -> None:
        units = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["Ġ", "no", "Ġno"]
        vocab = {unit: i for i, unit in enumerate(units)}
        self.backend = Backend(models.BPE(vocab, [("n", "o"), ("Ġ", "no")]))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def built(stops: frozenset[int] = STOPS, **fields: object) -> LogitEdits:
    edits = LogitEdits.build(SamplingParams(**fields), stops, None)
    assert edits is not None
    return edits


@pytest.mark.parametrize(
    ("fields", "stops"),
    [
        ({}, STOPS), ({"top_k": 3, "temperature": 0.0, "stop": "x"}, STOPS),
        ({"min_tokens": 3}, frozenset()), ({"bad_words": []}, STOPS), ({"logit_bias": {}}, STOPS),
    ],
)
def test_nothing_on_nothing_built(fields, stops):
    assert LogitEdits.build(SamplingParams(**fields), stops, None) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1},
        {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3]}, {"bad_words": [[3]]},
    ],
)
def test_each_alone_is_enough(fields):
    """Also beside a min_tokens that has no stop id to hold back."""
    assert built(frozenset(), **fields).min_tokens == 0
    assert built(frozenset(), min_tokens=1, **fields).hold_back.tolist() == []


def test_columns_are_ready_for_use():
    edits = built(allowed_token_ids=[9, 3, 9], logit_bias={"8": 1, 2: -1.5}, min_tokens=2)
    assert edits.allowed is not None
    assert edits.allowed.tolist() == [3, 9]
    assert (edits.bias_ids.tolist(), edits.bias_values.tolist()) == ([2, 8], [-1.5, 1.0])
    assert edits.hold_back.tolist() == [2, 7]
    for column in (edits.allowed, edits.bias_ids, edits.hold_back, edits.banned(tokens(1))):
        assert column.dtype == np.int64


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(0, 6),
)
def test_bans(words, output, min_tokens):
    """L3, S4: the last id of each word whose other ids the output ends with; stop ids early on."""
    expected = {
        word[-1]
        for word in words
        if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]
    }
    if len(output) < min_tokens:
        expected |= STOPS
    edits = built(bad_words=words, min_tokens=min_tokens)
    assert set(edits.banned(tokens(*output)).tolist()) == expected


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from([1.0, 1.5]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.25]),
)
def test_penalties(prompt, output, repetition, frequency, presence):
    """L3: repetition knows prompt and output; the others count in the output alone."""
    edits = LogitEdits.build(
        SamplingParams(
            repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
        ),
        STOPS, None,
    )
    if edits is None:
        assert (repetition, frequency, presence) == (1.0, 0.0, 0.0)
        return
    found = edits.penalties(tokens(*prompt), tokens(*output))
    counts = Counter(output)
    ids = set(output) | (set(prompt) if repetition != 1 else set())
    expected = {i: frequency * counts[i] + presence * (i in counts) for i in ids}
    if found is None:
        assert expected == {}
    else:
        assert dict(zip(found.ids.tolist(), found.subtract.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("fields", "first", "later"),
    [
        ({"min_tokens": 2}, True, False), ({"presence_penalty": 1.0}, False, True),
        ({"frequency_penalty": 1.0}, False, True), ({"repetition_penalty": 2.0}, True, True),
        ({"bad_words": [[3]]}, True, True), ({"allowed_token_ids": [3]}, True, True),
        ({"logit_bias": {3: 1.0}}, True, True), ({"min_tokens": 2, "bad_words": [[3]]}, True, True),
    ],
)
def test_active_tells_when_there_is_something_to_do(fields, first, later):
    edits = built(**fields)
    assert (edits.active(0), edits.active(2)) == (first, later)


def test_words_of_text_are_banned_at_the_start_and_after_a_space():
    """L3: as the tokenizer splits them; a form that comes twice is kept once."""
    tokenizer = Letters()
    n, o, no, space_no = (tokenizer.backend.token_to_id(t) for t in ("n", "o", "no", "Ġno"))
    params = SamplingParams(bad_words=["no", "no", (n, o), (no,)])
    edits = LogitEdits.build(params, STOPS, tokenizer)
    assert edits is not None
    assert edits.bad_words == ((no,), (space_no,), (n, o))
    assert set(edits.banned(tokens(n)).tolist()) == {no, space_no, o}


def test_words_of_text_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"SamplingParams\.bad_words has the text 'no'.*tokenizer"):
        LogitEdits.build(SamplingParams(bad_words=[[3], "no"]), STOPS, None)
    with pytest.raises(ValueError, match=r"bad_words has the text 'É'.*no token"):
        LogitEdits.build(SamplingParams(bad_words=["É"]), STOPS, Silent())


class Silent:
    """A tokenizer whose normaliser strips everything."""

    def encode(self, text: str) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"logit_bias": {9: 1.0, 10: 1.0}}, ("logit_bias", 10)),
        ({"allowed_token_ids": [9, -1]}, ("allowed_token_ids", -1)),
        ({"bad_words": [[3], [4, 11, 5]]}, ("bad_words", 11)),
        ({"bad_words": ["text", [9]], "allowed_token_ids": [0], "logit_bias": {0: 1}}, None),
        ({}, None),
    ],
)
def test_ids_out_of_the_vocabulary_are_found(fields, found):
    """S14: the first, with its field; text has no ids yet."""
    assert out_of_vocabulary(SamplingParams(**fields), 10) == found
