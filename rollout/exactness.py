"""The start-up proof that a rollout's log-probs are the trainer's, on this machine and model.

    engine road    chunks, decodes, a single row, shared blocks, paged     1 and several threads
    trainer road   whole sequences in one pack, `score_rows`               same bits, or refused

Batch invariance is a property of compiled kernels, thread counts and shapes, so it is shown where
it is used: one layer of the real weights and the projection onto the vocabulary, a fraction of a
second. `python -m scripts.prove` runs whole workloads through whole models instead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention import AttentionBackend, AttentionMetadata, PackedAttention, PagedAttention
from kvcache.storage import KVShape, KVStorage
from rollout.logprobs import score_rows
from rollout.model import Decoder

LENGTHS = (52, 50, 21, 3)
SHARED = 32
"""Sequence 1 begins with as many tokens of sequence 0, in the same blocks."""
SCORED = 2
"""Positions of each sequence whose next token is drawn: its last ones, as decodes."""
LAYERS = 1

Steps = Sequence[Mapping[int, int]]
"""For each step: sequence -> new tokens."""


class ExactnessRefused(RuntimeError):
    """The exact mode was asked for, or is the default here, and cannot be had."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe saw. `reason` says which bits differed; empty if none did.

    comparisons: numbers compared. fingerprint: hash of the trainer road's bits; equal weights give
    equal ones in every process that is exact with this one.
    """

    held: bool
    reason: str
    comparisons: int
    seconds: float
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether an engine promises the trainer's bits, and why; `probe` is None where it is off."""

    on: bool
    reason: str
    probe: ProbeResult | None = None

    def __str__(self) -> str:
        if self.probe is None:
            return f"off: {self.reason}"
        return (
            f"on: the start-up probe held, {self.probe.comparisons:,} numbers compared in "
            f"{self.probe.seconds:.2f} s"
        )


def settle(exact: bool | None, model: Decoder, backend: AttentionBackend) -> Exactness:
    """The mode asked for, proved: True, False, or None = on where the kernels claim it.

    They do on a CPU in fp32. `ExactnessRefused` if the claim is absent though it was asked for, or
    the probe does not hold; the mode is never weakened silently.
    """
    if exact is False:
        return Exactness(False, "switched off (exact=False)")
    silent = [x.name for x in (model.operators, backend) if not x.exact]
    if silent:
        weight = model.output_weight
        reason = (
            f"{' and '.join(silent)} on {weight.device.type} in {weight.dtype} "
            "do not claim bits that are independent of the batch"
        )
        if exact:
            raise ExactnessRefused(f"exact=True, but {reason}; pass exact=False, or None")
        return Exactness(False, reason)
    result = probe(model, backend)
    if not result.held:
        raise ExactnessRefused(
            f"{model.operators.name} operators with {backend.name} attention are not exact on this "
            f"machine: {result.reason}. Choose other ones (operators='portable', "
            "attention_backend='tiled'), or give up the promise with exact=False"
        )
    return Exactness(True, "", result)


def probe(model: Decoder, backend: AttentionBackend) -> ProbeResult:
    """Compare the engine's road through `model` with the trainer's, bit for bit.

    Changes nothing but, for its duration, this thread's number of torch threads.
    """
    started = time.perf_counter()
    trial = _Trial(model, backend)
    several = max(2, torch.get_num_threads())
    with torch_threads(several):
        drawn = trial.paged(16, _CHUNKED)
        with torch_threads(1):
            alone = trial.paged(8, _AT_ONCE)
            single = trial.packed(drawn.tokens)
        packed = trial.packed(drawn.tokens)
    differences = [
        *drawn.differences(alone, f"chunks on {several} threads and one step on 1"),
        *single.differences(packed, f"the trainer's forward on 1 and on {several} threads"),
        *drawn.differences(packed, "paged steps and the trainer's forward"),
    ]
    return ProbeResult(
        held=not differences,
        reason="; ".join(differences),
        comparisons=3 * (packed.hidden.numel() + packed.logprobs.numel()),
        seconds=time.perf_counter() - started,
        fingerprint=packed.fingerprint(),
    )


_DECODED = [length - SCORED for length in LENGTHS]
_CHUNKED: Steps = (
    {0: 37, 2: 5},
    {3: _DECODED[3], 1: _DECODED[1] - SHARED, 0: _DECODED[0] - 37, 2: _DECODED[2] - 5},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {2: 1},
    {3: 1, 0: 1, 1: 1},
)
_AT_ONCE: Steps = ({2: LENGTHS[2], 0: LENGTHS[0], 3: LENGTHS[3], 1: LENGTHS[1] - SHARED},)


