"""The trainer's log-probs: bit for bit those the engine returned with the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import AttentionBackend, PackedAttention
from rollout.logprobs import score_rows
from rollout.model import Decoder, attention_for
from rollout.request import Rollout
from rollout.rollout_batch import RolloutBatch
from trainer_bridge.trajectory import MicroBatch, micro_batches


def hidden_rows(model: Decoder, micro: MicroBatch, backend: AttentionBackend) -> Tensor:
    """What the model's last layer says where each response token of one pack is chosen, after the
    tokens before it: `[T, hidden_size]`, with grad."""
    device = next(model.parameters()).device
    config = model.config
    attention = PackedAttention(
        micro.metadata, backend, config.num_attention_heads // config.num_key_value_heads, device
    )
    hidden: Tensor = model(
        torch.from_numpy(micro.input_ids).to(device),
        torch.from_numpy(micro.metadata.positions).to(device),
        attention,
    )
    return hidden.index_select(0, torch.from_numpy(micro.rows).to(device))


def score_hidden(
    model: Decoder, hidden: Tensor, micro: MicroBatch, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy (nats) of every response token of one pack, fp32 `[T]`, with grad.

    hidden: of `hidden_rows`. temperature fp32 `[T]`.
    """
    targets = torch.from_numpy(micro.targets).to(hidden.device)
    temperature = temperature.to(hidden.device)
    return score_rows(hidden, model.output_weight, targets, temperature, model.operators)


def score_micro_batch(
    model: Decoder, micro: MicroBatch, temperature: Tensor, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """`score_hidden` of the pack's own `hidden_rows`, for who needs the hidden states only once."""
    return score_hidden(model, hidden_rows(model, micro, backend), micro, temperature)


def score(
    model: Decoder,
    rollouts: Sequence[Rollout] | RolloutBatch,
    temperature: float | None = None,
    *,
    micro_batch_tokens: int = 8192,
    attention_backend: str | AttentionBackend | None = None,
) -> list[Tensor]:
    """Log-probs of the rollouts' tokens under the model as it is: one `[len(token_ids)]` each; of a
    rollout with a `response_mask`, of those tokens alone that the policy chose.

    They carry gradients, and equal the rollouts' own `logprobs` bit for bit while the weights are
    those of the rollout's version. temperature: None = the one each was sampled at. No more than
    `micro_batch_tokens` tokens go through one forward; all graphs are kept for the caller.
    """
    batch = rollouts if isinstance(rollouts, RolloutBatch) else RolloutBatch.from_rollouts(rollouts)
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    backend = attention_for(model, attention_backend)
    scores = [torch.zeros(0, device=next(model.parameters()).device)] * len(batch)
    temperatures, lengths = torch.from_numpy(batch.temperatures), batch.response_lengths
    if temperature is not None:
        temperatures = torch.full_like(temperatures, temperature)
    for micro in micro_batches(batch, range(len(batch)), micro_batch_tokens):
        per_token = temperatures[torch.from_numpy(micro.rollout_index)]
        logprobs, _ = score_micro_batch(model, micro, per_token, backend)
        in_pack = list(dict.fromkeys(micro.rollout_index.tolist()))
        parts = logprobs.split(lengths[in_pack].tolist())
        for index, part in zip(in_pack, parts, strict=True):
            scores[index] = part
    return scores
