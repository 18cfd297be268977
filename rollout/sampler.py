"""From logits to tokens with both log-probs, parameters mixed freely among the rows.

Order: allowed ids → bad words → min_tokens → bias → penalties → temperature → min_p → top_k → top_p
→ draw. What no row of the step uses costs nothing, and no bit of a row depends on the other rows:

    logits ──────────────────────────────────> tokens, logprobs         one pass, all rows
      │ rows with edits or filters ── / T ───> tokens, sampling_logprobs   a second one, these alone

The draw is the inverse of the cumulative distribution at one counter-based uniform per row: no
generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.model.vocabulary import Vocabulary, tempered
from rollout.noise import uniforms
from rollout.sampling_rows import NOT_FINITE, EditedRow, Filters, SampledRows, SamplingRows

_NEVER = float("-inf")


def sample(logits: Tensor, rows: SamplingRows, vocabulary: Vocabulary) -> SampledRows:
    """One token per row. logits `[rows, vocab]` on any device; not changed."""
    temperature = _on(logits, rows.temperature)
    uniform = uniforms(rows.noise_keys, rows.positions)
    draw = vocabulary.sample(logits, temperature, rows.greedy, uniform)
    tokens = draw.tokens.clamp(min=NOT_FINITE)  # nothing left without an edit: the model's doing
    logprobs = sampling_logprobs = draw.logprobs
    sampled, changed = _sampled_from(logits, rows)
    if sampled is not None:
        index = _on(logits, changed)
        ones = torch.ones_like(temperature[index])
        other = vocabulary.sample(sampled, ones, rows.greedy[changed], uniform[changed])
        finite = torch.isfinite(draw.log_normalizers[index])
        tokens = tokens.index_copy(0, index, other.tokens.where(finite, NOT_FINITE))
        own = vocabulary.gather(
            _rows(logits, changed), temperature[index], other.tokens.clamp(min=0),
            draw.log_normalizers[index],
        )  # fmt: skip
        logprobs = logprobs.index_copy(0, index, own)
        sampling_logprobs = sampling_logprobs.index_copy(0, index, other.logprobs)
    top_ids, top_logprobs = None, None
    if rows.num_top > 0:
        scaled = tempered(logits, temperature)
        top_ids, top_logprobs = best_tokens(scaled, draw.log_normalizers, rows.num_top)
    both = torch.stack((logprobs, sampling_logprobs)).cpu().numpy()
    both[1, rows.greedy] = 0.0
    return SampledRows(tokens.cpu().numpy(), both[0], both[1], top_ids, top_logprobs)


def best_tokens(
    scaled: Tensor, log_normalizer: Tensor, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and log-probs `[rows, min(k, vocab)]` of the best tokens, best first.

    Among equals the lower id comes first, and before others into the last place.
    scaled `[rows, vocab]` tempered logits, log_normalizer `[rows]` theirs; k at least 1.
    """
    logprobs = scaled - log_normalizer.unsqueeze(1)
    k = min(k, logprobs.shape[1])
    one_more = min(k + 1, logprobs.shape[1])
    best, ids = (each.cpu().numpy() for each in logprobs.topk(one_more, dim=-1))
    # topk chooses freely among equals: where the last place is tied, only a sort tells who has it.
    tied = np.flatnonzero((best[:, k:] == best[:, k - 1 : k]).any(-1))
    best, ids = best[:, :k].copy(), ids[:, :k].copy()
    if len(tied):
        order = torch.sort(logprobs[_on(logprobs, tied)], descending=True, stable=True)
        best[tied] = order.values[:, :k].cpu().numpy()
        ids[tied] = order.indices[:, :k].cpu().numpy()
    order_in_row = np.lexsort((ids, -best), axis=-1)
    return np.take_along_axis(ids, order_in_row, -1), np.take_along_axis(best, order_in_row, -1)


def _sampled_from(
    logits: Tensor, rows: SamplingRows
) -> tuple[Tensor | None, NDArray[np.int64]]:
    """The tempered logits that rows with an edit or filter on are really sampled from, -inf where
    forbidden, and which rows these are, ascending. None where there is no such row."""
    active = [row for row in rows.edited if row.edits.active(len(row.output))]
    active.sort(key=lambda row: row.row)
    edited = np.array([row.row for row in active], np.int64)
    filtered = np.empty(0, np.int64)
    if rows.filters is not None:
        filtered = np.flatnonzero(rows.filters.on & ~rows.greedy)
    changed = np.union1d(edited, filtered)
    if not len(changed):
        return None, changed
    sampled = _rows(logits, changed).float()
    if active:
        at = np.searchsorted(changed, edited)
        sampled = _replaced(sampled, at, edited_logits(logits, active))
    sampled = tempered(sampled, _on(logits, rows.temperature[changed]))
    if rows.filters is not None and len(filtered):
        at = np.searchsorted(changed, filtered)
        kept = filtered_logits(_rows(sampled, at), rows.filters.select(filtered))
        sampled = _replaced(sampled, at, kept)
    return sampled, changed


