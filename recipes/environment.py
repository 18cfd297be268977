"""Environments: who the policy speaks with, turn by turn, and what their words become as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from recipes.tasks.task import Prompt, Row
from rollout.tokenizer import Tokenizer

Content: TypeAlias = Prompt
"""What an environment says: text where the prompt is text, chat messages where it is those."""


class Observation(NamedTuple):
    """The conversation goes on with this. reward: what the turn earned."""

    content: Content
    reward: float = 0.0


class Done(NamedTuple):
    """The turn was the last. reward: what it earned; None if the conversation cannot be scored."""

    reward: float | None = 0.0


class Environment(Protocol):
    """One conversation; its reward is the sum of what its turns earned.

    Turns of different conversations are answered side by side, on threads. An exception of `step`
    ends its conversation, without a reward and with finish reason "error"; the others go on. If
    there is a method `close()`, it is called in the end, whatever happened.
    """

    def reset(self, row: Row) -> Prompt:
        """Begin with a row of the dataset: the prompt, the same for the same row every time."""

    def step(self, token_ids: Sequence[int], text: str) -> Observation | Done:
        """Answer a turn of the policy. token_ids: what it sampled, the token that ended the turn
        included; text: these, decoded, without special tokens."""


@runtime_checkable
class Interactive(Protocol):
    """A task whose completions are conversations."""

    def environment(self) -> Environment:
        """A new one, for one conversation; nothing in it is shared with another."""


_WORDS, _OTHER_WORDS = "lockstepassistant", "lockstepother"


def encode_observation(tokenizer: Tokenizer, content: Content, last_token: int) -> list[int]:
    """The tokens that follow a turn that `last_token` ended, up to where the policy speaks again.

    Nothing that was sampled is encoded again, so the policy reads on from its own tokens. Of chat
    messages it is what the model's template writes after an assistant's words, without the token
    that ends them where the turn has one (`end_of_turn`). ValueError if the template changes those
    words or leaves out a message.
    """
    if isinstance(content, str):
        return tokenizer.encode(content)
    after = _after_words(tokenizer, content)
    for place, message in enumerate(content):
        other = [*content[:place], {**message, "content": _OTHER_WORDS}, *content[place + 1 :]]
        if _after_words(tokenizer, other) == after:
            raise ValueError(
                f"the chat template leaves out a message of role {message.get('role')!r}; answer "
                "with a role that it knows"
            )
    ids = tokenizer.encode(after)
    if last_token not in tokenizer.eos_token_ids:
        return ids
    closing = tokenizer.encode(_after_words(tokenizer, []))
    return ids[_past_end(tokenizer, closing) :]


def end_of_turn(tokenizer: Tokenizer, chat: bool) -> list[int]:
    """The token with which a turn of the policy ends, or none if the model has none: the one with
    which the template closes an assistant's words, if a generation ends with it, else the first of
    `eos_token_ids`."""
    if chat:
        closing = tokenizer.encode(_after_words(tokenizer, []))
        end = _past_end(tokenizer, closing)
        if end and closing[end - 1] in tokenizer.eos_token_ids:
            return [closing[end - 1]]
    return list(tokenizer.eos_token_ids[:1])


def _after_words(tokenizer: Tokenizer, said: Sequence[Mapping[str, str]]) -> str:
    """What the template writes after an assistant's words, if these messages follow."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORDS}, *said]
    rendered = tokenizer.render_chat(chat, add_generation_prompt=bool(said))
    _, found, after = rendered.rpartition(_WORDS)
    if not found:
        raise ValueError(
            "the chat template does not show an assistant's words as they are, so an environment's "
            "answer cannot be appended to them; answer with text instead of messages"
        )
    return after


def _past_end(tokenizer: Tokenizer, closing: Sequence[int]) -> int:
    """How many tokens of `closing` end the words: up to its first special one, or none."""
    special = tokenizer.special_token_ids
    return next((place + 1 for place, token in enumerate(closing) if token in special), 0)
