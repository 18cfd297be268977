"""Requests: what a prompt becomes inside the engine, and what comes out of it."""

from __future__ import annotations

import enum
import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.detokenizer import Detokenizer
from rollout.logit_edits import LogitEdits
from rollout.noise import derived_seed, noise_key
from rollout.sampling import SamplingParams


class VersionSpan(NamedTuple):
    """Output tokens [start, end) were produced under policy version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample. `len(logprobs) == len(sampling_logprobs) == len(token_ids)`.

    logprobs: log softmax(logits / temperature)[token] in fp32, what the trainer recomputes; at
        temperature 0 (greedy) the log-prob at temperature 1.
    sampling_logprobs: under the distribution really sampled, after filters; equal to `logprobs`
        bit for bit when no filter was on; 0.0 for greedy.
    version_spans: which policy version produced which tokens; they partition those that the policy
        chose.
    finish_reason: "stop" (stop_reason: the token id or string), "length" (stop_reason:
        "max_tokens" or "context"), "aborted", "rejected" or "error" (error_reason: a name,
        error_message: a sentence).
    seed: the seed that was used, given or derived.
    temperature: of the distribution `logprobs` belongs to: that of the sampling, 1.0 for greedy.
    text: the decoded output, where `stop` or `detokenize` asked for it; a stop string is cut off
        unless `include_stop_str_in_output`. The tokens are never cut.
    top_logprobs: per output token the `logprobs=k` best ids and their log-probs, best first.
    prompt_logprobs: log-prob of each prompt token after those before it, None for the first, and
        for those that an aborted sample did not come to;
        prompt_top_logprobs: the `prompt_logprobs=k` best ids in its place.
    response_mask: of a conversation, False at the tokens that the policy did not choose, what an
        environment answered; their log-probs are 0. None: it chose all of them.
    """

    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    stop_reason: int | str | None
    error_reason: str | None
    error_message: str | None
    seed: int
    temperature: float
    text: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    response_mask: list[bool] | None = None


@dataclass(frozen=True, slots=True)
class PromptTask:
    """One prompt with everything that determines its samples, whoever computes them."""

    prompt_index: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    first_sample_index: int


def prompt_tasks(
    prompts: Iterable[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    run_seed: int,
    first_uid: int,
) -> list[PromptTask]:
    """Pair prompts with parameters and settle seeds and sample indices before any dispatch.

    `seed=None` derives a seed from `run_seed` and the prompt's uid (`first_uid` + its place). A
    prompt that occurs twice with one seed goes on counting its samples, so none is a clone.
    """
    prompts = list(prompts)
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} SamplingParams for {len(prompts)} prompts; "
            "pass one for all or one per prompt"
        )
    tasks, seen = [], {}  # type: list[PromptTask], dict[tuple[int, tuple[int, ...]], int]
    for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        ids = _token_ids(index, prompt)
        seed = p.seed if p.seed is not None else derived_seed(run_seed, first_uid + index)
        key = (seed, tuple(ids))
        first = seen.get(key, 0)
        seen[key] = first + p.n
        tasks.append(PromptTask(index, ids, p, seed, first))
    return tasks


