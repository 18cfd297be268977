"""The parts of a decoder layer: attention block, gated MLP, and how they are put together.

What is computed is written here once; who computes it is `Operators`. No in-place operation on
activations, no buffer that depends on the batch, no global context: the same code runs the
trainer's packed rows under autograd and the engine's paged step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention import Attention
from rollout.model.config import DecoderConfig
from rollout.model.fusion import FusedLinear, Linear
from rollout.model.operators import Operators
from rollout.model.rotary import Rotation


class RMSNorm(nn.Module):
    """Holds the weight of one norm; `Operators` computes it."""

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))


class AttentionBlock(nn.Module):
    """Projections, optional per-head q/k norm (Qwen3), rotary embedding, attention, output."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        width, q_out = config.hidden_size, self.heads * self.head_dim
        kv_out = self.kv_heads * self.head_dim
        self.q_proj = Linear(width, q_out, config.qkv_bias, dtype, device)
        self.k_proj = Linear(width, kv_out, config.qkv_bias, dtype, device)
        self.v_proj = Linear(width, kv_out, config.qkv_bias, dtype, device)
        self.o_proj = Linear(q_out, width, config.o_bias, dtype, device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, dtype, device)
            self.k_norm = RMSNorm(self.head_dim, dtype, device)
        self._qkv = FusedLinear(self.q_proj, self.k_proj, self.v_proj)

    def forward(
        self, ops: Operators, layer: int, x: Tensor, rotation: Rotation, attention: Attention
    ) -> Tensor:
        """x `[num_tokens, hidden]` -> `[num_tokens, hidden]`."""
        tokens = x.shape[0]
        qkv = self._qkv(ops, x).view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        q, k, v = ops.rotate(qkv, rotation, self.kv_heads, q_norm, k_norm, self.eps)
        attended = attention.attend(layer, q, k, v)
        flat = attended.reshape(tokens, self.heads * self.head_dim)
        return ops.linear(flat, self.o_proj.weight, self.o_proj.bias)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias, dtype, device)
        self.up_proj = Linear(width, inner, bias, dtype, device)
        self.down_proj = Linear(inner, width, bias, dtype, device)
        self._gate_up = FusedLinear(self.gate_proj, self.up_proj)

    def forward(self, ops: Operators, x: Tensor) -> Tensor:
        inner = ops.silu_mul(self._gate_up(ops, x))
        return ops.linear(inner, self.down_proj.weight, self.down_proj.bias)


class DecoderLayer(nn.Module):
    """Pre-norm residual layer. The sum of the residual stream and the last block's output is left
    to the next norm, which reads both: (x, delta) stands for x + delta."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.self_attn = AttentionBlock(config, dtype, device)
        self.mlp = MLP(config, dtype, device)
        self.eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, dtype, device)

    def forward(
        self,
        ops: Operators,
        layer: int,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """(x, delta) of the residual stream `[num_tokens, hidden]`, before and after."""
        x, normed = ops.add_rms_norm(x, delta, self.input_layernorm.weight, self.eps)
        attended = self.self_attn(ops, layer, normed, rotation, attention)
        x, normed = ops.add_rms_norm(x, attended, self.post_attention_layernorm.weight, self.eps)
        return x, self.mlp(ops, normed)
