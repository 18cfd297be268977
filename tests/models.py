"""Tiny random models for the tests, of each supported family."""

from __future__ import annotations

import torch

from rollout import Decoder, DecoderConfig

FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}
VOCABULARY = 101
EOS = 1


def tiny_config(family: str = "qwen3", **changes: object) -> DecoderConfig:
    """Three layers, grouped queries, vocabulary of 101, context of 256."""
    fields: dict[str, object] = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": [EOS],
        **FAMILIES[family],
        **changes,
    }
    return DecoderConfig.from_dict(fields)


def tiny_model(family: str = "qwen3", seed: int = 0, **changes: object) -> Decoder:
    """Random weights, scaled up so that tokens and log-probs depend on every part of the model."""
    model = Decoder(tiny_config(family, **changes))
    model.init_weights(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return model
