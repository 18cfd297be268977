"""Lockstep's rollout side: the engine, the model it shares with the trainer, Ray actors."""

from rollout.core import EngineReleased
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig
from rollout.exactness import Exactness, ExactnessRefused
from rollout.model import Decoder, DecoderConfig, load_pretrained, save_pretrained
from rollout.policy import (
    LocalGate,
    PoisonedWeights,
    TornWeights,
    WeightGate,
    WeightsError,
)
from rollout.request import Rollout, VersionSpan
from rollout.rollout_batch import RolloutBatch
from rollout.sampling import SamplingParams
from rollout.tasks import TaskEvent
from rollout.tokenizer import Tokenizer

__all__ = [
    "Decoder",
    "DecoderConfig",
    "EngineConfig",
    "EngineReleased",
    "Exactness",
    "ExactnessRefused",
    "LocalGate",
    "PoisonedWeights",
    "Rollout",
    "RolloutBatch",
    "RolloutEngine",
    "SamplingParams",
    "TaskEvent",
    "Tokenizer",
    "TornWeights",
    "VersionSpan",
    "WeightGate",
    "WeightsError",
    "load_pretrained",
    "save_pretrained",
]
