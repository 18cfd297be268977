"""Rotary embedding: inverse frequencies, tables by position, and a step's part of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.model.config import DecoderConfig, Llama3RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a step's tokens: positions int64 `[tokens]` into cos and sin `[any, head_dim]`.

    fp32; both halves of a row are alike, as in the half-split layout of Hugging Face.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Rotary inverse frequencies, fp32 `[head_dim / 2]` (Su et al. 2021; Llama 3's scaling)."""
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    return _llama3_scaled(inv_freq, scaling)


def _llama3_scaled(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between are blended."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    longest, shortest = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    scaled = torch.where(wavelength > longest, inv_freq / scaling.factor, blended)
    return torch.where(wavelength < shortest, inv_freq, scaled)


class RotaryTable:
    """cos and sin by position, grown in blocks of a fixed size.

    A vectorised cos may round the tail of an array differently from its body, so an element's
    bits could depend on how many tokens a step holds. Blocks of one shape give every position the
    same place in the same call, always.
    """

    _BLOCK = 256  # positions; small enough that torch computes one block on one thread

    def __init__(self, inv_freq: Tensor) -> None:
        self._inv_freq = inv_freq
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(self, positions: Tensor) -> Rotation:
        """The angles of int64 positions `[num_tokens]`."""
        needed = int(positions.max()) + 1 if positions.numel() else 0
        tables = self._tables
        if tables is None or tables[0].shape[0] < needed or tables[0].device != positions.device:
            tables = self._tables = self._build(needed, positions.device)
        return Rotation(positions, *tables)

    def _build(self, needed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        blocks = 1 << max(0, (needed - 1) // self._BLOCK).bit_length()
        cos, sin = [], []
        for start in range(0, blocks * self._BLOCK, self._BLOCK):
            position = torch.arange(start, start + self._BLOCK, dtype=torch.float32)
            angles = position.unsqueeze(1) * self._inv_freq.unsqueeze(0)
            cos.append(torch.cat((angles.cos(),) * 2, dim=-1))
            sin.append(torch.cat((angles.sin(),) * 2, dim=-1))
        return torch.cat(cos).to(device), torch.cat(sin).to(device)
