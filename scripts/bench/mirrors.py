"""How long the other nodes of a cluster take to have new weights, against their size.

    RAY_ADDRESS=... python -m scripts.bench.mirrors --sizes-mb 10,100,500 --nodes 2

Needs a running Ray with that many nodes; two raylets on one machine will do (`ray start --head`,
then `ray start --address`). For each size, after a publication that changes nothing:

  returned   `apply_weight_update` has returned to the driver: its own node serves the version
  confirmed  every rollout actor of every node has said that the version is what it reads

In milliseconds, medians; with one node, as the control, and with all. The difference of
"confirmed" over the bytes is what a mirror costs. A table goes to stdout, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from torch import nn

from rollout import Decoder, DecoderConfig, save_pretrained
from scripts.bench.chaos.actors import tiny_tokenizer
from trainer_bridge import Colocation, Placement, TrainerConfig

MB = 1_000_000
HIDDEN, INTERMEDIATE = 512, 1536


def unchanged(model: nn.Module) -> None:
    """An update that costs nothing."""


def save_model(folder: Path, size: int) -> int:
    """A model of about `size` bytes, to a folder; returns how many bytes its weights have."""
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=16,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(round(size / layer), 1),
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=HIDDEN // 8,
        max_position_embeddings=64,
    )
    model = Decoder(config)
    model.init_weights(0)
    save_pretrained(model, folder, tiny_tokenizer())
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def measure(folder: Path, nodes: int, repeats: int) -> tuple[float, float]:
    """Medians in seconds: returned, confirmed."""
    returned, confirmed = [], []
    with Colocation(
        folder,
        rollout_actors=max(nodes, 2),
        trainer=TrainerConfig(undo=False),
        placement=Placement(nodes=nodes),
    ) as run:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            run.trainer.apply_weight_update(None, unchanged)
            returned.append(time.perf_counter() - began)
            run.confirm_publication(run.trainer.policy_version)
            confirmed.append(time.perf_counter() - began)
    return statistics.median(returned[1:]), statistics.median(confirmed[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes-mb", default="10,100,500")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    rows = []
    print(f"{'MB':>6} {'nodes':>5} {'returned ms':>12} {'confirmed ms':>13} {'ms per MB':>10}")
    for megabytes in map(int, options.sizes_mb.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            size = save_model(folder, megabytes * MB)
            alone = 0.0
            for nodes in (1, options.nodes):
                returned, confirmed = measure(folder, nodes, options.repeats)
                alone = confirmed if nodes == 1 else alone
                per_mb = 1000 * (confirmed - alone) / (size / MB)
                rows.append(
                    {
                        "mb": size / MB, "nodes": nodes, "returned_ms": 1000 * returned,
                        "confirmed_ms": 1000 * confirmed, "ms_per_mb": per_mb,
                    }
                )  # fmt: skip
                print(
                    f"{size / MB:6.0f} {nodes:5} {1000 * returned:12.1f} {1000 * confirmed:13.1f} "
                    f"{per_mb:10.2f}",
                    flush=True,
                )
    load = os.getloadavg()[0]
    print(json.dumps({"benchmark": "mirrors", "load": load, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
