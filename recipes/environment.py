"""Environments: who the policy speaks with, turn by turn, and what their words become as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from recipes.tasks.task import Prompt, Row
from rollout.tokenizer import Tokenizer

Content: TypeAlias = str | Sequence[Mapping[str, str]]
"""What an environment says: text where the prompt is text, chat messages where it is those."""


class Observation(NamedTuple):
    """The conversation goes on with this. reward: what the turn earned."""

    content: Content
    reward: float = 0.0


class Done(NamedTuple):
    """The turn was the last. reward: what it earned; None if the conversation cannot be scored."""

    reward: float | None = 0.0


class Environment(Protocol):
    """One conversation at a time; a conversation's reward is the sum of what its turns earned."""

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


_WORDS = "lockstepassistant"


def encode_observation(tokenizer: Tokenizer, content: Content, last_token: int) -> list[int]:
    """The tokens that follow a turn that `last_token` ended, up to where the policy speaks again.

    Nothing that was sampled is encoded again, so the policy reads on from its own tokens. Of chat
    messages it is what the model's template writes after an assistant's words; the end-of-turn
    token with which that begins is left out where the turn has it already. ValueError if the
    template changes those words.
    """
    if isinstance(content, str):
        return tokenizer.encode(content)
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": _WORDS}, *content]
    rendered = tokenizer.render_chat(chat, add_generation_prompt=True)
    _, found, after = rendered.rpartition(_WORDS)
    if not found:
        raise ValueError(
            "the chat template does not show an assistant's words as they are, so an environment's "
            "answer cannot be appended to them; answer with text instead of messages"
        )
    ids = tokenizer.encode(after)
    ends = tokenizer.eos_token_ids
    return ids[1:] if ids and last_token in ends and ids[0] in ends else ids
