"""The decoder, its configuration, and how its weights are read and written."""

from rollout.model.checkpoint import load_pretrained, load_weights, save_pretrained
from rollout.model.config import DecoderConfig
from rollout.model.decoder import Decoder, attention_for

__all__ = [
    "Decoder",
    "DecoderConfig",
    "attention_for",
    "load_pretrained",
    "load_weights",
    "save_pretrained",
]