def _token_ids(index: int, prompt: Sequence[int]) -> list[int]:
    """The prompt as plain ints; TypeError for anything that would have to be guessed at."""
    if isinstance(prompt, str):
        raise TypeError(f"prompt {index} is text, but token ids are wanted: tokenizer.encode(text)")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise TypeError(
            f"prompt {index} must be a sequence of token ids (ints), got {prompt!r:.80}: {error}"
        ) from None


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One sample on its way through the scheduler. Mutable; owned by one engine.

        tokens    | prompt ............ | output ........... |
        computed  | KV exists ................ |               <- num_computed
                                               | to compute |

    There is no prefill phase and no decode phase: a request has tokens whose KV is computed and
    tokens whose KV is not; when a step computes the last of them, one token is sampled.

    While it waits, and when it has ended, its tokens and log-probs lie here. While it runs they
    lie in its row of the `RunningBatch`, which hands them back when it leaves.
    """

    __slots__ = (
        "arrived", "detokenizer", "edits", "error_message", "error_reason", "finish_reason",
        "logprobs", "max_total_tokens", "noise_key", "num_prompt_tokens", "params",
        "prompt_scores", "request_id", "row", "sample_index", "sampling_logprobs", "sealed",
        "spans", "status", "stop_reason", "task", "tokens", "top",
    )

    def __init__(self, request_id: int, task: PromptTask, sample: int) -> None:
        self.request_id = request_id
        self.task = task
        self.sample_index = task.first_sample_index + sample
        self.params = task.params
        self.num_prompt_tokens = len(task.token_ids)
        self.max_total_tokens = 0
        self.noise_key = 0
        self.edits: LogitEdits | None = None
        self.detokenizer: Detokenizer | None = None
        self.arrived = time.monotonic()
        self.sealed = False
        self.row: int | None = None  # of the running batch
        self.tokens: NDArray[np.int32] = np.empty(0, np.int32)  # prompt and output
        self.logprobs: NDArray[np.float32] = np.empty(0, np.float32)  # of the output
        self.sampling_logprobs: NDArray[np.float32] = np.empty(0, np.float32)
        self.spans: list[tuple[int, int]] = []  # (version, first output token it produced)
        self.top: list[dict[int, float]] = []
        self.prompt_scores: PromptScores | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error_reason: str | None = None
        self.error_message: str | None = None

    def admit(
        self,
        tokens: NDArray[np.int32],
        max_total_tokens: int,
        edits: LogitEdits | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """Make a request that passed the admission checks ready to be queued.

        tokens: those of the prompt, which samples may share. max_total_tokens: prompt + output.
        """
        self.tokens = tokens
        if self.params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(tokens) + self.params.max_tokens)
        self.max_total_tokens = max_total_tokens
        self.noise_key = noise_key(self.task.seed, self.task.token_ids, self.sample_index)
        self.edits = edits
        self.detokenizer = detokenizer
        if self.params.prompt_logprobs is not None:
            self.prompt_scores = PromptScores.empty(len(tokens))

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def may_fork(self) -> bool:
        """Whether it may take over the prompt's KV of another sample as it is: nothing is sampled
        yet, and the prompt's own logits are not asked for."""
        is_fresh = len(self.tokens) == self.num_prompt_tokens and not self.sealed
        return self.params.n > 1 and is_fresh and self.prompt_scores is None

    def fail(self, finish_reason: str, reason: str, message: str) -> None:
        self.finish_reason, self.error_reason, self.error_message = finish_reason, reason, message

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Of an ended request; they partition its output."""
        ends = [*(start for _, start in self.spans[1:]), len(self.logprobs)]
        return tuple(
            VersionSpan(version, start, end)
            for (version, start), end in zip(self.spans, ends, strict=False)
            if start < end
        )

    def result(self) -> Rollout:
        """Of an ended request. Here its columns become plain ints and floats."""
        assert self.finish_reason is not None, f"request {self.request_id} has not finished"
        scores = self.prompt_scores
        return Rollout(
            self.task.prompt_index,
            self.sample_index,
            list(self.task.token_ids),
            self.tokens[self.num_prompt_tokens :].tolist(),
            self.logprobs.tolist(),
            self.sampling_logprobs.tolist(),
            self.version_spans(),
            self.finish_reason,
            self.stop_reason,
            self.error_reason,
            self.error_message,
            self.task.seed,
            self.params.temperature or 1.0,
            None if self.detokenizer is None else self.detokenizer.text,
            self.top[: len(self.logprobs)] if self.params.logprobs else None,
            None if scores is None else [None if p != p else p for p in scores.logprobs.tolist()],
            scores.top if scores is not None and self.params.prompt_logprobs else None,
        )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs of a prompt's tokens as the steps that compute them fill them in.

    logprobs fp32 `[prompt tokens]`, NaN for the first and for those not computed (yet); top: per
    token the best ids, None in the same places.
    """

    logprobs: NDArray[np.float32]
    top: list[dict[int, float] | None]

    @staticmethod
    def empty(num_prompt_tokens: int) -> PromptScores:
        nothing = np.full(num_prompt_tokens, np.nan, np.float32)
        return PromptScores(nothing, [None] * num_prompt_tokens)


def ranked(ids: NDArray[np.int64], logprobs: NDArray[np.float32], k: int) -> dict[int, float]:
    """The first k of one row's best tokens, best first."""
    return dict(zip(ids[:k].tolist(), logprobs[:k].tolist(), strict=True))
