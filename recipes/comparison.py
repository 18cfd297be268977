"""Several runs side by side, from what they left in their folders: a table and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes.errors import RunError, sentence

HEAD = (
    "run", "algorithm", "seed", "steps", "held-out before", "held-out after", "reward, last tenth",
    "tokens/s", "s per step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run's folder: its configuration and the records of `metrics.jsonl`, in order."""

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, float | None]]

    @staticmethod
    def read(folder: Path) -> FinishedRun:
        """RunError if there is no run in that folder."""
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return FinishedRun(folder, config, [json.loads(line) for line in lines])
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunError(
                f"{folder} holds no run that can be read ({sentence(error)}); name folders that "
                "`--output` named, with config.yaml and metrics.jsonl in them"
            ) from None

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric, where it is there and finite."""
        points = [(r["step"], r[name]) for r in self.records if r.get(name) is not None]
        return [float(step or 0) for step, _ in points], [float(v or 0.0) for _, v in points]

    def row(self) -> tuple[str, ...]:
        """As named in `HEAD`."""
        _, heldout = self.series("heldout/reward")
        steps, reward = self.series("reward")
        _, speed = self.series("rollout/tokens_per_second")
        _, seconds = self.series("timing_s/step")
        tenth = max(len(reward) // 10, 1)
        return (
            self.folder.name,
            str(self.config["algorithm"]["name"]),
            str(self.config["seed"]),
            f"{max(steps, default=0):.0f}",
            *(_figure(values) for values in (heldout[:1], heldout[-1:], reward[-tenth:])),
            _figure(speed, 0),
            _figure(seconds),
        )


def compare(folders: Sequence[Path], picture: Path) -> str:
    """A Markdown table of the runs, best held-out reward first; draws their curves to `picture`."""
    runs = [FinishedRun.read(folder) for folder in folders]
    runs.sort(key=lambda run: run.series("heldout/reward")[1][-1:] or [-math.inf], reverse=True)
    rows = [HEAD, ("---",) * len(HEAD), *(run.row() for run in runs)]
    _draw(runs, picture)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _draw(runs: Sequence[FinishedRun], picture: Path) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    names = ("reward", "heldout/reward", "completions/mean_length")
    for panel, name in zip(panels, names, strict=True):
        for run in runs:
            label = f"{run.config['algorithm']['name']} ({run.folder.name})"
            panel.plot(*run.series(name), label=label)
        panel.set(xlabel="step", ylabel=name)
    panels[0].legend(fontsize="small")
    canvas.print_png(picture)


def _figure(values: Sequence[float], digits: int = 3) -> str:
    return f"{sum(values) / len(values):,.{digits}f}" if values else "-"
