"""The run's own account: report.md and curves.png.

    python -m recipes.report RUN [RUN ...] [--picture comparison.png]      runs side by side
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes.checkpoints import Checkpoint
from recipes.comparison import compare
from recipes.config import RunConfig
from recipes.errors import RunError
from recipes.evaluation import Evaluation
from recipes.progress import format_duration
from recipes.promises import PromiseCheck, check_exactness, check_promises, check_weights
from recipes.sampled_step import SampledStep
from rollout import Exactness
from trainer_bridge import WeightsEcho


@dataclass(slots=True)
class RunRecord:
    """How far a run has come and what it has seen; filled in place as the run goes on.

    `state` goes into each checkpoint, and `restore` goes on from there. carried: what a recipe's
    lessons hand on from step to step.
    """

    config: RunConfig
    history: list[dict[str, float]]
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)
    weights_bytes: int = 0
    memory_before: Mapping[str, int] = field(default_factory=dict)
    memory_after: Mapping[str, int] = field(default_factory=dict)
    exactness: Mapping[str, Exactness] = field(default_factory=dict)
    weights: Mapping[str, WeightsEcho] = field(default_factory=dict)
    checkpoint: Path | None = None
    warm_start_done: int = 0
    steps_done: int = 0
    prompts_drawn: int = 0
    policy_version: int = 0
    ahead: SampledStep | None = None
    carried: dict[str, float] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    checkpoint_seconds: float = 0.0
    seconds: float = 0.0
    status: str = "running"

    def state(self) -> dict[str, Any]:
        """Plain values, beside what the checkpoint itself says."""
        return {
            "records": len(self.history),
            "warm_start_done": self.warm_start_done,
            "prompts_drawn": self.prompts_drawn,
            "carried": self.carried,
            "resumes": self.resumes,
            "evaluations": [[step, asdict(e)] for step, e in self.evaluations],
        }

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Back to where a checkpoint was written; None = before the first step."""
        state: Mapping[str, Any] = checkpoint.state if checkpoint else {}
        self.checkpoint = checkpoint.folder if checkpoint else None
        self.steps_done = checkpoint.step if checkpoint else 0
        self.policy_version = checkpoint.policy_version if checkpoint else 0
        self.ahead = SampledStep.load(checkpoint.folder) if checkpoint else None
        self.warm_start_done = state.get("warm_start_done", 0)
        self.prompts_drawn = state.get("prompts_drawn", 0)
        self.carried = dict(state.get("carried", {}))
        self.resumes = [*state.get("resumes", []), self.steps_done]
        self.evaluations[:] = [
            (step, Evaluation.from_dict(values)) for step, values in state.get("evaluations", [])
        ]

    def evaluated(self, step: int) -> bool:
        return any(step == at for at, _ in self.evaluations)

    @property
    def training_steps(self) -> list[dict[str, float]]:
        """Records of training steps, without warm start and evaluations."""
        return [record for record in self.history if "reward" in record]


def write_report(folder: Path, record: RunRecord) -> Path:
    """Write `curves.png` and `report.md` into `folder`; returns the path of the report."""
    _draw_curves(folder / "curves.png", record)
    sections = [
        _head(record),
        _heldout(record.evaluations, bool(record.config.warm_start.steps)),
        _training(record.training_steps),
        _time(record),
        _promises(
            [
                check_weights(record.weights, record.config.rollout.nodes),
                check_exactness(record.exactness),
                *check_promises(record.training_steps, record.config.rollout.overlap),
            ]
        ),
        _memory(record),
        _examples(record.evaluations),
    ]
    path = folder / "report.md"
    path.write_text("\n\n".join(s for s in sections if s) + "\n", encoding="utf-8")
    return path


def _head(record: RunRecord) -> str:
    config = record.config
    saved = f"`{record.checkpoint}`" if record.checkpoint else "none"
    warm = config.warm_start.steps
    imitated = f"a warm start of {warm} supervised steps, then " if warm else ""
    return (
        f"# {config.name}\n\n"
        f"Model `{config.model}`, task `{config.task.name}`, algorithm `{config.algorithm.name}`, "
        f"seed {config.seed}; {imitated}{record.steps_done} of {config.steps} steps in "
        f"{format_duration(record.seconds)}; {record.status}.{_resumed(record.resumes)}\n\n"
        f"Checkpoint: {saved}. All settings: `config.yaml`; all metrics: `metrics.jsonl`."
    )


