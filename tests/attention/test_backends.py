"""Every backend: right in value; and those that claim it, the same bits in every company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import AttentionMetadata, PackedAttention, PagedAttention, select_backend
from attention.backends import BACKENDS
from attention.reference import ReferenceAttention

EXACT = [name for name, backend in BACKENDS.items() if backend.exact]
SHAPES = [(4, 4, 32), (6, 2, 64), (8, 2, 128), (14, 2, 64)]  # heads, kv_heads, head_dim


def random_qkv(length: int, shape: tuple[int, int, int], seed: int = 0):
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(length, h, head_dim, generator=generator) for h in (heads, kv_heads, kv_heads)
    )
    return q * 3, k, v  # sharp enough that every key matters somewhere


def dense(q, k, v) -> torch.Tensor:
    """float64, written independently: one softmax per query and head."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for position in range(len(q)):
        for head in range(q.shape[1]):
            scores = k[: position + 1, head // group] @ q[position, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[position, head] = weights @ v[: position + 1, head // group] / weights.sum()
    return torch.from_numpy(out)


def packed(name: str, sequences) -> list[torch.Tensor]:
    """Several (q, k, v) in one pack; the output of each."""
    lengths = [len(q) for q, _, _ in sequences]
    q, k, v = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    attention = PackedAttention(
        AttentionMetadata.packed(lengths), select_backend(name), q.shape[1] // k.shape[1], q.device
    )
    return list(attention.attend(0, q, k, v).split(lengths))


def paged(
    name: str, sequences, chunks: list[int], block_size: int, seed: int
) -> list[torch.Tensor]:
    """The same sequences step by step through pages: in each step every unfinished sequence
    computes its next chunk; blocks are handed out in a random order."""
    kv_heads, head_dim = sequences[0][1].shape[1:]
    group = sequences[0][0].shape[1] // kv_heads
    blocks_of = [-(-len(q) // block_size) for q, _, _ in sequences]
    order = np.random.default_rng(seed).permutation(sum(blocks_of)) + 1
    tables = np.split(order, np.cumsum(blocks_of)[:-1])
    pages = [torch.zeros(2, kv_heads, (len(order) + 1) * block_size, head_dim)]
    done, outputs = [0] * len(sequences), [[] for _ in sequences]
    step = 0
    while any(d < len(s[0]) for d, s in zip(done, sequences, strict=True)):
        active = [i for i, s in enumerate(sequences) if done[i] < len(s[0])]
        new = [
            min(chunks[(step + i) % len(chunks)], len(sequences[i][0]) - done[i]) for i in active
        ]
        rows = [slice(done[i], done[i] + n) for i, n in zip(active, new, strict=True)]
        table = np.zeros((len(active), max(blocks_of)), dtype=np.int64)
        for row, i in zip(table, active, strict=True):
            row[: blocks_of[i]] = tables[i]
        metadata = AttentionMetadata(
            np.concatenate(([0], np.cumsum(new))),
            np.array([done[i] + n for i, n in zip(active, new, strict=True)]),
            table,
            block_size,
        )
        attention = PagedAttention(metadata, pages, select_backend(name), group)
        parts = [
            torch.cat([sequences[i][x][row] for i, row in zip(active, rows, strict=True)])
            for x in range(3)
        ]
        for i, n, out in zip(active, new, attention.attend(0, *parts).split(new), strict=True):
            outputs[i].append(out)
            done[i] += n
        step += 1
    return [torch.cat(out) for out in outputs]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(name, shape):
    sequences = [random_qkv(length, shape, length) for length in (1, 5, 63, 64, 65, 150)]
    for got, sequence in zip(packed(name, sequences), sequences, strict=True):
        assert torch.allclose(got.double(), dense(*sequence), atol=2e-5)
    for got, sequence in zip(paged(name, sequences, [7, 1, 40], 16, 0), sequences, strict=True):
        assert torch.allclose(got.double(), dense(*sequence), atol=2e-5)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=5),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 4, 16, 64]),
    seed=st.integers(0, 99),
)
def test_bits_do_not_depend_on_company(name, shape, lengths, chunks, block_size, seed):
    """L5, K18: alone, packed with others, paged in chunks of any size, any block size."""
    sequences = [random_qkv(length, shape, i) for i, length in enumerate(lengths)]
    alone = [packed(name, [sequence])[0] for sequence in sequences]
    for company in (packed(name, sequences), paged(name, sequences, chunks, block_size, seed)):
        assert all(map(torch.equal, company, alone))


