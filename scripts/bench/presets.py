"""Held-out reward before and after training, for every preset and several seeds, from real runs.

    python -m scripts.bench.presets [--seeds 3] [--algorithms dapo gspo] [--field value ...]

Each run is the recipe of its preset, `python -m recipes.grpo` or `recipes.ppo`, with its default
configuration and its own process, actors and folder, one after another;
equal seeds start from the same warm-started policy and meet the same prompts. Prints one JSON line
per run and then a table; fields of the recipe pass through.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipes.algorithms.presets import PRESETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--algorithms", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    options, fields = parser.parse_known_args()
    rows = []
    for name in options.algorithms:
        runs = [train(name, seed, fields) for seed in range(options.seeds)]
        before, after = ([run[key] for run in runs] for key in ("before", "after"))
        gains = [b - a for a, b in zip(before, after, strict=True)]
        rows.append((name, *map(_figures, (before, after)), f"{min(gains):+.2f}"))
    print("| algorithm | before | after | least gain |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 0


def train(name: str, seed: int, fields: list[str]) -> dict[str, float | str]:
    """One run; SystemExit with the end of what it printed if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        started = time.monotonic()
        run = subprocess.run(
            [
                sys.executable, "-m", PRESETS[name].recipe, f"--algorithm={name}", f"--seed={seed}",
                f"--output={output}", "--logging.wandb=disabled", *fields,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if run.returncode:
            raise SystemExit(f"{name}, seed {seed}: {run.stdout[-2000:]}")
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        heldout = [r["heldout/reward"] for r in map(json.loads, lines) if "heldout/reward" in r]
    result: dict[str, float | str] = {
        "bench": "presets", "algorithm": name, "seed": seed, "before": heldout[0],
        "after": heldout[-1], "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


def _figures(values: list[float]) -> str:
    each = ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.mean(values):.3f} ({each})"


if __name__ == "__main__":
    sys.exit(main())
