"""The parts of a decoder layer: RMSNorm, rotary embedding, attention block, gated MLP.

No in-place operation on activations, no buffer that depends on the batch, no global context: the
same code runs the trainer's packed rows under autograd and the engine's paged step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attention import Attention
from rollout.model.config import DecoderConfig, Llama3RopeScaling
from rollout.model.fusion import FusedLinear, Linear


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight over the last dimension, in fp32.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


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

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin `[num_tokens, 1, head_dim]` for int64 positions `[num_tokens]`."""
        needed = int(positions.max()) + 1 if positions.numel() else 0
        tables = self._tables
        if tables is None or tables[0].shape[0] < needed or tables[0].device != positions.device:
            tables = self._tables = self._build(needed, positions.device)
        cos, sin = (table.index_select(0, positions).unsqueeze(1).to(dtype) for table in tables)
        return cos, sin

    def _build(self, needed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        blocks = 1 << max(0, (needed - 1) // self._BLOCK).bit_length()
        cos, sin = [], []
        for start in range(0, blocks * self._BLOCK, self._BLOCK):
            position = torch.arange(start, start + self._BLOCK, dtype=torch.float32)
            angles = position.unsqueeze(1) * self._inv_freq.unsqueeze(0)
            cos.append(torch.cat((angles.cos(),) * 2, dim=-1))
            sin.append(torch.cat((angles.sin(),) * 2, dim=-1))
        return torch.cat(cos).to(device), torch.cat(sin).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x `[num_tokens, heads, head_dim]` in the half-split layout of Hugging Face."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class _SiluMul(torch.autograd.Function):
    """silu(gate) · up, written with `exp` so that each element's bits are its own.

    `torch.sigmoid` and `F.silu` take a scalar path at the tail of a vector and differ there in
    the last bit (seen on AVX-512 for widths that are no multiple of 32); `exp`, + and / do not.
    """

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return gate / (1 + torch.exp(-gate)) * up

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


class AttentionBlock(nn.Module):
    """Projections, optional per-head q/k norm (Qwen3), rotary embedding, attention, output."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, q_out = config.hidden_size, self.heads * self.head_dim
        kv_out = self.kv_heads * self.head_dim
        self.q_proj = Linear(width, q_out, config.qkv_bias, dtype, device)
        self.k_proj = Linear(width, kv_out, config.qkv_bias, dtype, device)
        self.v_proj = Linear(width, kv_out, config.qkv_bias, dtype, device)
        self.o_proj = Linear(q_out, width, config.o_bias, dtype, device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, device)
        self._qkv = FusedLinear(self.q_proj, self.k_proj, self.v_proj)

    def forward(
        self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """x `[num_tokens, hidden]` -> `[num_tokens, hidden]`."""
        tokens = x.shape[0]
        heads = self._qkv(x).view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = attention.attend(layer, q, k, v)
        out: Tensor = self.o_proj(attended.reshape(tokens, self.heads * self.head_dim))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias, dtype, device)
        self.up_proj = Linear(width, inner, bias, dtype, device)
        self.down_proj = Linear(inner, width, bias, dtype, device)
        self._gate_up = FusedLinear(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(_SiluMul.apply(gate, up))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm residual layer."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.self_attn = AttentionBlock(config, dtype, device)
        self.mlp = MLP(config, dtype, device)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype, device)

    def forward(
        self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        x = x + self.self_attn(layer, self.input_layernorm(x), cos, sin, attention)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
