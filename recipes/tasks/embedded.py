"""The embedded job: a tiny character-level policy that learns to show its work.

Problems are `chain_sum` of reasoning-gym, written as the bare expression: `42-25=`. A policy made
from seeded random weights first imitates demonstrations, most of them quick guesses, the rest
worked column by column:

    42-25=                   a guess: right or off by up to 4, at random
     19
    42-25=                   worked: tens, ones, both together
    4-2=2
    2-5=-3
    17

Imitation reproduces the mixture, so its most likely completion is a guess, and about one guess in
ten is right. Reinforcement learning is told only whether the last line is the answer. From that it
finds that working pays, and goes on to make fewer slips while it works.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from recipes.config import TaskConfig
from recipes.tasks.task import RewardFunction, Row, assert_disjoint
from rollout.model.checkpoint import save_pretrained
from rollout.model.config import DecoderConfig
from rollout.model.decoder import Decoder
from rollout.tokenizer import Tokenizer

CHARACTERS = "0123456789+-=\n "
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
GUESS_SHARE = 0.6
GUESS_ERROR = 4

_PAD_ID, _EOS_ID = 0, 1
_HELDOUT_SHARE = 10
_ATTEMPTS_PER_ROW = 20
_TERM = re.compile(r"([+-]?)(\d+)")


@dataclass(frozen=True, slots=True)
class EmbeddedTask:
    """A `Task` that `Demonstrates`.

    Rows: `prompt` (`42-25=`), `answer` (`17`), and of reasoning-gym `question` and `expression`.
    `problems` says how demonstrations are drawn: afresh from all problems that are not held out.
    """

    problems: ProblemSource
    train: Dataset
    heldout: Dataset
    name: str = "embedded"
    rewards: Mapping[str, RewardFunction] = field(
        default_factory=lambda: {"exact_match": exact_match}
    )

    def __post_init__(self) -> None:
        assert_disjoint(self)

    def demonstrations(self, num_samples: int, seed: int) -> Iterator[tuple[str, str]]:
        """`num_samples` pairs of a prompt and a completion, a pure function of `seed`.

        A share `GUESS_SHARE` are guesses, uniform within `GUESS_ERROR` of the answer. End of
        sequence is not part of the text.
        """
        choices = random.Random(f"demonstrations {seed}")
        for row in islice(self.problems.stream("demonstrations", seed, False), num_samples):
            if choices.random() < GUESS_SHARE:
                guess = int(row["answer"]) + choices.randint(-GUESS_ERROR, GUESS_ERROR)
                yield row["prompt"], f" {guess}"
            else:
                yield row["prompt"], worked(row["expression"])


@dataclass(frozen=True, slots=True)
class ProblemSource:
    """Endless seeded streams of problems of one difficulty, each wholly held out or wholly not.

    Which side a problem is on depends on its numbers alone, whatever their order and signs: 42-25,
    25-42, 42+25 and 25+42 are all held out or all trained on, in every stream of every seed.
    """

    min_terms: int
    max_terms: int
    min_digits: int
    max_digits: int

    def stream(self, purpose: str, seed: int, heldout: bool) -> Iterator[dict[str, Any]]:
        """Rows of one side. Streams of different purposes or seeds start far apart."""
        start = _hash(f"{purpose} {seed}") % 2**48
        source = reasoning_gym.create_dataset(
            "chain_sum",
            seed=start,
            size=2**31,
            min_terms=self.min_terms,
            max_terms=self.max_terms,
            min_digits=self.min_digits,
            max_digits=self.max_digits,
        )
        for index in range(2**31):
            entry = source[index]
            expression = entry["metadata"]["expression"]
            if is_heldout(expression) == heldout:
                yield {
                    "prompt": expression.replace(" ", "") + "=",
                    "answer": entry["answer"],
                    "question": entry["question"],
                    "expression": expression,
                }

    def distinct(self, purpose: str, seed: int, heldout: bool, size: int) -> Dataset:
        """The first `size` different rows of a stream. ValueError when there are too few."""
        rows: dict[str, dict[str, Any]] = {}
        for row in islice(self.stream(purpose, seed, heldout), _ATTEMPTS_PER_ROW * size):
            rows.setdefault(row["prompt"], row)
            if len(rows) == size:
                return Dataset.from_list(list(rows.values()))
        raise ValueError(
            f"there are only about {len(rows)} different {purpose} problems of this difficulty, "
            f"but {purpose}_size is {size}; lower it, or raise max_terms or max_digits"
        )


def load(config: TaskConfig, seed: int) -> EmbeddedTask:
    """The task of a configuration. The held-out problems are the same for every seed."""
    problems = ProblemSource(
        config.min_terms, config.max_terms, config.min_digits, config.max_digits
    )
    return EmbeddedTask(
        problems=problems,
        train=problems.distinct("train", seed, False, config.train_size),
        heldout=problems.distinct("heldout", 0, True, config.heldout_size),
    )


def is_heldout(expression: str) -> bool:
    """Whether a problem with these numbers, in any order and with any signs, is held out."""
    numbers = sorted(int(digits) for _, digits in terms_of(expression))
    return _hash(repr(numbers)) % _HELDOUT_SHARE == 0


def worked(expression: str) -> str:
    """The completion that works `expression` column by column, highest place first.

    The numbers have equally many digits. Columns are added with their signs and not carried; the
    last line puts the columns together and is the answer.
    """
    terms = terms_of(expression)
    places = len(terms[0][1])
    if any(len(digits) != places for _, digits in terms):
        raise ValueError(f"numbers must have equally many digits, got {expression!r}")
    lines, total = [], 0
    for place in range(places):
        column = "".join(sign + digits[place] for sign, digits in terms)
        value = sum(int(f"{sign}{digits[place]}") for sign, digits in terms)
        lines.append(f"\n{column}={value}")
        total = 10 * total + value
    return "".join(lines) + f"\n{total}"


def exact_match(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]
) -> list[float | None]:
    """1.0 where the last line of the completion is the row's `answer`, character by character.

    Blanks around it do not count. Nothing else is rewarded: not the length, not the work.
    reasoning-gym's own score gives part of the credit to any text that contains the answer, and a
    policy trained on that learnt to answer "-1" to everything ("-1" for "1" is worth a half).
    """
    return [
        float(completion.rpartition("\n")[2].strip(" ") == row["answer"])
        for completion, row in zip(completions, rows, strict=True)
    ]


def build_policy_folder(out: Path, seed: int) -> Path:
    """Write a fresh policy (Qwen3 form, 400,000 parameters, weights from `seed`) to `out`.

    A complete Hugging Face folder: config, generation config, tokenizer, safetensors. Returns
    `out`.
    """
    tokenizer = character_tokenizer()
    model = Decoder(policy_config(tokenizer.vocab_size))
    model.init_weights(seed)
    save_pretrained(model, out, tokenizer)
    return out


def policy_config(vocab_size: int) -> DecoderConfig:
    """The policy's shape. With so narrow a model the usual initial scale, 0.02, learns slowly."""
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        qk_norm=True,
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_ids=(_EOS_ID,),
        pad_token_id=_PAD_ID,
    )


def character_tokenizer() -> Tokenizer:
    """One token per character of `CHARACTERS`; any other character is `<unk>`."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.decoder = decoders.Fuse()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(backend.to_str(), settings, eos_token_ids=(_EOS_ID,))


def terms_of(expression: str) -> list[tuple[str, str]]:
    """`42 - 25` as [("", "42"), ("-", "25")]."""
    return _TERM.findall(expression.replace(" ", ""))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
