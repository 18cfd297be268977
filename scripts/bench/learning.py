"""Do both learn? The embedded task by Lockstep and by TRL's `GRPOTrainer`, from one warm start.

    bash scripts/bench/peers/setup.sh trl              # TRL, once, in a venv of its own
    python -m scripts.bench.learning [--seeds 3] [--steps 40] [--picture learning.png]

What `scripts.bench.step` times must not be another algorithm. So: the same policy (a warm start of
`grpo_embedded.yaml`), the same prompts in the same order, group size, longest completion, loss
(clipped, mean over all tokens), advantage, learning rate (constant), AdamW and clipping; only the
noise differs. Every few steps the weights of both are judged by the same greedy evaluation on the
200 held-out problems. One JSON line per seed, then the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes.command_line import CONFIGS, parse_config
from recipes.data import PromptCursor
from recipes.evaluation import evaluate
from recipes.tasks.catalog import load_task
from recipes.tasks.task import Task
from rollout import RolloutBatch, RolloutEngine, SamplingParams, load_pretrained
from scripts.bench.peers.catalogue import ROOT, VENVS
from scripts.bench.peers.process import environment


@dataclass(frozen=True, slots=True)
class Settings:
    """What both are given."""

    seed: int
    steps: int
    every: int
    learning_rate: float = 4e-4
    prompts_per_step: int = 16
    group_size: int = 8
    max_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Curve:
    """rewards: of the sampled completions, step by step; heldout: after `every`, 2 · `every`, …;
    seconds: of all steps, without starting and saving."""

    rewards: list[float]
    heldout: list[float]
    seconds: float


def recipe(output: Path, settings: Settings, *options: str) -> None:
    """`python -m recipes.grpo` in a process of its own; SystemExit with its last words."""
    command = [
        sys.executable, "-m", "recipes.grpo", f"--output={output}", f"--seed={settings.seed}",
        "--logging.wandb=disabled", *options,
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"the recipe failed: {run.stdout[-1000:]}{run.stderr[-1000:]}")


def warm_start(folder: Path, settings: Settings) -> Path:
    """The policy that both begin with."""
    recipe(folder, settings, "--steps=1", "--checkpoint.keep=9")
    return folder / "checkpoints" / "step-000000"


def lockstep(policy: Path, folder: Path, settings: Settings, task: Task) -> Curve:
    recipe(
        folder, settings, f"--model={policy}", "--warm_start.steps=0", f"--steps={settings.steps}",
        f"--optimizer.learning_rate={settings.learning_rate}", "--optimizer.lr_schedule=constant",
        "--optimizer.warmup_steps=0", f"--checkpoint.every={settings.every}",
        "--checkpoint.keep=999", "--evaluation.every=0",
    )  # fmt: skip
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in records if "reward" in record]
    seconds = sum(record.get("step_time", 0.0) for record in records)
    saved = [folder / "checkpoints" / f"step-{step:06d}" for step in _saved(settings)]
    return Curve(rewards, [heldout(each, task) for each in saved], seconds)


def trl(policy: Path, folder: Path, settings: Settings, task: Task) -> Curve:
    folder.mkdir()
    cursor = PromptCursor(len(task.train), settings.seed)
    met = cursor.rows(0, settings.steps * settings.prompts_per_step)
    rows = [{name: task.train[index][name] for name in ("prompt", "answer")} for index in met]
    threads = len(os.sched_getaffinity(0))
    job = {"folder": str(policy), "rows": rows, "output": str(folder), "threads": threads}
    run = subprocess.run(
        [VENVS / "trl" / "bin" / "python", "-m", "scripts.bench.peers.trl_learning"],
        input=json.dumps({**job, "settings": asdict(settings)}),
        cwd=ROOT, env=environment(threads), capture_output=True, text=True,
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"TRL failed: {run.stderr[-1500:]}")
    found = json.loads((folder / "rewards.json").read_text(encoding="utf-8"))
    saved = [folder / f"checkpoint-{step}" for step in _saved(settings)]
    return Curve(found["rewards"], [heldout(each, task) for each in saved], found["seconds"])


def heldout(folder: Path, task: Task) -> float:
    """Greedy reward of saved weights."""
    model, tokenizer = load_pretrained(folder)
    engine = RolloutEngine(model, tokenizer)

    def run_batch(
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        session_ids: list[int] | None = None,
        on_finished: Any = None,
    ) -> RolloutBatch:
        return RolloutBatch.from_rollouts(engine.run_batch(prompts, params, return_details=True))

    return evaluate(run_batch, tokenizer, task, max_tokens=Settings(0, 1, 1).max_tokens).reward


def _saved(settings: Settings) -> range:
    return range(settings.every, settings.steps + 1, settings.every)


def draw(path: Path, curves: dict[str, list[Curve]], every: int) -> None:
    """Sampled and held-out reward of all seeds, one colour a side."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    sampled, held = figure.subplots(1, 2)
    for (side, runs), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        for run in runs:
            label = side if run is runs[0] else None
            sampled.plot(range(1, len(run.rewards) + 1), run.rewards, color=colour, label=label)
            xs = [every * (i + 1) for i in range(len(run.heldout))]
            held.plot(xs, run.heldout, color=colour, marker="o", label=label)
    sampled.set(xlabel="step", ylabel="reward (sampled)")
    held.set(xlabel="step", ylabel="held-out reward (greedy)")
    sampled.legend()
    canvas.print_png(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("learning.png"))
    options = parser.parse_args()
    curves: dict[str, list[Curve]] = {"Lockstep": [], "TRL": []}
    for seed in range(options.seeds):
        settings = Settings(seed, options.steps, options.every)
        config = parse_config(["--config", str(CONFIGS / "grpo_embedded.yaml"), f"--seed={seed}"])
        task = load_task(config.task, seed)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            policy = warm_start(folder / "warm", settings)
            before = heldout(policy, task)
            curves["Lockstep"].append(lockstep(policy, folder / "lockstep", settings, task))
            curves["TRL"].append(trl(policy, folder / "trl", settings, task))
        line = {"bench": "learning", "seed": seed, "before": before}
        line |= {side: asdict(runs[-1]) for side, runs in curves.items()}
        print(json.dumps(line), flush=True)
    draw(options.picture, curves, options.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
