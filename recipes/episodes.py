"""Conversations of a policy with environments: token in, token out, a turn of all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from recipes.environment import Done, Environment, Interactive, encode_observation
from recipes.rewards import UNFINISHED
from recipes.tasks.task import Prompt, Row, Task, encode_prompt
from rollout import Rollout, RolloutBatch, SamplingParams
from rollout.noise import derived_seed
from rollout.request import VersionSpan
from rollout.tokenizer import Tokenizer

_NO_ROOM = frozenset({"prompt_too_long", "kv_cache_too_small"})


class RunBatch(Protocol):
    """The part of `RolloutPool` that this needs."""

    def __call__(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        session_ids: list[int] | None = None,
    ) -> RolloutBatch:
        """`n` rollouts of each prompt, in order."""


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
        answer = self._environment.step(turn.token_ids, tokenizer.decode(turn.token_ids))
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
            error_reason=last.error_reason,
            error_message=last.error_message,
            response_mask=self._response_mask[:size],
        )

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
    so the engine finds the KV of earlier turns. A turn's noise depends on the seed, the number of
    the conversation and its tokens, not on which others are still open.
    """
    episodes = [
        [Episode(environment(), params.max_tokens, max_turns) for _ in range(params.n)]
        for _ in rows
    ]
    prompts = [
        _same(index, [encode_prompt(tokenizer, e.reset(row)) for e in group])
        for index, (row, group) in enumerate(zip(rows, episodes, strict=True))
    ]
    numbered = [(session, e) for session, group in enumerate(episodes) for e in group]
    turns = run_batch(prompts, params, session_ids=list(range(len(rows))))
    for (_, episode), turn in zip(numbered, turns, strict=True):
        episode.take(turn, tokenizer)
    while True:
        still = [(i, session, e) for i, (session, e) in enumerate(numbered) if not e.ended]
        if not still:
            break
        turns = run_batch(
            [episode.context for _, _, episode in still],
            [_next(params, i, episode.tokens_left) for i, _, episode in still],
            session_ids=[session for _, session, _ in still],
        )
        for (_, _, episode), turn in zip(still, turns, strict=True):
            episode.take(turn, tokenizer)
    ended = [episode for _, episode in numbered]
    return RolloutBatch.from_rollouts([e.rollout() for e in ended]), [e.reward for e in ended]


def sample_rows(
    run_batch: RunBatch,
    tokenizer: Tokenizer,
    task: Task,
    rows: Sequence[Row],
    params: SamplingParams,
    max_turns: int,
) -> tuple[RolloutBatch, list[float | None] | None]:
    """`params.n` completions of each row's prompt; of a task that is `Interactive` they are
    conversations, with what each earned."""
    if isinstance(task, Interactive):
        return run_episodes(run_batch, tokenizer, task.environment, rows, params, max_turns)
    return run_batch([encode_prompt(tokenizer, row["prompt"]) for row in rows], params), None


def _next(params: SamplingParams, number: int, tokens_left: int | None) -> SamplingParams:
    seed = None if params.seed is None else derived_seed(params.seed, number)
    return replace(params, n=1, seed=seed, max_tokens=tokens_left)


def _same(index: int, prompts: list[list[int]]) -> list[int]:
    """The one prompt that a row's environments begin with."""
    if any(prompt != prompts[0] for prompt in prompts):
        raise ValueError(
            f"the environments of row {index} begin with different prompts; reset() must depend on "
            "the row alone, since the conversations of a row are compared with each other"
        )
    return prompts[0]
