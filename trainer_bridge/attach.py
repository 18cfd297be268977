"""An engine on weights that another process trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig
from rollout.model import Decoder, DecoderConfig
from rollout.policy import WeightsError
from rollout.remote import wait_for
from rollout.tokenizer import Tokenizer
from trainer_bridge.arena import WeightArena
from trainer_bridge.memory import MemoryHandle
from trainer_bridge.publication import Attachment, SharedGate
from trainer_bridge.trainer_actor import WeightsHandle


def attach_engine(
    weights: WeightsHandle,
    config: EngineConfig,
    ways: Sequence[Attachment] = (),
    whole_within_s: float = 120.0,
    mirror: Any = None,
) -> RolloutEngine:
    """An engine in this process on the trainer's weights, mapped read-only; nothing is copied.

    ways: handles through other processes that have the weights, should the trainer be gone. Waits
    at most `whole_within_s` for weights that are torn: another trainer may be about to mend them.
    mirror: the `MirrorActor` of this node, where the trainer is on another; its copy is attached.
    """
    folder = Path(weights.model_folder)
    shape = DecoderConfig.from_folder(folder)
    model = Decoder(shape, device="meta", operators=weights.operators)
    if mirror is not None:
        handle = mirror.attachment.remote()
        ways = [wait_for(handle, "the mirror of this node", "attach", whole_within_s)]
    else:
        ways = [(weights.arena, weights.gate), *ways]
    arena, gate_handle = _first_way(ways)
    arena.bind(model, requires_grad=False)
    gate = SharedGate.attach(arena, gate_handle, model)
    gate.wait_until_whole(whole_within_s)
    settings = asdict(config)
    del settings["num_threads"], settings["operators"]
    settings["attention_backend"] = weights.attention_backend
    return RolloutEngine(model, Tokenizer.from_folder(folder), gate=gate, **settings)


def _first_way(ways: Sequence[Attachment]) -> tuple[WeightArena, MemoryHandle]:
    """The weights through the first process that still has them."""
    for arena, gate in ways[:-1]:
        with suppress(WeightsError):
            return WeightArena.attach(arena), gate
    arena, gate = ways[-1]
    return WeightArena.attach(arena), gate
