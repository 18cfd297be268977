"""How one prompt is sampled: vLLM's names, with a few defaults changed on purpose."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one prompt. Differences from vLLM: no filter is on by default,
    `max_tokens=None` means up to the context, a small temperature is never raised silently.

    n: samples drawn for the prompt; they share its prefill.
    temperature: logits are divided by it; 0 means greedy.
    top_p, top_k, min_p: filters on the tempered distribution, in the order min_p, top_k, top_p;
        1.0, 0 (or -1) and 0.0 turn them off. `top_p=0` keeps the best token.
    max_tokens: most new tokens; a non-positive one rejects the prompt, not the batch.
    min_tokens: stop tokens cannot be sampled before this many new tokens.
    stop_token_ids: end the sample beside the model's own EOS ids; the stop token is kept.
    ignore_eos: the model's EOS ids do not end the sample (stop_token_ids still do).
    seed: with the prompt ids, the sample index and the position it determines every draw;
        None lets the engine derive one, which the result reports.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(isinstance(self.n, int) and self.n >= 1, "n", self.n, "an int of at least 1")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature", self.temperature, "a finite number, 0 (greedy) or above",
        )
        _require(0 <= self.top_p <= 1, "top_p", self.top_p, "between 0 and 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "0 or -1 (off) or a positive int")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or above")
        _require(
            self.max_tokens is None or self.max_tokens <= 0 or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )
        _require(
            self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**63),
            "seed", self.seed, "None or an int in [0, 2**63)",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top_p, top_k or min_p changes the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown field is a TypeError that names the nearest one."""
        return dataclasses.replace(cls(), **checked_fields(fields))


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` as a dict, after checking that every name is a field of `SamplingParams`."""
    known = [f.name for f in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise TypeError(f"unknown sampling field {name!r}{hint}")
    return dict(fields)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"SamplingParams.{name} must be {expected}, got {value!r}")
