"""Rows of logits: log-normalizers, log-probs, draws and their gradients, native and portable.

With z = logits / temperature, a row's log-normalizer is log Σ exp z, and the log-probability of a
token z[token] minus it, in fp32. Engine and trainer call the same object; a row's bits depend on
the row alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.model.native.library import library
from rollout.sampling_rows import NOT_FINITE, NOTHING_LEFT


class Draw(NamedTuple):
    """One token a row. `tokens` int64 `[rows]`, `NOT_FINITE` or `NOTHING_LEFT` in place of one;
    then the row's `logprobs` fp32 `[rows]` mean nothing. `log_normalizers` fp32 `[rows]`."""

    tokens: Tensor
    logprobs: Tensor
    log_normalizers: Tensor


class Vocabulary(Protocol):
    """logits `[rows, vocab]`; temperature fp32 `[rows]`, all > 0; token_ids int64 `[rows]`."""

    def log_normalizers(
        self, logits: Tensor, temperature: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log Σ exp z `[rows]`, and the entropy in nats `[rows]` if asked.

        Not finite where a logit is NaN or +inf; -inf where all of them are.
        """

    def gather(
        self, logits: Tensor, temperature: Tensor, token_ids: Tensor, log_normalizers: Tensor
    ) -> Tensor:
        """Log-probability `[rows]` of one token a row."""

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        greedy: NDArray[np.bool_],
        uniforms: NDArray[np.float64],
    ) -> Draw:
        """Draw by the inverse of the cumulative distribution at `uniforms` in (0, 1); the first
        of the highest where greedy. Never a token of probability 0."""

    def score_gradient(
        self,
        logits: Tensor,
        temperature: Tensor,
        token_ids: Tensor,
        log_normalizers: Tensor,
        entropies: Tensor,
        grad_logprobs: Tensor,
        grad_entropies: Tensor | None,
    ) -> Tensor:
        """d loss / d logits `[rows, vocab]`; overwrites `logits`.

        With p = softmax(z) and H the entropy: d logprob / dz = onehot - p and
        dH / dz = -p (log p + H).
        """


class PortableVocabulary:
    """torch operations, any device and dtype."""

    def log_normalizers(
        self, logits: Tensor, temperature: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        scaled = tempered(logits, temperature)
        lse = normalizer(scaled)
        if not entropy:
            return lse, None
        log_p = scaled - lse.unsqueeze(1)
        return lse, -_times(log_p.exp(), log_p).sum(-1)

    def gather(
        self, logits: Tensor, temperature: Tensor, token_ids: Tensor, log_normalizers: Tensor
    ) -> Tensor:
        chosen = logits.gather(1, token_ids.unsqueeze(1)).float() / temperature.unsqueeze(1)
        return chosen.squeeze(1) - log_normalizers

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        greedy: NDArray[np.bool_],
        uniforms: NDArray[np.float64],
    ) -> Draw:
        scaled = tempered(logits, temperature)
        lse = normalizer(scaled)
        if greedy.all():
            tokens = scaled.argmax(-1)
        else:
            u = torch.from_numpy(uniforms).to(scaled.device).unsqueeze(1)
            probs = torch.exp(scaled - lse.unsqueeze(1))
            cumulative = probs.cumsum(-1, dtype=torch.float64)
            target = u * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
            tokens = tokens.clamp_(max=scaled.shape[1] - 1)
            if greedy.any():
                mask = torch.from_numpy(greedy).to(scaled.device)
                tokens = torch.where(mask, scaled.argmax(-1), tokens)
        logprobs = self.gather(logits, temperature, tokens, lse)
        tokens = tokens.masked_fill(~torch.isfinite(lse), NOT_FINITE)
        return Draw(tokens.masked_fill(lse == float("-inf"), NOTHING_LEFT), logprobs, lse)

    def score_gradient(
        self,
        logits: Tensor,
        temperature: Tensor,
        token_ids: Tensor,
        log_normalizers: Tensor,
        entropies: Tensor,
        grad_logprobs: Tensor,
        grad_entropies: Tensor | None,
    ) -> Tensor:
        log_p = tempered(logits, temperature) - log_normalizers.unsqueeze(1)
        p = log_p.exp()
        grad = p * -grad_logprobs.unsqueeze(1)
        grad.scatter_add_(1, token_ids.unsqueeze(1), grad_logprobs.unsqueeze(1))
        if grad_entropies is not None:
            surprise = _times(p, log_p + entropies.unsqueeze(1))
            grad -= surprise * grad_entropies.unsqueeze(1)
        return logits.copy_(grad / temperature.unsqueeze(1))


class NativeVocabulary:
    """The C++ kernels of native/vocabulary.cpp: one pass over the logits; fp32 on a CPU."""

    def log_normalizers(
        self, logits: Tensor, temperature: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        logits, temperature = logits.float().contiguous(), temperature.contiguous()
        lse = logits.new_empty(logits.shape[0])
        entropies = torch.empty_like(lse) if entropy else None
        library().log_normalizers(
            logits.data_ptr(), *logits.shape, temperature.data_ptr(), lse.data_ptr(),
            0 if entropies is None else entropies.data_ptr(),
        )  # fmt: skip
        return lse, entropies

    def gather(
        self, logits: Tensor, temperature: Tensor, token_ids: Tensor, log_normalizers: Tensor
    ) -> Tensor:
        logits, temperature = logits.float().contiguous(), temperature.contiguous()
        token_ids, lse = token_ids.contiguous(), log_normalizers.contiguous()
        logprobs = torch.empty_like(lse)
        library().gather_logprobs(
            logits.data_ptr(), *logits.shape, temperature.data_ptr(), token_ids.data_ptr(),
            lse.data_ptr(), logprobs.data_ptr(),
        )  # fmt: skip
        return logprobs

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        greedy: NDArray[np.bool_],
        uniforms: NDArray[np.float64],
    ) -> Draw:
        logits, temperature = logits.float().contiguous(), temperature.contiguous()
        greedy, uniforms = np.ascontiguousarray(greedy), np.ascontiguousarray(uniforms)
        rows = logits.shape[0]
        draw = Draw(
            torch.empty(rows, dtype=torch.int64), logits.new_empty(rows), logits.new_empty(rows)
        )
        library().sample_rows(
            logits.data_ptr(), *logits.shape, temperature.data_ptr(), greedy.ctypes.data,
            uniforms.ctypes.data, *(column.data_ptr() for column in draw),
        )  # fmt: skip
        return draw

    def score_gradient(
        self,
        logits: Tensor,
        temperature: Tensor,
        token_ids: Tensor,
        log_normalizers: Tensor,
        entropies: Tensor,
        grad_logprobs: Tensor,
        grad_entropies: Tensor | None,
    ) -> Tensor:
        assert logits.is_contiguous()
        columns = [temperature, token_ids, log_normalizers, entropies, grad_logprobs]
        if grad_entropies is not None:
            columns.append(grad_entropies)
        columns = [column.contiguous() for column in columns]
        addresses = [column.data_ptr() for column in columns]
        if grad_entropies is None:
            addresses.append(0)
        library().score_gradient(logits.data_ptr(), *logits.shape, *addresses)
        return logits


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """fp32 logits `[rows, vocab]` divided by `temperature` `[rows]`."""
    return logits.float() / temperature.unsqueeze(1)


def normalizer(scaled: Tensor) -> Tensor:
    """log Σ exp of each row of `scaled` `[rows, vocab]` -> `[rows]`, by torch.

    A row's bits do not depend on the others: torch splits a single long row between threads,
    which changes the order of its sum, and never one of several rows; so one row becomes two.
    """
    if scaled.shape[0] == 1:
        return scaled.expand(2, -1).logsumexp(-1)[:1]
    return scaled.logsumexp(-1)


def _times(p: Tensor, x: Tensor) -> Tensor:
    """p · x, 0 where p is 0 though x be infinite."""
    return torch.where(p == 0, 0.0, p * x)
