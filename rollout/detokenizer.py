"""The text of one request's output, token by token, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8
_MOST_BYTES = 4  # of one character in UTF-8
_LONGEST_WINDOW = 64


class _Decodes(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Text of one request's output tokens, each pushed exactly once and in order.

    Without a stop string the final text is `tokenizer.decode(output ids)`; `_Window` says for
    which output it is not. Special tokens have no text. A push costs the same however long the
    output is. Ids may be anything; those the tokenizer does not know have no text either.

    A stop string counts as soon as the token that completes it is pushed. The first `min_tokens`
    tokens complete none, but one may begin in their text. If one token completes several, the
    one that begins first in the text counts; of those, the first in `stop`.

        text   |#########handed out#########|..not yet..|held back: may begin a stop string|
                done                         fresh
    """

    def __init__(
        self,
        tokenizer: _Decodes,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`stop` holds non-empty strings; ValueError for an empty one."""
        if not all(stop):
            raise ValueError(f"stop = {stop!r} has an empty string; leave it out")
        self._window = _Window(tokenizer)
        self._stop = stop
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._lookback = max(map(len, stop), default=1) - 1
        self._tail = ""  # the last `lookback` characters of the text
        self._done: list[str] = []
        self._fresh: list[str] = []
        self._ended = False

    @property
    def text(self) -> str:
        """The text so far. Bytes that may still become a character are in it after `finish`.

        After a stop match it ends before the stop string, or with it if that is to be included.
        """
        return "".join(self._done) + "".join(self._fresh)

    def push(self, token_id: int) -> str | None:
        """Take one more output token; the stop string that is complete now, else None.

        RuntimeError after a match or `finish`: the text is final then.
        """
        if self._ended:
            raise RuntimeError(f"token {token_id} came after the text had ended; push none then")
        self._num_tokens += 1
        piece = self._window.push(token_id)
        if not piece:
            return None
        self._fresh.append(piece)
        seen = self._tail + piece
        matched = None
        if self._stop and self._num_tokens > self._min_tokens:
            matched = self._match(seen, len(self._tail))
        self._tail = seen[-self._lookback :] if self._lookback else ""
        return matched

    def take_delta(self) -> str:
        """The text that was not handed out before and can no longer be cut off. It counts as
        handed out from now on: all deltas in a row are the text."""
        fresh = "".join(self._fresh)
        safe = len(fresh) - self._num_held_back()
        delta = fresh[:safe]
        if delta:
            self._done.append(delta)
        self._fresh = [fresh[safe:]] if safe < len(fresh) else []
        return delta

    def finish(self) -> None:
        """No more tokens come: unfinished bytes become U+FFFD, and nothing is held back."""
        if not self._ended:
            self._ended = True
            self._fresh.append(self._window.flush())

    def _match(self, seen: str, num_old: int) -> str | None:
        """Find a stop string in `seen` that ends beyond its `num_old` first characters, and cut
        the text there."""
        best = None
        for order, stop in enumerate(self._stop):
            start = seen.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start, order) < best):
                best = start, order
        if best is None:
            return None
        start, order = best
        stop = self._stop[order]
        end = start + len(stop) if self._include else start
        fresh = "".join(self._fresh)
        self._fresh = [fresh[: len(fresh) - (len(seen) - end)]]
        self._ended = True
        return stop

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        if self._ended or self._include:
            return 0
        longest, end = 0, len(self._tail)
        for stop in self._stop:
            start = self._tail.find(stop[0], max(0, end - len(stop) + 1))
            while start >= 0 and not stop.startswith(self._tail[start:]):
                start = self._tail.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, end - start)
        return longest


class _Window:
    """Turns ids into text that later ids cannot change, decoding a few ids at each step.

        ids  ......... c | p p p      c: context; tells a decoder that drops the first space that
                                         this is not the beginning
                                      p: pending, their text ends in bytes that are no character

    `tokenizers.decoders.DecodeStream` (0.23.3) does much the same, but with byte-fallback
    tokenizers it raises "Invalid prefix encountered" when broken bytes follow good ones, and it
    never gives out a run of invalid bytes, which it decodes again at each step. Here the
    pending ids are few: an unfinished character has at most three bytes, so from the fourth id
    on the front is settled, at a cut that leaves the text of the whole as it is.

    Two kinds of output differ from decoding all at once, both malformed. A byte-fallback
    decoder turns a whole run of byte tokens into U+FFFD if one of them is broken; here only
    those become U+FFFD that are no character. And where each of 64 tokens in a row ends within
    a character that the next one goes on with, one character of them is lost.
    """

    def __init__(self, tokenizer: _Decodes) -> None:
        self._decode = tokenizer.decode
        self._begun = False
        self._context: list[int] = []
        self._context_length = 0
        self._pending: list[int] = []
        self._pending_text = ""
        self._num_given = 0  # characters of the pending text that were given out
        self._cuts: list[int] = []  # where the text of pending is that of its two sides

    def push(self, token_id: int) -> str:
        """The text that became certain."""
        before = self._pending_text
        self._pending.append(token_id)
        self._pending_text = self._text_of(self._pending)
        if self._pending_text == before and not self._decode([token_id, token_id]):
            self._pending.pop()  # special or unknown
            return ""
        if not self._pending_text.endswith(_REPLACEMENT):
            return self.flush()
        last = len(self._pending) - 1
        if last:
            alone = self._text_of(self._pending[last:])
            if _REPLACEMENT not in alone:  # a byte token that is a character, in a broken run
                self._cuts.append(last)
                return self.flush()
            if before + alone == self._pending_text:
                self._cuts.append(last)
        return self._advance()

    def flush(self) -> str:
        """All that was not given out. Broken ids go first, so that they spoil no good ones."""
        given = ""
        while self._cuts and _REPLACEMENT in self._pending_text:
            given += self._settle(self._front())
        return given + self._settle(len(self._pending)) if self._pending else given

    def _advance(self) -> str:
        given = ""
        while len(self._pending) >= _MOST_BYTES and self._cuts:
            given += self._settle(self._front())
        if len(self._pending) > _LONGEST_WINDOW or not self._pending_text.endswith(_REPLACEMENT):
            return given + self.flush()
        certain = self._pending_text.rstrip(_REPLACEMENT)
        given += certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        return given

    def _front(self) -> int:
        """How many pending ids to settle first: those of a character, else up to a cut."""
        for count in range(1, min(_MOST_BYTES, len(self._pending))):
            if _REPLACEMENT not in self._text_of(self._pending[:count]):
                return count
        return self._cuts[0]

    def _settle(self, count: int) -> str:
        """End the first `count` pending ids; their text, less what was given out of it."""
        settled, self._pending = self._pending[:count], self._pending[count:]
        text = self._text_of(settled) if self._pending else self._pending_text
        given, self._num_given = text[self._num_given :], max(0, self._num_given - len(text))
        self._cuts = [cut - count for cut in self._cuts if cut > count]
        self._begun = True
        alone = self._decode(settled[-1:])
        if alone and _REPLACEMENT not in alone:  # else it may be part of a run of bytes
            self._context, self._context_length = settled[-1:], len(alone)
        self._pending_text = self._text_of(self._pending) if self._pending else ""
        return given

    def _text_of(self, ids: list[int]) -> str:
        """Text of ids that follow what is settled."""
        if self._context:
            # These may break the context if it is a byte; its one character stays one.
            return self._decode([*self._context, *ids])[self._context_length :]
        text = self._decode(ids)
        if self._begun and _REPLACEMENT not in text:
            return self._decode(ids + ids)[len(text) :]  # they are their own context
        return text
