"""RolloutBatch: many rollouts as columns, the form in which they travel and are trained on.

Python lists of token ids are about ten times slower to send between processes than packed int32
with offsets, so this is also the wire format: one object, a handful of arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.request import Rollout, VersionSpan


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64)))).astype(np.int64)


def _flat(parts: Sequence[Sequence[float]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(p, dtype=dtype) for p in parts)])


class Extras(NamedTuple):
    """Fields of a `Rollout` that are there only where they were asked for."""

    text: str | None
    top_logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[float | None] | None
    prompt_top_logprobs: list[dict[int, float] | None] | None

    @staticmethod
    def of(rollout: Rollout) -> Extras:
        return Extras(*(getattr(rollout, name) for name in Extras._fields))


NO_EXTRAS = Extras(None, None, None, None)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """N rollouts of P prompts. Rollouts of one prompt lie together. Arrays are not copied.

    prompt_ids int32, prompt_offsets int64 `[P + 1]`; prompt_index int32 `[N]` rollout -> prompt.
    token_ids int32, logprobs and sampling_logprobs fp32, response_mask bool (False at tokens that
    the policy did not choose), all `[total tokens]`; offsets int64 `[N + 1]`. temperatures fp32
    `[N]`, those of `logprobs`. spans int64 `[S, 3]` (version, start, end) with span_offsets int64
    `[N + 1]`. extras: of the rollouts that have any, by index.
    """

    prompt_ids: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    prompt_index: NDArray[np.int32]
    sample_index: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]
    response_mask: NDArray[np.bool_]
    spans: NDArray[np.int64]
    span_offsets: NDArray[np.int64]
    seeds: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    finish_reasons: tuple[str, ...]
    stop_reasons: tuple[int | str | None, ...]
    error_reasons: tuple[str | None, ...]
    error_messages: tuple[str | None, ...]
    extras: dict[int, Extras]

    def __len__(self) -> int:
        return len(self.prompt_index)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each rollout after its prompt `[N]`."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Tokens of each rollout that the policy chose `[N]`."""
        before = np.concatenate(([0], np.cumsum(self.response_mask, dtype=np.int64)))
        return np.diff(before[self.offsets])

    @property
    def num_turns(self) -> NDArray[np.int64]:
        """How often the policy spoke in each rollout `[N]`: runs of tokens that it chose."""
        begins = self.response_mask.copy()
        begins[1:] &= ~self.response_mask[:-1]
        first = self.offsets[:-1][self.lengths > 0]
        begins[first] = self.response_mask[first]
        before = np.concatenate(([0], np.cumsum(begins, dtype=np.int64)))
        return np.diff(before[self.offsets])

    @property
    def has_behaviour(self) -> bool:
        """Whether a policy sampled these tokens; False for demonstrations."""
        return len(self.spans) > 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """The policy version that sampled each token `[total tokens]`, -1 where none did; empty for
        demonstrations."""
        if not self.has_behaviour:
            return np.empty(0, dtype=np.int64)
        versions = np.full(self.num_tokens, -1, dtype=np.int64)
        versions[self.response_mask] = np.repeat(
            self.spans[:, 0], self.spans[:, 2] - self.spans[:, 1]
        )
        return versions

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Token ids of prompt `index`."""
        return self.prompt_ids[self.prompt_offsets[index] : self.prompt_offsets[index + 1]]

    def tokens(self, index: int) -> NDArray[np.int32]:
        """New token ids of rollout `index`."""
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]

    def __getitem__(self, index: int) -> Rollout:
        if not -len(self) <= index < len(self):
            raise IndexError(f"rollout {index} of a batch of {len(self)}")
        index %= len(self)
        row = slice(self.offsets[index], self.offsets[index + 1])
        spans = self.spans[self.span_offsets[index] : self.span_offsets[index + 1]]
        return Rollout(
            int(self.prompt_index[index]),
            int(self.sample_index[index]),
            self.prompt(int(self.prompt_index[index])).tolist(),
            self.token_ids[row].tolist(),
            self.logprobs[row].tolist(),
            self.sampling_logprobs[row].tolist(),
            tuple(VersionSpan(*span) for span in spans.tolist()),
            self.finish_reasons[index],
            self.stop_reasons[index],
            self.error_reasons[index],
            self.error_messages[index],
            int(self.seeds[index]),
            float(self.temperatures[index]),
            *self.extras.get(index, NO_EXTRAS),
            None if self.response_mask[row].all() else self.response_mask[row].tolist(),
        )

    def __iter__(self) -> Iterator[Rollout]:
        return (self[i] for i in range(len(self)))

    def columns(self) -> dict[str, Any]:
        """The fields by name, arrays and plain values; `RolloutBatch(**columns)` is this batch."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> RolloutBatch:
        """The rollouts at `indices`, in that order; prompts no rollout names are dropped."""
        return RolloutBatch.from_rollouts([self[int(i)] for i in indices])

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Batches end to end; prompt indices are counted on. One batch is returned as it is."""
        if len(batches) == 1:
            return batches[0]
        rollouts, prompts = [], 0
        for batch in batches:
            for rollout in batch:
                rollouts.append((prompts + rollout.prompt_index, rollout))
            prompts += batch.num_prompts
        return _build([index for index, _ in rollouts], [r for _, r in rollouts])

    @staticmethod
    def from_rollouts(rollouts: Sequence[Rollout]) -> RolloutBatch:
        """Pack rollouts in the order given; prompts are renumbered in order of appearance."""
        return _build([r.prompt_index for r in rollouts], rollouts)

    @staticmethod
    def from_demonstrations(
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        response_masks: Sequence[Sequence[bool]] | None = None,
    ) -> RolloutBatch:
        """Prompts with given answers, one each, for supervised steps. Their log-probs are 0.

        response_masks: of each answer, False at the tokens that are not to be imitated.
        """
        masks = response_masks or [[True] * len(c) for c in completions]
        rollouts = [
            Rollout(
                i, 0, list(p), list(c), [0.0] * len(c), [0.0] * len(c), (),
                "stop", None, None, None, 0, 1.0,
                response_mask=list(mask),
            )
            for i, (p, c, mask) in enumerate(zip(prompts, completions, masks, strict=True))
        ]
        return RolloutBatch.from_rollouts(rollouts)


def _int32_ids(prompt: Sequence[int]) -> list[int]:
    """Ids that int32 cannot hold become -1: in no vocabulary either, their prompt was rejected."""
    return [token if 0 <= token < 2**31 else -1 for token in prompt]


def _build(groups: Sequence[int], rollouts: Sequence[Rollout]) -> RolloutBatch:
    """Rollouts with the same group number and the same prompt share one copy of it."""
    number: dict[tuple[int, tuple[int, ...]], int] = {}
    prompts: list[list[int]] = []
    prompt_index = []
    for group, rollout in zip(groups, rollouts, strict=True):
        key = (group, tuple(rollout.prompt_token_ids))
        if key not in number:
            number[key] = len(prompts)
            prompts.append(rollout.prompt_token_ids)
        prompt_index.append(number[key])
    spans = [span for r in rollouts for span in r.version_spans]
    return RolloutBatch(
        _flat([_int32_ids(p) for p in prompts], np.int32),  # type: ignore[arg-type]
        _offsets([len(p) for p in prompts]),
        np.array(prompt_index, dtype=np.int32),
        np.array([r.sample_index for r in rollouts], dtype=np.int32),
        _flat([r.token_ids for r in rollouts], np.int32),  # type: ignore[arg-type]
        _offsets([len(r.token_ids) for r in rollouts]),
        _flat([r.logprobs for r in rollouts], np.float32),  # type: ignore[arg-type]
        _flat([r.sampling_logprobs for r in rollouts], np.float32),  # type: ignore[arg-type]
        _flat([r.response_mask or [True] * len(r.token_ids) for r in rollouts], np.bool_),  # type: ignore[arg-type]
        np.array(spans, dtype=np.int64).reshape(-1, 3),
        _offsets([len(r.version_spans) for r in rollouts]),
        np.array([r.seed for r in rollouts], dtype=np.int64),
        np.array([r.temperature for r in rollouts], dtype=np.float32),
        tuple(r.finish_reason for r in rollouts),
        tuple(r.stop_reason for r in rollouts),
        tuple(r.error_reason for r in rollouts),
        tuple(r.error_message for r in rollouts),
        {i: extras for i, r in enumerate(rollouts) if (extras := Extras.of(r)) != NO_EXTRAS},
    )