@pytest.mark.parametrize("name", EXACT)
def test_bits_do_not_depend_on_threads(name):
    sequences = [random_qkv(length, SHAPES[1], length) for length in (3, 200, 150)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(torch.cat(packed(name, sequences)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_the_reference_does_depend_on_company():
    """L7: the control: the same comparison fails for stock attention."""
    sequences = [random_qkv(length, SHAPES[1], length) for length in (33, 140)]
    chunked = paged("reference", sequences, [7, 1], 16, 0)
    assert not all(map(torch.equal, packed("reference", sequences), chunked))


@pytest.mark.parametrize("name", EXACT)
def test_a_shared_prompt_changes_no_bit(name):
    """Several rows name the same slots for their prompt; each equals its own whole sequence."""
    prompt, tails = random_qkv(70, SHAPES[1], 1), [random_qkv(n, SHAPES[1], n) for n in (1, 9, 30)]
    starts = np.cumsum([70, *(len(t[0]) for t in tails)])
    table = np.zeros((4, 100), dtype=np.int64)
    table[:, :70] = np.arange(70)
    for row, start, tail in zip(table[1:], starts, tails, strict=False):
        row[70 : 70 + len(tail[0])] = np.arange(start, start + len(tail[0]))
    lengths = np.array([70, *(70 + len(t[0]) for t in tails)])
    metadata = AttentionMetadata(np.concatenate(([0], starts)), lengths, table, 1)
    q, k, v = (torch.cat([prompt[x], *(t[x] for t in tails)]) for x in range(3))
    out = PackedAttention(metadata, select_backend(name), 3, q.device).attend(0, q, k, v)
    for start, tail in zip(starts, tails, strict=False):
        whole = tuple(torch.cat((prompt[x], tail[x])) for x in range(3))
        assert torch.equal(out[start : start + len(tail[0])], packed(name, [whole])[0][70:])


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients(name):
    sequences = [random_qkv(length, SHAPES[1], length) for length in (1, 70, 20)]
    lengths = [len(s[0]) for s in sequences]
    parts = [torch.cat(x) for x in zip(*sequences, strict=True)]
    weight = torch.randn(sum(lengths), 6, 64, generator=torch.Generator().manual_seed(9))

    def gradients(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [p.to(dtype).requires_grad_() for p in parts]
        attention = PackedAttention(
            AttentionMetadata.packed(lengths), select_backend(backend), 3, parts[0].device
        )
        return list(torch.autograd.grad((attention.attend(0, *inputs) * weight).sum(), inputs))

    for got, exact in zip(
        gradients(name, torch.float32), gradients("reference", torch.float64), strict=True
    ):
        assert torch.allclose(got.double(), exact, atol=1e-4, rtol=1e-4)


def test_choosing_a_backend():
    assert select_backend().name == "native"
    assert select_backend(head_dim=40).name == "tiled"
    assert select_backend(dtype=torch.bfloat16).name == "tiled"
    assert select_backend("reference").name == "reference"
    assert select_backend(ReferenceAttention).name == "reference"
    own = ReferenceAttention()
    assert select_backend(own) is own
    with pytest.raises(ValueError, match="'flash'; available: native, tiled, reference"):
        select_backend("flash")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((np.array([0, 2]), np.array([2]), np.zeros((1, 1), np.int64), 1), "block_table holds 1"),
        ((np.array([0, 2]), np.array([1]), np.zeros((1, 2), np.int64), 1), "queries <= seq_len"),
        ((np.array([0, 0]), np.array([1]), np.zeros((1, 2), np.int64), 1), "queries <= seq_len"),
        ((np.array([0]), np.array([1]), np.zeros((1, 2), np.int64), 1), "1 sequences"),
        ((np.array([0, 1]), np.array([1]), np.zeros((1, 2), np.int64), 0), "block_size"),
    ],
)
def test_metadata_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionMetadata(*fields)


def test_slots_of_a_step():
    """Two sequences, blocks of 4: five cached tokens and two new; a fresh one with three."""
    metadata = AttentionMetadata(
        np.array([0, 2, 5]), np.array([7, 3]), np.array([[9, 2], [5, 0]]), 4
    )
    assert metadata.positions.tolist() == [5, 6, 0, 1, 2]
    assert metadata.slot_mapping.tolist() == [9, 10, 20, 21, 22]
    assert metadata.slots(np.array([0]), 0, 7)[0].tolist() == [36, 37, 38, 39, 8, 9, 10]
    assert metadata.num_tokens == 5


def test_table_rows_name_rows_of_a_larger_table():
    """The engine's table is persistent: sequences of a step are some of its rows, in any order."""
    table = np.array([[9, 2], [7, 7], [5, 0]])
    picked = AttentionMetadata(np.array([0, 3, 5]), np.array([3, 7]), table, 4, np.array([2, 0]))
    alone = AttentionMetadata(np.array([0, 3, 5]), np.array([3, 7]), table[[2, 0]], 4)
    assert picked.slot_mapping.tolist() == alone.slot_mapping.tolist() == [20, 21, 22, 9, 10]
    everyone = np.array([1, 0, 1])
    assert (picked.slots(everyone, 3, 8) == alone.slots(everyone, 3, 8)).all()
    assert picked.slots(everyone, 3, 8)[0].tolist() == [39, 8, 9, 10, 0]
