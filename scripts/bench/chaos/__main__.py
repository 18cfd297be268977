"""Promise 5 under an adversary: nothing lost, nothing mislabelled, torn weights never read.

    python -m scripts.bench.chaos --seconds 600 --seed 1 [--control]

Thousands of updates with rollouts in flight, while processes are killed, stopped, delayed and made
to raise at every labelled point of the protocol (`faults.py`). An oracle recomputes every token
under the weights of the version it claims. Two stages: the product's parts in processes that are
back in a fraction of a second (`processes.py`), then real Ray actors under a `Colocation`
(`actors.py`).

The last line is JSON. Exit code 1 on any violation. `--control` switches the protocol off (first
stage only): then the same harness must find violations, and exit code 0 says that it did.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.chaos.oracle import Oracle
from scripts.bench.chaos.processes import ProtocolChaos


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.chaos", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=2, help="rollout processes")
    parser.add_argument("--ray-share", type=float, default=0.4, help="of the time, for Ray actors")
    parser.add_argument("--control", action="store_true", help="without the protocol")
    options = parser.parse_args()
    ray_seconds = 0.0 if options.control else options.seconds * options.ray_share

    logging.getLogger("rollout").setLevel(logging.ERROR)  # every loss would be a warning
    oracle = Oracle(options.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        checkpoints = Path(folder) / "checkpoints"
        chaos = ProtocolChaos(oracle, checkpoints, not options.control, options.rollouts)
        tally = chaos.run(options.seconds - ray_seconds)
        if ray_seconds:
            from scripts.bench.chaos.actors import ColocationChaos

            ColocationChaos(oracle, Path(folder), tally, options.rollouts).run(ray_seconds)

    for sentence in oracle.violations[:10]:
        print(f"violation: {sentence}", file=sys.stderr)
    result = {
        "bench": "chaos",
        "seconds": round(time.monotonic() - started, 1),
        "seed": options.seed,
        "control": options.control,
        "updates": tally.updates,
        "burnt_numbers": tally.burnt,
        "faults": tally.faults.total(),
        "faults_by_kind": dict(sorted(tally.faults.items())),
        "refusals": dict(sorted(tally.refusals.items())),
        "fenced_trainers": tally.fenced,
        "rollouts": oracle.rollouts,
        "versions_checked": len(oracle.versions),
        "tokens_checked": oracle.tokens,
        "recovery": tally.medians(),
        "violations": len(oracle.violations),
    }
    print(json.dumps(result))
    return int(bool(oracle.violations) is not options.control)


if __name__ == "__main__":
    sys.exit(main())