@dataclass(frozen=True, slots=True)
class _Bits:
    """Hidden states `[all tokens, hidden]`; tokens and log-probs of the scored positions."""

    hidden: Tensor
    tokens: Tensor
    logprobs: Tensor

    def differences(self, other: _Bits, roads: str) -> Iterator[str]:
        """A phrase for each kind of number that differs."""
        for name in ("hidden", "tokens", "logprobs"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if not torch.equal(_raw(mine), _raw(theirs)):
                off = (mine.double() - theirs.double()).abs()
                yield (
                    f"{name} differ between {roads} in {int((off != 0).sum())} of "
                    f"{off.numel()} places, by up to {float(off.max()):.3g}"
                )

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for values in (self.hidden, self.logprobs):
            digest.update(_raw(values).cpu().numpy().tobytes())
        return digest.hexdigest()


def _raw(values: Tensor) -> Tensor:
    """The bytes: -0 is not 0, and what is not finite is one NaN, whatever the payload."""
    values = values.detach()
    if values.is_floating_point():
        values = values.where(torch.isfinite(values), torch.nan)
    return values.contiguous().view(torch.uint8)


class _Trial:
    """A few sequences of random tokens on one model."""

    def __init__(self, model: Decoder, backend: AttentionBackend) -> None:
        self._model, self._backend = model, backend
        config = model.config
        weight = model.output_weight
        self._device, self._dtype = weight.device, weight.dtype
        self._group = config.num_attention_heads // config.num_key_value_heads
        rng = np.random.default_rng(0)
        self._starts = np.concatenate(([0], np.cumsum(LENGTHS)))
        self._ids = rng.integers(0, config.vocab_size, sum(LENGTHS))
        self._ids[LENGTHS[0] :][:SHARED] = self._ids[:SHARED]
        self._scored = np.concatenate(
            [np.arange(end - SCORED, end) for end in self._starts[1:]]
        )
        count = len(self._scored)
        self._uniforms = rng.uniform(0.01, 0.99, count)
        self._temperature = torch.tensor([1.0, 0.7] * (count // 2), device=self._device)

    def packed(self, tokens: Tensor) -> _Bits:
        """The trainer's road: every sequence whole, in one pack, with autograd."""
        metadata = AttentionMetadata.packed(list(LENGTHS))
        attention = PackedAttention(metadata, self._backend, self._group, self._device)
        with torch.enable_grad():
            hidden = self._forward(self._ids, metadata, attention)
            rows = hidden.index_select(0, torch.from_numpy(self._scored).to(self._device))
            logprobs, _ = score_rows(
                rows, self._model.output_weight, tokens.clamp(min=0), self._temperature,
                self._model.operators,
            )  # fmt: skip
        return self._bits(hidden.detach(), tokens, logprobs.detach())

    @torch.no_grad()
    def paged(self, block_size: int, steps: Steps) -> _Bits:
        """The engine's road: keys and values in pages, tokens drawn."""
        config, model = self._model.config, self._model
        table, blocks = _block_table(block_size)
        shape = KVShape(
            LAYERS, config.num_key_value_heads, config.head_dim, block_size, self._dtype
        )
        pages = KVStorage(shape, blocks, self._device).pages
        hidden = torch.zeros(
            sum(LENGTHS), config.hidden_size, dtype=self._dtype, device=self._device
        )
        tokens = torch.zeros(len(self._scored), dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(len(self._scored), device=self._device)
        computed = [0, SHARED, 0, 0]
        for step in steps:
            order = np.array(list(step), np.int64)
            new = np.array(list(step.values()), np.int64)
            before = np.array([computed[s] for s in order], np.int64)
            metadata = AttentionMetadata(
                np.concatenate(([0], np.cumsum(new))), before + new, table, block_size, order
            )
            places = self._starts[order][metadata.token_sequence] + metadata.positions
            attention = PagedAttention(metadata, pages, self._backend, self._group)
            out = self._forward(self._ids[places], metadata, attention)
            hidden[torch.from_numpy(places)] = out
            drawn = np.flatnonzero(np.isin(places, self._scored))
            if len(drawn):
                index = np.searchsorted(self._scored, places[drawn])
                draw = model.operators.vocabulary.sample(
                    model.logits(out[torch.from_numpy(drawn)]),
                    self._temperature[torch.from_numpy(index)],
                    np.zeros(len(drawn), np.bool_),
                    self._uniforms[index],
                )
                tokens[torch.from_numpy(index)] = draw.tokens
                logprobs[torch.from_numpy(index)] = draw.logprobs
            for s, n in step.items():
                computed[s] += n
        return self._bits(hidden, tokens, logprobs)

    def _bits(self, hidden: Tensor, tokens: Tensor, logprobs: Tensor) -> _Bits:
        """Without the tokens that sequence 1 shares, which a paged step computes once, and without
        log-probs where the weights leave no token to draw."""
        start = LENGTHS[0]
        kept = torch.cat((hidden[:start], hidden[start + SHARED :]))
        return _Bits(kept, tokens, logprobs.masked_fill(tokens < 0, torch.nan))

    def _forward(
        self,
        ids: NDArray[np.int64],
        metadata: AttentionMetadata,
        attention: PackedAttention | PagedAttention,
    ) -> Tensor:
        hidden: Tensor = self._model(
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(metadata.positions).to(self._device),
            attention,
            num_layers=LAYERS,
        )
        return hidden


def alike(exactness: Mapping[str, Exactness]) -> list[list[str]]:
    """Names of processes whose mode is on, those together whose probes saw the same bits.

    Each probe shows one process at one with itself; on equal weights, a single group shows them at
    one with each other.
    """
    groups: dict[str, list[str]] = {}
    for name, settled in exactness.items():
        if settled.probe is not None:
            groups.setdefault(settled.probe.fingerprint, []).append(name)
    return list(groups.values())


def _block_table(block_size: int) -> tuple[NDArray[np.int64], int]:
    """Blocks of each sequence, the shared beginning in those of sequence 0, and their number."""
    width = -(-max(LENGTHS) // block_size)
    table = 1 + np.arange(len(LENGTHS) * width).reshape(-1, width)
    shared = SHARED // block_size
    table[1, :shared] = table[0, :shared]
    return table, 1 + table.size


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """As many torch threads in this thread's operations; at the end as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