def edited_logits(logits: Tensor, edited: Sequence[EditedRow]) -> Tensor:
    """A fp32 copy `[len(edited), vocab]` of the rows named, edited. Ids to touch are gathered over
    all rows first, so the device sees a few operations however many rows there are."""
    vocab = logits.shape[1]
    copy = logits[_on(logits, np.array([row.row for row in edited], np.int64))].float()
    flat = copy.view(-1)
    confined: list[int] = []
    allowed, banned, biased, penalised = [], [], [], []
    bias, subtract, factor = [], [], []
    for index, (_, edits, prompt, output) in enumerate(edited):
        start = index * vocab
        if edits.allowed is not None:
            confined.append(index)
            allowed.append(start + edits.allowed)
        ban = edits.banned(output)
        banned.append(start + ban[(ban >= 0) & (ban < vocab)])  # an EOS id may have no logit
        biased.append(start + edits.bias_ids)
        bias.append(edits.bias_values)
        penalties = edits.penalties(prompt, output)
        if penalties is not None:
            penalised.append(start + penalties.ids)
            subtract.append(penalties.subtract)
            factor.append(np.full(len(penalties.ids), edits.repetition_penalty, np.float32))
    if confined:
        at = _joined(flat, allowed)
        kept = flat[at]
        copy[_on(copy, np.array(confined))] = _NEVER
        flat[at] = kept
    flat[_joined(flat, banned)] = _NEVER
    flat[_joined(flat, biased)] += _joined(flat, bias)
    if penalised:
        at, by = _joined(flat, penalised), _joined(flat, factor)
        x = flat[at]
        flat[at] = torch.where(x > 0, x / by, x * by) - _joined(flat, subtract)
    return copy


def filtered_logits(scaled: Tensor, filters: Filters) -> Tensor:
    """`scaled` `[rows, vocab]`, tempered, with -inf where min_p, then top_k, then top_p filter.

    Returns a new tensor. top_k keeps exactly k, the lower ids among equals. top_p keeps the
    smallest set of best tokens whose share of the mass that is left reaches it, at least one.
    """
    vocab = scaled.shape[1]
    if (filters.min_p > 0).any():
        with np.errstate(divide="ignore"):
            relative = _on(scaled, np.log(filters.min_p))
        least = (scaled.amax(-1) + relative).to(scaled.dtype)
        scaled = scaled.masked_fill(scaled < least.unsqueeze(1), _NEVER)
    ranked = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1))
    if not len(ranked):
        return scaled
    rows, filters = _rows(scaled, ranked), filters.select(ranked)
    values, order = torch.sort(rows, descending=True, stable=True)
    top_k = _on(scaled, np.where(filters.top_k > 0, filters.top_k, vocab))
    drop = torch.arange(vocab, device=scaled.device) >= top_k.unsqueeze(1)
    if (filters.top_p < 1).any():
        weights = torch.exp(values - values[:, :1]).masked_fill_(drop, 0.0)
        mass = weights.cumsum(-1, dtype=torch.float64)
        top_p = np.where(filters.top_p < 1, filters.top_p, np.inf)
        enough = _on(scaled, top_p).unsqueeze(1) * mass[:, -1:]
        drop |= mass - weights >= enough
    drop[:, 0] = False
    drop = torch.empty_like(drop).scatter_(1, order, drop)
    return _replaced(scaled, ranked, rows.masked_fill(drop, _NEVER))


def _on(like: Tensor, column: NDArray[Any]) -> Tensor:
    return torch.from_numpy(column).to(like.device)


def _joined(like: Tensor, parts: list[NDArray[Any]]) -> Tensor:
    return _on(like, np.concatenate(parts))


def _rows(values: Tensor, index: NDArray[np.int64]) -> Tensor:
    """The rows of `index`, ascending; `values` itself when these are all."""
    return values if len(index) == len(values) else values[_on(values, index)]


def _replaced(values: Tensor, index: NDArray[np.int64], rows: Tensor) -> Tensor:
    """`values` with `rows` in the place of those of `index`, ascending; `values` stays."""
    return rows if len(index) == len(values) else values.index_copy(0, _on(values, index), rows)