def _resumed(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f" Gone on with after step {', '.join(map(str, steps))}; the time is since the last."


def _heldout(evaluations: Sequence[tuple[int, Evaluation]], warm_started: bool) -> str:
    if not evaluations:
        return "## Held-out reward\n\nNot evaluated."
    rows = [
        (str(step), _figure(e.reward), str(e.num_prompts), f"{e.truncated:.0%}")
        for step, e in evaluations
    ]
    (_, first), (_, last) = evaluations[0], evaluations[-1]
    change = (
        f"Before {'(after the warm start) ' if warm_started else ''}{_figure(first.reward)}, "
        f"after {_figure(last.reward)} "
        f"({last.reward - first.reward:+.4f}), greedy, on {last.num_prompts} held-out prompts."
    )
    table = _table(("after step", "reward", "prompts", "truncated"), rows)
    return f"## Held-out reward\n\n{change}\n\n{table}"


def _training(steps: Sequence[Mapping[str, float]]) -> str:
    if not steps:
        return "## Training\n\nNo step was completed."
    names = (
        "reward",
        "frac_reward_zero_std",
        "completions/mean_length",
        "rollout/tokens_per_second",
        "entropy",
        "actor/grad_norm",
        "timing_s/step",
    )
    tenth = max(len(steps) // 10, 1)
    rows = [
        (name, _mean(name, steps[:tenth]), _mean(name, steps[-tenth:]))
        for name in names
        if any(name in record for record in steps)
    ]
    table = _table(("mean of", f"first {tenth} steps", f"last {tenth} steps"), rows)
    return f"## Training\n\n![curves](curves.png)\n\n{table}"


def _time(record: RunRecord) -> str:
    """Seconds by phase, of training steps and of what lies between them."""
    steps = record.training_steps
    if not steps:
        return ""
    names = {name for step in steps for name in step if name.startswith("timing_s/")}
    names -= {"timing_s/step", "timing_s/wall", "timing_s/train"}
    totals = {name: sum(step.get(name, 0.0) for step in steps) for name in names}
    totals["evaluation"] = sum(r.get("timing_s/evaluation", 0.0) for r in record.history)
    totals["checkpoint"] = record.checkpoint_seconds
    whole = sum(totals.values())
    rows = [
        (name.removeprefix("timing_s/"), _figure(total), f"{total / whole:.0%}")
        for name, total in sorted(totals.items(), key=lambda item: -item[1])
        if total
    ]
    overlapped = (
        " With `rollout.overlap` rollouts and rewards lie beside the update: they do not add up."
        if record.config.rollout.overlap
        else ""
    )
    table = _table(("phase", "seconds", "share"), rows)
    return (
        f"## Where the time goes\n\nOf the {len(steps)} training steps, and of evaluations and "
        f"checkpoints between them.{overlapped}\n\n{table}"
    )


def _promises(checks: Sequence[PromiseCheck]) -> str:
    words = {True: "yes", False: "**NO**", None: "-"}
    rows = [(c.promise, c.measured, c.expected, words[c.holds]) for c in checks]
    table = _table(("promise", "measured in this run", "expected", "holds"), rows)
    return f"## Promises checked in this run\n\n{table}"


def _memory(record: RunRecord) -> str:
    before, after = record.memory_before, record.memory_after
    if not before and not after:
        return ""
    rows = [
        (name, _mebibytes(before.get(name)), _mebibytes(after.get(name)))
        for name in dict.fromkeys([*before, *after])
    ]
    table = _table(("process", "before the first step", "after the last step"), rows)
    nodes = record.config.rollout.nodes
    where = "once" if nodes == 1 else f"once on each of {nodes} nodes"
    return (
        f"## Memory\n\nThe weights ({_mebibytes(record.weights_bytes)} MiB) exist {where} and are "
        f"mapped by every process. MiB that belong to each process alone (USS):\n\n{table}"
    )


def _examples(evaluations: Sequence[tuple[int, Evaluation]]) -> str:
    if not evaluations:
        return ""
    step, evaluation = evaluations[-1]
    rows = [
        (_cell(prompt), _cell(completion), "-" if reward is None else _figure(reward))
        for prompt, completion, reward in evaluation.examples
    ]
    table = _table(("prompt", "completion", "reward"), rows)
    return f"## Held-out examples after step {step}\n\n{table}"


def _draw_curves(path: Path, record: RunRecord) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    reward, speed = figure.subplots(1, 2)
    steps = record.training_steps
    xs = [r["step"] for r in steps]
    reward.plot(xs, [r["reward"] for r in steps], label="reward (sampled)")
    reward.plot(
        [step for step, _ in record.evaluations],
        [evaluation.reward for _, evaluation in record.evaluations],
        marker="o",
        label="held-out reward (greedy)",
    )
    reward.set(xlabel="step", ylabel="reward")
    reward.legend()
    speed.plot(xs, [r.get("rollout/tokens_per_second", math.nan) for r in steps])
    speed.set(xlabel="step", ylabel="rollout tokens per second")
    speed.set_ylim(bottom=0)
    canvas.print_png(path)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(r) for r in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _mean(name: str, records: Sequence[Mapping[str, float]]) -> str:
    values = [r[name] for r in records if name in r and math.isfinite(r[name])]
    return _figure(sum(values) / len(values)) if values else "-"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"


def _cell(text: str, limit: int = 120) -> str:
    flat = " ".join(text.replace("|", "\\|").split())
    return f"`{flat[:limit]}`" if flat else "(empty)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of the runs and draws their curves; 1 if a folder holds no run."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.report", description="Compare runs: a table and their curves."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--picture", type=Path, default=Path("comparison.png"))
    options = parser.parse_args(arguments)
    try:
        print(compare(options.runs, options.picture))
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\ncurves: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
