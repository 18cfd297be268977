"""What was measured: one JSON line per engine, model and workload, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(slots=True)
class Figures:
    """One engine on one model and workload; filled while it runs."""

    engine: str
    model: str
    workload: str
    version: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """tokens/s of each repeat"""
    tokens: list[int] = field(default_factory=list)
    logprob_check: float | None = None
    limit_tokens_per_s: float | None = None
    error: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the repeats; None if the engine failed."""
        return median(self.speeds) if self.speeds and self.error is None else None

    def line(self) -> dict[str, Any]:
        """The JSON line."""
        values: dict[str, Any] = {
            "bench": "rollout",
            "engine": self.engine,
            "model": self.model,
            "workload": self.workload,
            "version": self.version,
            "settings": self.settings,
        }
        if self.tried:
            values["tried"] = self.tried
        speed = self.tokens_per_s
        if speed is None:
            return {**values, "error": self.error}
        values["tokens_per_s"] = round(speed, 2)
        values["repeats"] = [round(each, 2) for each in self.speeds]
        values["tokens"] = self.tokens
        values["logprob_check"] = self.logprob_check
        if self.limit_tokens_per_s is not None:
            values["limit_tokens_per_s"] = round(self.limit_tokens_per_s, 1)
            values["fraction_of_limit"] = round(speed / self.limit_tokens_per_s, 4)
        return values


def table(figures: Sequence[Figures], base: str) -> str:
    """Engines by cells, in Markdown: tokens/s, and how many times as many `base` made."""
    columns = list(dict.fromkeys((each.model, each.workload) for each in figures))
    speeds = {(each.engine, each.model, each.workload): each.tokens_per_s for each in figures}
    heads = [f"{model} {workload}" for model, workload in columns]
    lines = [
        f"| tokens/s ({base} ÷ engine) | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for engine in dict.fromkeys(each.engine for each in figures):
        cells = [
            _cell(speeds.get((engine, *column)), speeds.get((base, *column)), engine == base)
            for column in columns
        ]
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(speed: float | None, of_base: float | None, is_base: bool) -> str:
    if speed is None:
        return "–"
    text = f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
    if is_base or of_base is None:
        return text
    return f"{text} ({of_base / speed:.2f})"
