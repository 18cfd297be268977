"""Requests: what a prompt becomes inside the engine, and what comes out of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    version_spans: which policy version produced which tokens; they partition the output.
    finish_reason: "stop" (stop_reason: the token id), "length" (stop_reason: "max_tokens" or
        "context"), "aborted", "rejected" or "error" (error_reason: a name, error_message: a
        sentence).
    seed: the seed that was used, given or derived.
    temperature: of the distribution `logprobs` belongs to: that of the sampling, 1.0 for greedy.
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


@dataclass(frozen=True, slots=True)
class PromptTask:
    """One prompt with everything that determines its samples, whoever computes them."""

    prompt_index: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    first_sample_index: int


def prompt_tasks(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    run_seed: int,
    first_uid: int,
) -> list[PromptTask]:
    """Pair prompts with parameters and settle seeds and sample indices before any dispatch.

    `seed=None` derives a seed from `run_seed` and the prompt's uid (`first_uid` + its place). A
    prompt that occurs twice with one seed goes on counting its samples, so none is a clone.
    """
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} SamplingParams for {len(prompts)} prompts; "
            "pass one for all or one per prompt"
        )
    tasks, seen = [], {}  # type: list[PromptTask], dict[tuple[int, tuple[int, ...]], int]
    for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        ids = [int(token) for token in prompt]
        seed = p.seed if p.seed is not None else derived_seed(run_seed, first_uid + index)
        key = (seed, tuple(ids))
        first = seen.get(key, 0)
        seen[key] = first + p.n
        tasks.append(PromptTask(index, ids, p, seed, first))
    return tasks


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One sample on its way through the scheduler. Mutable; owned by one engine.

        tokens    | prompt ............ | output ........... |
        computed  | KV exists ................ |               <- num_computed_tokens
                                               | to compute |  <- num_uncomputed_tokens

    There is no prefill phase and no decode phase: a request has tokens whose KV is computed and
    tokens whose KV is not; when a step computes the last of them, one token is sampled.
    """

    __slots__ = (
        "error_message", "error_reason", "finish_reason", "logprobs", "max_total_tokens",
        "noise_key", "num_computed_tokens", "num_prompt_tokens", "params", "prompt_index",
        "request_id", "sample_index", "sampling_logprobs", "sealed", "seed", "spans", "status",
        "stop_reason", "tokens",
    )

    def __init__(self, request_id: int, task: PromptTask, sample: int) -> None:
        self.request_id = request_id
        self.prompt_index = task.prompt_index
        self.sample_index = task.first_sample_index + sample
        self.params = task.params
        self.seed = task.seed
        self.noise_key = noise_key(task.seed, task.token_ids, self.sample_index)
        self.tokens = list(task.token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.max_total_tokens = 0  # prompt + output, set on admission to the engine
        self.num_computed_tokens = 0
        self.sealed = False
        self.logprobs: list[float] = []
        self.sampling_logprobs: list[float] = []
        self.spans: list[list[int]] = []  # [version, start, end]
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error_reason: str | None = None
        self.error_message: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(
        self, token: int, logprob: float, sampling_logprob: float, version: int
    ) -> None:
        """Take the token that the step of `version` sampled."""
        position = self.num_output_tokens
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = position + 1
        else:
            self.spans.append([version, position, position + 1])

    def fail(self, finish_reason: str, reason: str, message: str) -> None:
        self.finish_reason, self.error_reason, self.error_message = finish_reason, reason, message

    def result(self) -> Rollout:
        assert self.finish_reason is not None, f"request {self.request_id} has not finished"
        return Rollout(
            self.prompt_index,
            self.sample_index,
            self.tokens[: self.num_prompt_tokens],
            self.tokens[self.num_prompt_tokens :],
            self.logprobs,
            self.sampling_logprobs,
            tuple(VersionSpan(*span) for span in self.spans),
            self.finish_reason,
            self.stop_reason,
            self.error_reason,
            self.error_message,
            self.seed,
            self.params.temperature or 1.0,
        )
