"""How one prompt is sampled: vLLM's names, with a few defaults changed on purpose."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rollout.generation_config import sampling_fields


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one prompt. Differences from vLLM: no filter is on by default,
    `max_tokens=None` means up to the context, a small temperature is never raised silently.
    Lists are taken where a tuple is stored, and kept as one.

    n: samples drawn for the prompt; they share its prefill.
    temperature: logits are divided by it; 0 means greedy.
    top_p, top_k, min_p: filters on the tempered distribution, in the order min_p, top_k, top_p;
        1.0, 0 (or -1) and 0.0 turn them off. `top_p=0` keeps the best token.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else
        multiplied; 1.0 is off.
    frequency_penalty, presence_penalty: taken off the logit of a token in the output, once for
        each time it occurs, and once at all; in [-2, 2].
    logit_bias: id -> number added to its logit; a mapping (ids may be strings, as JSON has them)
        or pairs; stored as pairs sorted by id.
    allowed_token_ids: nothing else can be sampled; None allows all.
    bad_words: never sampled as a whole; text, or token ids of one word. Text is banned at the
        start of a word and inside one, as the tokenizer splits it.
    max_tokens: most new tokens; a non-positive one rejects the prompt, not the batch.
    min_tokens: stop tokens cannot be sampled before this many new tokens.
    stop: text, or several, that ends the sample; needs a tokenizer, like the next two.
    include_stop_str_in_output: the result's text keeps the stop string; its tokens always do.
    detokenize: the result has the text of the output.
    stop_token_ids: end the sample beside the model's own EOS ids; the stop token is kept.
    ignore_eos: the model's EOS ids do not end the sample (stop_token_ids still do).
    seed: with the prompt ids, the sample index and the position it determines every draw;
        None lets the engine derive one, which the result reports.
    logprobs: report the k best tokens of each output position beside the sampled one; None: off.
    prompt_logprobs: report the prompt's own log-probs and the k best of each position; None: off.

    A wrong value is a ValueError that names the field and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    detokenize: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._store_plainly()
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "an int of at least 1")
        # Within these bounds (here and below) no edit by itself takes a logit beyond fp32.
        _require(
            _is_number(self.temperature)
            and (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30),
            "temperature", self.temperature, "0 (greedy) or a number from 1e-30 to 1e30",
        )
        _between("top_p", self.top_p, 0, 1)
        top_k = _is_int(self.top_k) and -1 <= self.top_k < 2**31
        _require(top_k, "top_k", self.top_k, "0 or -1 (off) or a positive int below 2**31")
        _between("min_p", self.min_p, 0, 1)
        _require(
            _is_number(self.repetition_penalty) and 1e-30 <= self.repetition_penalty <= 1e30,
            "repetition_penalty", self.repetition_penalty, "a number above 0 (1e-30 to 1e30)",
        )
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        max_tokens = self.max_tokens is None or _is_int(self.max_tokens)
        _require(max_tokens, "max_tokens", self.max_tokens, "None (up to the context) or an int")
        min_tokens = _is_int(self.min_tokens) and self.min_tokens >= 0
        _require(min_tokens, "min_tokens", self.min_tokens, "an int, 0 or above")
        _require(
            self.max_tokens is None or self.max_tokens <= 0 or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )
        for name in ("include_stop_str_in_output", "detokenize", "ignore_eos"):
            flag = getattr(self, name)
            _require(isinstance(flag, bool), name, flag, "True or False")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
            "seed", self.seed, "None or an int in [0, 2**63)",
        )
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            fits = k is None or (_is_int(k) and 0 <= k < 2**31)
            _require(fits, name, k, "None or an int in [0, 2**31)")

    def _store_plainly(self) -> None:
        """Lists as tuples, and the scalars of other libraries as ints and floats."""
        scalars: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Integral) and not isinstance(value, int):
                scalars[field.name] = int(value)
            elif isinstance(value, Real) and not isinstance(value, int | float):
                scalars[field.name] = float(value)
        stored: dict[str, Any] = {
            **scalars,
            "logit_bias": _pairs("logit_bias", self.logit_bias),
            "bad_words": _words("bad_words", self.bad_words),
            "stop": _texts("stop", self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
        }
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            _require(bool(allowed), "allowed_token_ids", allowed, "None (all) or at least one id")
            stored["allowed_token_ids"] = allowed
        for name, value in stored.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top_p, top_k or min_p changes the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def edits(self) -> bool:
        """Whether anything may change logits before the temperature does."""
        return bool(
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens > 0
        )

    @property
    def needs_text(self) -> bool:
        """Whether the output has to be decoded while it grows."""
        return bool(self.stop) or self.detokenize

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown field is a TypeError that names the nearest one."""
        return dataclasses.replace(cls(), **checked_fields(fields))

    @classmethod
    def from_generation_config(
        cls, source: str | Path | Mapping[str, Any], **overrides: Any
    ) -> SamplingParams:
        """What a generation_config.json says about sampling, with `overrides` on top.

        source: a model folder, a generation_config.json, or its content. Never read unless asked
        for, and nothing is added that it does not say: see `generation_config.sampling_fields`,
        which also says what is refused. An unknown override is a TypeError.
        """
        return cls.from_fields({**sampling_fields(source), **checked_fields(overrides)})


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` as a dict, after checking that every name is a field of `SamplingParams`."""
    known = [f.name for f in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise TypeError(f"unknown sampling field {name!r}{hint}")
    return dict(fields)


def merged_params(
    params: SamplingParams | Sequence[SamplingParams] | None, fields: Mapping[str, Any]
) -> SamplingParams | list[SamplingParams]:
    """`params`, one for all prompts or one for each, with `fields` in the place of theirs.

    None stands for the defaults. An unknown field is a TypeError, as in `checked_fields`.
    """
    changes = checked_fields(fields)
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return dataclasses.replace(params, **changes)
    if isinstance(params, Mapping) or not all(isinstance(each, SamplingParams) for each in params):
        raise TypeError(
            f"params must be SamplingParams, or one for each prompt, got {params!r:.80}; "
            "SamplingParams.from_fields makes them of a mapping"
        )
    return [dataclasses.replace(each, **changes) for each in params]


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"SamplingParams.{name} must be {expected}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond what a float can hold
        return False


def _between(name: str, value: object, low: float, high: float) -> None:
    inside = isinstance(value, Real) and _is_number(value) and low <= float(value) <= high
    _require(inside, name, value, f"a number between {low} and {high}")


def _items(name: str, value: object, expected: str) -> tuple[Any, ...]:
    """The items of a list, tuple, set or array; text and mappings are no such thing."""
    fits = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    _require(fits, name, value, expected)
    assert isinstance(value, Iterable)
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    expected = "token ids (ints)"
    ids = _items(name, value, expected)
    ints = all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids)
    _require(ints, name, value, expected)
    return tuple(int(i) for i in ids)


def _texts(name: str, value: object) -> tuple[str, ...]:
    expected = "a non-empty text, or several"
    texts = (value,) if isinstance(value, str) else _items(name, value, expected)
    _require(all(isinstance(t, str) and t for t in texts), name, value, expected)
    return texts


def _words(name: str, value: object) -> tuple[str | tuple[int, ...], ...]:
    expected = "words, each a non-empty text or a non-empty list of token ids"
    stored: list[str | tuple[int, ...]] = []
    for word in _items(name, value, expected):
        listed = isinstance(word, Iterable) and not isinstance(word, Mapping)
        _require(listed, name, value, expected)
        stored.append(word if isinstance(word, str) else _ids(name, word))
    _require(all(stored), name, value, expected)
    return tuple(stored)


def _pairs(name: str, value: object) -> tuple[tuple[int, float], ...]:
    expected = "token ids (ints), each once, with a number from -1e30 to 1e30 each"
    pairs = value.items() if isinstance(value, Mapping) else _items(name, value, expected)
    bias: dict[int, float] = {}
    for pair in pairs:
        fits = isinstance(pair, tuple | list) and len(pair) == 2
        _require(fits, name, value, expected)
        token, number = pair
        if isinstance(token, str) and token.isdecimal():
            token = int(token)
        fits = isinstance(token, Integral) and not isinstance(token, bool) and token not in bias
        fits = fits and _is_number(number) and abs(number) <= 1e30
        _require(fits, name, value, expected)
        bias[int(token)] = float(number)
    return tuple(sorted(bias.items()))
