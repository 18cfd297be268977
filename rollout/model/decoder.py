"""The one decoder for both sides: the trainer's packed rows and the engine's paged steps.

Flat tokens in, hidden states out; `logits` only for the rows that are sampled or scored. Only
`attention.attend(layer, q, k, v)` differs between the two sides.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention import Attention, AttentionBackend, select_backend
from rollout.model.config import DecoderConfig
from rollout.model.fusion import Linear, pack_adjacent
from rollout.model.layers import DecoderLayer, RMSNorm
from rollout.model.operators import Operators, select_operators
from rollout.model.rotary import RotaryTable, Rotation, inverse_frequencies


class _Trunk(nn.Module):
    """Embedding, layers, final norm: the submodule Hugging Face calls `model`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dtype, device) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, dtype, device)


class Decoder(nn.Module):
    """Llama, Mistral, Qwen2 and Qwen3 shapes. Parameters carry their Hugging Face names.

    Parameters are mutated in place and never re-bound by this class after construction. On
    `device="meta"` nothing is allocated; bind it to memory afterwards (`WeightArena.bind`).

    gradient_checkpointing: whether a forward under autograd keeps no more than what enters each
    layer, and computes the layer again in backward; changes no bit. See the methods of that name.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        operators: str | Operators | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._operators = operators
        self.model = _Trunk(config, dtype, device)
        self.lm_head: Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device)
        self.gradient_checkpointing = False
        self._rotary = RotaryTable(inverse_frequencies(config))
        if device != "meta":
            pack_adjacent(self, self.adjacent_parameters())

    @property
    def operators(self) -> Operators:
        """Who computes: the constructor's choice, or the best that serve the parameters' device
        and dtype. May be assigned; engine and trainer are exact only with the same ones."""
        if self._operators is None or isinstance(self._operators, str):
            weight = self.output_weight
            self._operators = select_operators(self._operators, weight.device, weight.dtype)
        return self._operators

    @operators.setter
    def operators(self, operators: str | Operators | None) -> None:
        self._operators = operators

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        num_layers: int | None = None,
    ) -> Tensor:
        """Hidden states `[num_tokens, hidden]` after the final norm, for flat tokens.

        `input_ids` and `positions` are int64 `[num_tokens]`; which tokens form a sequence, and
        where its keys and values lie, is known to `attention` alone. num_layers: leave the layers
        after so many out (the start-up probe does).
        """
        x, rotation = self.embed(input_ids, positions)
        return self.transform(self.operators, x, rotation, attention, num_layers)

    def embed(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """What enters the first layer: embeddings `[num_tokens, hidden]` and angles."""
        return self.model.embed_tokens(input_ids), self._rotary.at(positions)

    def transform(
        self,
        ops: Operators,
        x: Tensor,
        rotation: Rotation,
        attention: Attention,
        num_layers: int | None = None,
    ) -> Tensor:
        """The layers and the final norm: `[num_tokens, hidden]` -> `[num_tokens, hidden]`."""
        delta = None
        for index, layer in enumerate(islice(self.model.layers, num_layers)):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, delta = checkpoint(
                    layer, ops, index, x, delta, rotation, attention, use_reentrant=False
                )
            else:
                x, delta = layer(ops, index, x, delta, rotation, attention)
        _, out = ops.add_rms_norm(x, delta, self.model.norm.weight, self.config.rms_norm_eps)
        return out

    def gradient_checkpointing_enable(self) -> None:
        """Less memory for training, about a third more time (Chen et al. 2016)."""
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Vocabulary scores `[rows, vocab_size]` of hidden rows `[rows, hidden]`.

        out: an operators' `workspace` for `output_weight`; then there are no gradients.
        """
        if out is not None:
            return self.operators.matmul(hidden, self.output_weight, out=out)
        return self.operators.linear(hidden, self.output_weight)

    @property
    def output_weight(self) -> nn.Parameter:
        """The projection onto the vocabulary `[vocab_size, hidden]`, tied or not."""
        return self._embedding if self.lm_head is None else self.lm_head.weight

    @property
    def _embedding(self) -> nn.Parameter:
        weight = self.model.embed_tokens.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def adjacent_parameters(self) -> list[tuple[str, ...]]:
        """Groups of names that must lie back to back in memory, in this order, to be fused."""
        groups: list[tuple[str, ...]] = []
        for index in range(self.config.num_hidden_layers):
            attn, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
            groups.append(tuple(f"{attn}.{x}_proj.weight" for x in "qkv"))
            if self.config.qkv_bias:
                groups.append(tuple(f"{attn}.{x}_proj.bias" for x in "qkv"))
            groups.append((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"))
            if self.config.mlp_bias:
                groups.append((f"{mlp}.gate_proj.bias", f"{mlp}.up_proj.bias"))
        return groups

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Seeded random weights in place: N(0, initializer_range), norms 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() == 1:
                p.fill_(1.0)
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * self.config.initializer_range)


def attention_for(
    model: Decoder, choice: str | type[AttentionBackend] | AttentionBackend | None = None
) -> AttentionBackend:
    """The attention backend of a name, class or instance; None = the best that serves the model."""
    weight = model.output_weight
    return select_backend(
        choice, device=weight.device, dtype=weight.dtype, head_dim=model.config.head_dim
    )
