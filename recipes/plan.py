"""`--dry-run`: what a run would take of memory and at least of time, before anything is loaded.

Sizes follow from the model's shape and the configuration; what Python and its libraries take was
measured. Activations are those of one micro-batch: what a layer keeps for its backward, and one
chunk of logits with its gradient. The time is a bound from below: all matrix products at the best
rate that this machine shows in half a second, nothing else counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from recipes.algorithms.presets import Preset
from recipes.config import RunConfig
from recipes.trainer_settings import trainer_config
from rollout.construction import kv_budget
from rollout.logprobs import ROWS_PER_CHUNK
from rollout.model import Decoder, DecoderConfig
from trainer_bridge import TrainerConfig
from trainer_bridge.arena import ArenaLayout
from trainer_bridge.gate_settings import GateSettings

FLOAT = 4
DRIVER_BYTES, TRAINER_BYTES, ACTOR_BYTES, RAY_BYTES = (m << 20 for m in (330, 300, 205, 300))
"""Of processes that hold nothing yet: measured on Linux with Python 3.11 and torch 2.13."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """memory: bytes by what takes them. seconds: of one step, at least, by phase."""

    model: str
    parameters: int
    kv_blocks: int
    micro_batches: int
    tokens: Mapping[str, int]
    memory: Mapping[str, int]
    available: int
    gflop_per_s: float
    seconds: Mapping[str, float]

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.available

    def text(self) -> str:
        """For people: tables in Markdown, and the sentence that decides."""
        total = sum(self.memory.values())
        lines = [
            f"model: {self.model}, {self.parameters:,} parameters",
            f"KV of each rollout actor: {self.kv_blocks:,} blocks, taken as they are used",
            f"a step: {self.tokens['sampled']:,} tokens sampled at most, {self.tokens['prompt']:,} "
            f"of prompts; {self.micro_batches} micro-batches",
            "",
            "| memory | MiB |",
            "|---|---|",
            *(f"| {name} | {size / 2**20:,.0f} |" for name, size in self.memory.items()),
            f"| **in all** | **{total / 2**20:,.0f}** |",
            f"| available here | {self.available / 2**20:,.0f} |",
            "",
            f"| a step, at least ({self.gflop_per_s:,.0f} GFLOP/s) | s |",
            "|---|---|",
            *(f"| {name} | {seconds:.3g} |" for name, seconds in self.seconds.items()),
            "",
        ]
        if self.fits:
            return "\n".join([*lines, "it fits"])
        largest = max(self.memory, key=lambda name: self.memory[name])
        return "\n".join(
            [
                *lines,
                f"it does NOT fit: {total / 2**30:.1f} GiB are needed and "
                f"{self.available / 2**30:.1f} GiB available; the most goes to {largest} (see "
                "rollout.actors, rollout.max_batch_size, optimizer.micro_batch_tokens, "
                "optimizer.gradient_checkpointing)",
            ]
        )


def plan_run(config: RunConfig, preset: Preset, folder: Path, prompt_tokens: int) -> RunPlan:
    """prompt_tokens: of a typical prompt. Reads nothing of the model but its config.json."""
    shape = DecoderConfig.from_folder(folder)
    model = Decoder(shape, device="meta")
    layout = ArenaLayout.for_module(model)
    weights, settings = layout.total_bytes, trainer_config(config, preset)
    blocks, kv = kv_budget(shape, config.rollout.max_batch_size)
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    tokens = {
        "sampled": completions * config.rollout.max_tokens,
        "prompt": config.rollout.prompts_per_step * prompt_tokens,
    }
    in_a_step = sum(tokens.values())
    in_a_pack = min(config.optimizer.micro_batch_tokens, in_a_step)
    trunk = sum(p.numel() for name, p in model.named_parameters() if "lm_head" not in name) * FLOAT
    actors = config.rollout.actors
    memory = {
        "weights, once" if config.rollout.nodes == 1 else "weights, once per node": weights,
        "gradient and both moments": 3 * weights,
        "undo copy": weights if GateSettings().wants_undo(weights) else 0,
        "critic, with gradient and moments": 4 * trunk
        if settings.critic is not None and settings.critic.trunk == "own"
        else 0,
        "reference policy": weights if settings.reference else 0,
        "activations of a micro-batch": _activations(shape, in_a_pack, settings),
        f"KV of {actors} rollout actors, at most": actors * kv,
        "driver, trainer, rollout actors and Ray themselves": DRIVER_BYTES
        + TRAINER_BYTES
        + actors * ACTOR_BYTES
        + RAY_BYTES,
    }
    rate = _gflop_per_s()
    passes = 8 if config.optimizer.gradient_checkpointing else 6
    per_token = 1e-9 * (weights / FLOAT) / rate
    seconds = {
        "rollout": 2 * in_a_step * per_token,
        "update": passes * in_a_step * config.optimizer.num_iterations * per_token,
    }
    return RunPlan(
        config.model,
        sum(p.numel() for p in model.parameters()),
        blocks,
        max(1, -(-in_a_step // config.optimizer.micro_batch_tokens)),
        tokens,
        {name: size for name, size in memory.items() if size},
        _available(),
        rate,
        seconds,
    )


def _activations(shape: DecoderConfig, tokens: int, settings: TrainerConfig) -> int:
    """What a forward keeps for the backward, and the largest that lives beside it."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layer = 4 * width + 3 * queries + 4 * keys + 3 * inner
    kept = shape.num_hidden_layers * layer
    if settings.gradient_checkpointing:
        kept = shape.num_hidden_layers * 2 * width + layer
    logits = 2 * ROWS_PER_CHUNK * shape.vocab_size
    return FLOAT * (tokens * kept + logits)


def _gflop_per_s() -> float:
    """The best of some products of matrices, on all threads, within half a second."""
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    best, deadline = 0.0, time.perf_counter() + 0.5
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        torch.matmul(a, b)
        best = max(best, 2e-9 * 1024**3 / (time.perf_counter() - started))
    return best


def _available() -> int:
    """Bytes that new processes can take, of the machine and of this container."""
    available = int(psutil.virtual_memory().available)
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max": no limit of its own
        return available
