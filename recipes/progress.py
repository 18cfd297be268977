"""The run on the terminal: a live table, or one plain line per step where there is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text


class RunDisplay:
    """Context manager. `update` after each step, `note` for a sentence in between.

    Shows reward, held-out reward, tokens per second, policy version and the time left, from the
    metric names of the run. Not a terminal: the same as lines, without control characters.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._total = total_steps
        self._console = console or Console()
        self._clock = clock
        self._started = clock()
        self._first_step: int | None = None
        self._step = 0
        self._shown: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=40)
        )
        self._bar_task = self._bar.add_task("steps", total=total_steps)
        self._live: Live | None = None

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show `values` as the state after `step` steps; names not given keep their last value.

        The pace is measured from the first step shown.
        """
        self._step = step
        if self._first_step is None:
            self._first_step, self._started = step, self._clock()
        self._shown.update(values)
        if self._live is not None:
            self._bar.update(self._bar_task, completed=step)
            self._live.update(self._render())
        else:
            cells = " | ".join(f"{name} {value}" for name, value in self._cells())
            self._print(f"step {step}/{self._total} | {cells}")

    def note(self, text: str) -> None:
        """A sentence above the table."""
        self._print(text)

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None before the first step."""
        done = self._step - (self._first_step or 0)
        if done < 1:
            return None
        return (self._clock() - self._started) / done * (self._total - self._step)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _cells(self) -> list[tuple[str, str]]:
        left = self.seconds_left
        return [
            ("reward", _number(self._shown.get("reward"), 3)),
            ("held-out", _number(self._shown.get("heldout/reward"), 3)),
            ("tokens/s", _number(self._shown.get("rollout/tokens_per_second"), 0)),
            ("rollout s", _number(self._shown.get("timing_s/rollout"), 2)),
            ("update s", _number(self._shown.get("timing_s/update"), 2)),
            ("version", _number(self._shown.get("rollout/policy_version"), 0)),
            ("left", "-" if left is None else format_duration(left)),
        ]

    def _render(self) -> Table:
        table = Table(title=self._title, title_justify="left", expand=False)
        for name, _ in self._cells():
            table.add_column(name, justify="right", min_width=9)
        table.add_row(*(value for _, value in self._cells()))
        outer = Table.grid()
        outer.add_row(table)
        outer.add_row(self._bar)
        return outer


def format_duration(seconds: float) -> str:
    """`75` as `1:15`, `4000` as `1:06:40`."""
    whole = max(round(seconds), 0)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
