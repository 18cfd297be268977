"""An engine's settings held against its model, before anything is allocated."""

from __future__ import annotations

import torch

from kvcache.storage import KVShape, KVStorage, num_blocks
from rollout.model import Decoder, DecoderConfig
from rollout.policy import ParameterLeftArena


def checked_device(model: Decoder, device: str | torch.device | None) -> torch.device:
    """The parameters' device; ValueError if another one was asked for."""
    own = next(model.parameters()).device
    if device is not None and torch.device(device).type != own.type:
        raise ValueError(
            f"device={device!s}, but the model's parameters lie on {own}; "
            "load the model onto that device first"
        )
    return own


def checked_dtype(model: Decoder, dtype: torch.dtype | None) -> torch.dtype:
    """The parameters' dtype; ValueError if another one was asked for."""
    own = next(model.parameters()).dtype
    if dtype is not None and dtype != own:
        raise ValueError(f"dtype={dtype}, but the model's parameters are {own}; load it so")
    return own


def checked_length(model: Decoder, max_seq_len: int | None) -> int:
    """`max_seq_len` or the model's context length; ValueError if none is known or it is longer."""
    context = model.config.max_position_embeddings
    length = max_seq_len or context
    if not length:
        raise ValueError(
            "max_seq_len is not given and the model's config has no context length; pass one"
        )
    if length > context > 0:
        raise ValueError(f"max_seq_len={length} exceeds the model's context length {context}")
    return length


def kv_budget(
    config: DecoderConfig,
    max_batch_size: int,
    max_seq_len: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[int, int]:
    """Blocks of the KV cache that an engine of these settings makes, and their bytes."""
    shape = _kv_shape(config, block_size, dtype)
    length = max_seq_len or config.max_position_embeddings
    blocks = num_blocks(shape, max_batch_size, length, None, None)
    return blocks, blocks * shape.block_bytes


def _kv_shape(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> KVShape:
    return KVShape(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, block_size, dtype
    )


def kv_storage(
    model: Decoder,
    cache: KVStorage | None,
    *,
    block_size: int,
    max_batch_size: int,
    max_seq_len: int,
    num_kv_blocks: int | None,
    kv_cache_bytes: int | None,
) -> KVStorage:
    """KV pages for the budget, or `cache` after checking that it is of this model's shape."""
    parameter = next(model.parameters())
    shape = _kv_shape(
        model.config, block_size if cache is None else cache.block_size, parameter.dtype
    )
    if cache is None:
        blocks = num_blocks(shape, max_batch_size, max_seq_len, num_kv_blocks, kv_cache_bytes)
        return KVStorage(shape, blocks, parameter.device)
    if num_kv_blocks is not None or kv_cache_bytes is not None:
        raise ValueError("cache= has its own size; num_kv_blocks and kv_cache_bytes go without it")
    if cache.shape != shape or cache.device != parameter.device:
        raise ValueError(
            f"cache= is of {cache.shape} on {cache.device}; this model needs {shape} "
            f"on {parameter.device}"
        )
    return cache


class ParameterAddresses:
    """Where a model's parameters lay when the engine was built, and must still lie."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._addresses = {name: p.data_ptr() for name, p in model.named_parameters()}

    def check(self) -> None:
        """Raise `ParameterLeftArena` for a parameter that was re-bound, by name."""
        for name, parameter in self._model.named_parameters():
            if parameter.data_ptr() != self._addresses.get(name):
                raise ParameterLeftArena(
                    f"parameter {name!r} no longer lies where the engine reads it: its data was "
                    "re-bound (`.data = …`, `load_state_dict(assign=True)`, `.to(…)`, "
                    "`vector_to_parameters`). Copy into it in place instead: p.copy_(new)"
                )
