"""Conversations of a policy with environments: token in, token out, a turn of all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from recipes.environment import (
    Done,
    Environment,
    Interactive,
    Observation,
    encode_observation,
)
from recipes.errors import RunError, sentence
from recipes.rewards import UNFINISHED
from recipes.tasks.task import Prompt, Row, Task, encode_prompt
from rollout import Rollout, RolloutBatch, SamplingParams
from rollout.noise import derived_seed
from rollout.request import VersionSpan
from rollout.tokenizer import Tokenizer

MAX_THREADS = 32
ENVIRONMENT_FAILED = "environment_failed"
_NO_ROOM = frozenset({"prompt_too_long", "kv_cache_too_small"})


class RunBatch(Protocol):
    """The part of `RolloutPool` that this needs."""

    def __call__(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        session_ids: list[int] | None = None,
        on_finished: Callable[[int, list[Rollout]], None] | None = None,
    ) -> RolloutBatch:
        """`n` rollouts of each prompt, in order; each prompt's told of when they are there."""


class Episode:
    """One conversation, as far as it has come. Its tokens are appended to, never encoded again.

    `reward` is the sum of what its turns earned, None if it cannot be scored.
    """

    def __init__(self, environment: Environment, max_tokens: int | None, max_turns: int) -> None:
        self._environment = environment
        self._max_tokens = max_tokens
        self._turns_left = max_turns
        self._turns: list[Rollout] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._sampling_logprobs: list[float] = []
        self._response_mask: list[bool] = []
        self._spans: list[VersionSpan] = []
        self._end: tuple[str, int | str | None] | None = None
        self._failure: tuple[str, str] | None = None
        self.reward: float | None = 0.0

    def reset(self, row: Row) -> Prompt:
        """Begin; returns the prompt."""
        return self._environment.reset(row)

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def context(self) -> list[int]:
        """The prompt of the next turn: all tokens so far."""
        return self._turns[0].prompt_token_ids + self._token_ids

    @property
    def tokens_left(self) -> int | None:
        """How many the next turn may have; None for no limit."""
        return None if self._max_tokens is None else self._max_tokens - len(self._token_ids)

    @property
    def number(self) -> tuple[int, int]:
        """Seed and sample index of the first turn, which tell it from others of the same prompt."""
        return self._turns[0].seed, self._turns[0].sample_index

    def take(self, turn: Rollout, tokenizer: Tokenizer) -> None:
        """What the policy sampled after `context`, and what the environment answers."""
        if self._turns and turn.prompt_token_ids != self.context:
            raise ValueError(
                f"turn {len(self._turns) + 1} of a conversation was sampled after other tokens "
                "than the conversation has: run_batch must return rollouts in the prompts' order"
            )
        start = len(self._token_ids)
        self._append(turn.token_ids, turn.logprobs, turn.sampling_logprobs, True)
        self._spans += [
            VersionSpan(version, start + first, start + end)
            for version, first, end in turn.version_spans
        ]
        self._turns.append(turn)
        self._turns_left -= 1
        if turn.finish_reason != "stop":
            self._cut_short(turn)
            return
        try:
            answer = self._environment.step(turn.token_ids, tokenizer.decode(turn.token_ids))
        except Exception as error:
            self._end, self.reward = ("error", None), None
            self._failure = ENVIRONMENT_FAILED, f"{type(error).__name__}: {sentence(error)}"
            return
        if not isinstance(answer, Observation | Done):
            raise TypeError(
                f"{type(self._environment).__name__}.step must return an Observation or Done, "
                f"got {type(answer).__name__}"
            )
        if answer.reward is None or self.reward is None:
            self.reward = None
        else:
            self.reward += answer.reward
        if isinstance(answer, Done):
            self._end = turn.finish_reason, turn.stop_reason
            return
        heard = encode_observation(tokenizer, answer.content, turn.token_ids[-1])
        room = self.tokens_left
        if not self._turns_left:
            self._end = "length", "max_turns"
        elif room is not None and len(heard) >= room:
            self._end = "length", "max_tokens"
        else:
            silence = [0.0] * len(heard)
            self._append(heard, silence, silence, False)

    def rollout(self) -> Rollout:
        """Of an ended one; its last token is the policy's."""
        assert self._end is not None
        last, size = self._turns[-1], len(self._token_ids)
        reason, message = self._failure or (last.error_reason, last.error_message)
        while size and not self._response_mask[size - 1]:
            size -= 1  # answers to which no turn came
        return replace(
            self._turns[0],
            token_ids=self._token_ids[:size],
            logprobs=self._logprobs[:size],
            sampling_logprobs=self._sampling_logprobs[:size],
            version_spans=tuple(self._spans),
            finish_reason=self._end[0],
            stop_reason=self._end[1],
            error_reason=reason,
            error_message=message,
            response_mask=self._response_mask[:size],
        )

    def close(self) -> None:
        """End the environment, if it wants to be told."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()

    def _cut_short(self, turn: Rollout) -> None:
        """The turn did not end by itself: the environment does not hear of it."""
        if len(self._turns) > 1 and turn.error_reason in _NO_ROOM:
            self._end = "length", "context"
            return
        self._end = turn.finish_reason, turn.stop_reason
        if turn.finish_reason in UNFINISHED:
            self.reward = None

    def _append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        sampling_logprobs: Sequence[float],
        chosen: bool,
    ) -> None:
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._sampling_logprobs += sampling_logprobs
        self._response_mask += [chosen] * len(token_ids)


def run_episodes(
    run_batch: RunBatch,
    tokenizer: Tokenizer,
    environment: Callable[[], Environment],
    rows: Sequence[Row],
    params: SamplingParams,
    max_turns: int,
) -> tuple[RolloutBatch, list[float | None]]:
    """`params.n` conversations of each row, and the reward of each, in order.

    params.max_tokens bounds all tokens after the prompt, an environment's included. A conversation
    that comes to this bound, to the engine's longest sequence or to `max_turns` ends with finish
    reason "length" and what it had earned; one that was aborted, rejected or failed has no reward.

    Every turn of all open conversations is one batch, each prompt what its conversation has so far,
    so the engine finds the KV of earlier turns; then the environments answer, side by side. What is
    sampled depends on weights, prompt, parameters and what the environment says, not on which other
    conversations there are.
    """
    episodes = [
        [Episode(environment(), params.max_tokens, max_turns) for _ in range(params.n)]
        for _ in rows
    ]
    numbered = [(session, e) for session, group in enumerate(episodes) for e in group]
    threads = min(len(numbered), MAX_THREADS) or 1
    with ExitStack() as stack:
        for _, episode in numbered:
            stack.callback(episode.close)
        pool = stack.enter_context(ThreadPoolExecutor(threads, "environment"))

        def take(taking: Sequence[Episode], turns: RolloutBatch) -> None:
            pairs = zip(taking, turns, strict=True)
            list(pool.map(lambda pair: pair[0].take(pair[1], tokenizer), pairs))

        prompts = [
            _same(index, [encode_prompt(tokenizer, e.reset(row)) for e in group])
            for index, (row, group) in enumerate(zip(rows, episodes, strict=True))
        ]
        turns = run_batch(prompts, params, session_ids=list(range(len(rows))))
        take([episode for _, episode in numbered], turns)
        while still := [(s, episode) for s, episode in numbered if not episode.ended]:
            turns = run_batch(
                [episode.context for _, episode in still],
                [_next(params, episode) for _, episode in still],
                session_ids=[session for session, _ in still],
            )
            take([episode for _, episode in still], turns)
    ended = [episode for _, episode in numbered]
    batch = RolloutBatch.from_rollouts([episode.rollout() for episode in ended])
    _check_some_went_on(batch)
    return batch, [episode.reward for episode in ended]


def sample_rows(
    run_batch: RunBatch,
    tokenizer: Tokenizer,
    task: Task,
    rows: Sequence[Row],
    params: SamplingParams,
    max_turns: int,
    on_finished: Callable[[int, list[Rollout]], None] | None = None,
) -> tuple[RolloutBatch, list[float | None] | None]:
    """`params.n` completions of each row's prompt; of a task that is `Interactive` they are
    conversations, with what each earned, and `on_finished` is not called."""
    if isinstance(task, Interactive):
        return run_episodes(run_batch, tokenizer, task.environment, rows, params, max_turns)
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    if on_finished is None:
        return run_batch(prompts, params), None
    return run_batch(prompts, params, on_finished=on_finished), None


def _next(params: SamplingParams, episode: Episode) -> SamplingParams:
    """One sample more, whose noise no other conversation has."""
    return replace(params, n=1, seed=derived_seed(*episode.number), max_tokens=episode.tokens_left)


def _check_some_went_on(batch: RolloutBatch) -> None:
    """An environment that fails everywhere is a fault of the program, not of one conversation."""
    failures = [m for r, m in zip(batch.error_reasons, batch.error_messages, strict=True)
                if r == ENVIRONMENT_FAILED]  # fmt: skip
    if failures and len(failures) == len(batch):
        raise RunError(
            f"the environment failed in each of the {len(batch)} conversations, first with "
            f"{failures[0]}"
        )


def _same(index: int, prompts: list[list[int]]) -> list[int]:
    """The one prompt that a row's environments begin with."""
    if any(prompt != prompts[0] for prompt in prompts):
        raise ValueError(
            f"the environments of row {index} begin with different prompts; reset() must depend on "
            "the row alone, since the conversations of a row are compared with each other"
        )
    return prompts[0]
