"""From logits to tokens with both log-probs, a row at a time, parameters mixed freely.

Order: min_tokens → temperature → min_p → top_k → top_p → draw. A filter that no row of the step
uses costs nothing. The draw is the inverse of the cumulative distribution at one counter-based
uniform per row: no generator, and a row's token depends on nothing but its row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.logprobs import gather_logprobs, normalizer, tempered
from rollout.noise import uniforms
from rollout.request import Request
from rollout.scheduler import Sampled
from rollout.stopping import stop_ids


def sample(
    logits: Tensor, requests: list[Request], eos_token_ids: frozenset[int]
) -> list[Sampled]:
    """One token per row. logits `[rows, vocab]`, row i belongs to `requests[i]`.

    A row with NaN or +inf logits yields `token=None`: nothing is invented.
    """
    device = logits.device
    greedy = np.array([r.params.greedy for r in requests])
    temperature = np.array([r.params.temperature or 1.0 for r in requests], dtype=np.float32)
    scaled = tempered(logits, torch.from_numpy(temperature).to(device))
    log_normalizer = normalizer(scaled)

    sampled, sampled_normalizer = _filtered(scaled, log_normalizer, requests, eos_token_ids)
    tokens = _draw(sampled, sampled_normalizer, requests, greedy)
    logprobs = gather_logprobs(scaled, log_normalizer, tokens)
    if sampled is scaled:
        sampling_logprobs = logprobs.clone()
    else:
        sampling_logprobs = gather_logprobs(sampled, sampled_normalizer, tokens)
    sampling_logprobs[torch.from_numpy(greedy).to(device)] = 0.0
    finite = torch.isfinite(log_normalizer)
    return [
        Sampled(token if ok else None, lp, slp)
        for token, ok, lp, slp in zip(
            tokens.tolist(),
            finite.tolist(),
            logprobs.tolist(),
            sampling_logprobs.tolist(),
            strict=True,
        )
    ]


def _draw(
    scaled: Tensor, log_normalizer: Tensor, requests: list[Request], greedy: np.ndarray
) -> Tensor:
    if greedy.all():
        return scaled.argmax(-1)
    keys = np.array([r.noise_key for r in requests], dtype=np.uint64)
    positions = np.array([len(r.tokens) for r in requests], dtype=np.int64)
    u = torch.from_numpy(uniforms(keys, positions)).to(scaled.device).unsqueeze(1)
    probs = torch.exp(scaled - log_normalizer.unsqueeze(1))
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1)
    tokens = tokens.clamp_(max=scaled.shape[1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(scaled.device), scaled.argmax(-1), tokens)
    return tokens


def _filtered(
    scaled: Tensor,
    log_normalizer: Tensor,
    requests: list[Request],
    eos_token_ids: frozenset[int],
) -> tuple[Tensor, Tensor]:
    """The logits really sampled from, with -inf where filtered, and their normalizers."""
    held_back = [r.num_output_tokens < r.params.min_tokens for r in requests]
    filters = [r.params.filters and not r.params.greedy for r in requests]
    rows = [i for i in range(len(requests)) if held_back[i] or filters[i]]
    if not rows:
        return scaled, log_normalizer
    scaled, log_normalizer = scaled.clone(), log_normalizer.clone()
    for i in rows:
        row, params = scaled[i], requests[i].params
        if held_back[i]:
            row[sorted(stop_ids(requests[i], eos_token_ids))] = float("-inf")
        if filters[i]:
            kept = kept_tokens(row, params.top_p, params.top_k, params.min_p)
            row.masked_fill_(~kept, float("-inf"))
        log_normalizer[i] = normalizer(row.unsqueeze(0))[0]
    return scaled, log_normalizer


def kept_tokens(scaled: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Which tokens of one tempered row `[vocab]` survive min_p, then top_k, then top_p.

    Ties are broken by the lower token id, so top_k keeps exactly k. top_p keeps the smallest set
    of best tokens whose mass reaches top_p, at least one.
    """
    order = torch.sort(scaled, descending=True, stable=True).indices
    probs = scaled[order].softmax(-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if min_p > 0:
        keep &= probs >= min_p * probs[0]
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1:
        probs = torch.where(keep, probs, 0.0)
        mass_before = probs.cumsum(-1) - probs
        keep &= mass_before < top_p * probs.sum()
    keep[0] = True
    kept = torch.zeros_like(keep)
    kept[order] = keep
    return kept
