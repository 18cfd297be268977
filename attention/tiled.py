"""Batch-invariant attention from stock operations: tiles of one fixed shape.

Query tokens are cut into tiles of `tokens_per_tile` tokens of one sequence; the query heads that
share a key/value head are folded into the rows. Keys are read in tiles of 64 positions through the
slot table, whatever the block size. Every matrix product therefore has the same shape
(`tokens_per_tile * group` × head_dim × 64), and an online softmax (Milakov & Gimelshein 2018) runs
over the tiles in order of position. A tile of which nothing is visible changes no bit: its
weights are exactly 0 and its rescaling exactly 1. So a token's result depends on its own query,
keys and values alone: not on batch mates, chunking, block size, or the side that asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.metadata import AttentionMetadata

KEYS_PER_TILE = 64
ROWS_PER_TILE = 16


@dataclass(frozen=True, slots=True)
class _Round:
    """All query tiles that see key tile number j; a prefix of the tiles, longest first."""

    tiles: int
    slots: Tensor  # [tiles * KEYS_PER_TILE] slots of each tile's keys
    hidden: Tensor | None  # [tiles, tokens_per_tile, 1, KEYS_PER_TILE] True where not visible


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tiles sorted by their last visible key, so that round j is a prefix of them."""

    group: int
    tokens_per_tile: int
    gather: Tensor  # [num_tiles * tokens_per_tile] token of each tile row (padding repeats one)
    scatter: Tensor  # [num_tokens] row of `gather` that holds each token
    rounds: list[_Round]
    slot_mapping: Tensor  # [num_tokens] slot of each query token's own key and value


class _Recompute(torch.autograd.Function):
    """Runs the tiled forward without a graph and differentiates a second run in backward.

    Keeps q, keys and values alone for the backward pass instead of every tile's weights.
    """

    @staticmethod
    def forward(ctx, q, keys, values, plan):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, keys, values)
        ctx.plan = plan
        return attend_tiles(q, keys, values, plan)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = attend_tiles(inputs[0], inputs[1], inputs[2], ctx.plan)
        return (*torch.autograd.grad(out, inputs, grad), None)


def attend_tiles(q: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
    """The forward itself; shapes as in `AttentionBackend.attend`."""
    tokens, heads, head_dim = q.shape
    kv_heads, group, width = heads // plan.group, plan.group, plan.tokens_per_tile
    rows = width * group
    tiles = plan.gather.shape[0] // width
    # [kv_heads, tiles, rows, head_dim]; row = token * group + query head within the group
    queries = (q * head_dim**-0.5).index_select(0, plan.gather)
    queries = queries.view(tiles * width, kv_heads, group, head_dim).transpose(0, 1)
    queries = queries.reshape(kv_heads, tiles, rows, head_dim)

    finished: list[Tensor] = []  # tiles whose last key tile has been seen, longest last
    state: tuple[Tensor, Tensor, Tensor] | None = None  # running maximum, sum and output
    for step in plan.rounds:
        count = step.tiles
        k = keys.index_select(1, step.slots).view(kv_heads * count, KEYS_PER_TILE, head_dim)
        v = values.index_select(1, step.slots).view(kv_heads * count, KEYS_PER_TILE, head_dim)
        rows_in = queries[:, :count].reshape(kv_heads * count, rows, head_dim)
        scores = torch.bmm(rows_in, k.transpose(1, 2))
        if step.hidden is not None:
            shaped = scores.view(kv_heads, count, width, group, KEYS_PER_TILE)
            scores = shaped.masked_fill(step.hidden, float("-inf"))
        scores = scores.view(kv_heads, count, rows, KEYS_PER_TILE)
        highest = scores.amax(-1, keepdim=True)
        if state is not None:
            top, total, out = state
            if count < top.shape[1]:
                finished.append(out[:, count:] / total[:, count:])
                top, total, out = top[:, :count], total[:, :count], out[:, :count]
            highest = torch.maximum(top, highest)
        weights = torch.exp(scores - highest)
        new_total = weights.sum(-1, keepdim=True)
        new_out = torch.bmm(weights.view(kv_heads * count, rows, KEYS_PER_TILE), v)
        new_out = new_out.view(kv_heads, count, rows, head_dim)
        if state is not None:
            rescale = torch.exp(top - highest)
            new_total = total * rescale + new_total
            new_out = out * rescale + new_out
        state = highest, new_total, new_out
    if state is None:
        return q.new_empty(q.shape)
    _, total, out = state
    finished.append(out / total)
    result = torch.cat(finished[::-1], dim=1) if len(finished) > 1 else finished[0]
    result = result.view(kv_heads, tiles * width, group, head_dim).index_select(1, plan.scatter)
    return result.transpose(0, 1).reshape(tokens, heads, head_dim)


class TiledAttention:
    """The default where `native` does not serve: any device, dtype and head_dim."""

    name = "tiled"
    exact = True

    def plan(self, metadata: AttentionMetadata, group: int, device: torch.device) -> _Plan:
        width = max(1, ROWS_PER_TILE // group)
        lens = metadata.query_lens
        tiles_of = -(-lens // width)
        sequence = np.repeat(np.arange(len(lens)), tiles_of)
        first_tile = np.cumsum(tiles_of) - tiles_of
        start = (np.arange(len(sequence)) - first_tile[sequence]) * width  # within the sequence
        offsets = start[:, None] + np.arange(width)  # [tiles, width] query index in its sequence
        clamped = np.minimum(offsets, lens[sequence, None] - 1)
        token = metadata.query_start_loc[sequence, None] + clamped
        position = metadata.positions[token]  # [tiles, width]
        visible = position[:, -1] + 1
        order = np.argsort(-visible, kind="stable")
        sequence, token, position, visible = (
            x[order] for x in (sequence, token, position, visible)
        )
        offsets = offsets[order]
        scatter = np.empty(metadata.num_tokens, dtype=np.int64)
        real = offsets < lens[sequence, None]
        scatter[token[real]] = np.flatnonzero(real.reshape(-1))

        earliest = np.minimum.accumulate(position[:, 0])  # of the tiles up to this one
        rounds = []
        for first in range(0, int(visible.max(initial=1)), KEYS_PER_TILE):
            count = int(np.searchsorted(-visible, -first, side="left"))
            slots = metadata.slots(sequence[:count], first, first + KEYS_PER_TILE)
            hidden = None
            if first + KEYS_PER_TILE - 1 > earliest[count - 1]:
                key_position = first + np.arange(KEYS_PER_TILE)
                beyond = key_position > position[:count, :, None, None]
                hidden = torch.from_numpy(beyond).to(device)
            rounds.append(_Round(count, torch.from_numpy(slots.reshape(-1)).to(device), hidden))
        return _Plan(
            group,
            width,
            torch.from_numpy(token.reshape(-1)).to(device),
            torch.from_numpy(scatter).to(device),
            rounds,
            torch.from_numpy(metadata.slot_mapping).to(device),
        )

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> None:
        keys.index_copy_(1, plan.slot_mapping, k.transpose(0, 1))
        values.index_copy_(1, plan.slot_mapping, v.transpose(0, 1))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        if torch.is_grad_enabled() and (
            q.requires_grad or keys.requires_grad or values.requires_grad
        ):
            out: Tensor = _Recompute.apply(q, keys, values, plan)
            return out
        return attend_tiles(q, keys, values, plan)
