"""A real but tiny run for the tests of the loop: a character-level policy, a one-letter task, and
the trainer and one engine of a colocation in this process, without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from recipes.config import TaskConfig
from rollout import Decoder, DecoderConfig, RolloutBatch, SamplingParams, save_pretrained
from rollout import Tokenizer as PolicyTokenizer
from rollout.engine_config import EngineConfig
from trainer_bridge import Placement, TrainerConfig, WeightsEcho
from trainer_bridge.agreement import check_same_bits, check_same_weights
from trainer_bridge.attach import attach_engine
from trainer_bridge.trainer_actor import TrainerActor

LETTERS = "abcdefgh"
CHARACTERS = [*LETTERS, "=", "$"]


def build_policy(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder of a two-layer policy over `CHARACTERS`; `$` ends a completion."""
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="$"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["$"])
    config = DecoderConfig(
        model_type="llama",
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_ids=(vocabulary["$"],),
    )
    model = Decoder(config)
    model.init_weights(seed)
    tokenizer = PolicyTokenizer(backend.to_str(), {"eos_token": "$"}, None, config.eos_token_ids)
    save_pretrained(model, folder, tokenizer)
    return folder


def repeats(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """1.0 for a completion that begins with the row's letter."""
    return [
        float(completion.startswith(row["letter"]))
        for completion, row in zip(completions, rows, strict=True)
    ]


def _rows(first_letters: str) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": f"{first}{last}=", "letter": last}
            for first in first_letters
            for last in LETTERS
        ]
    )


@dataclass(frozen=True)
class RepeatTask:
    """Say the last letter again: `ab=` wants `b`. Held out by the first letter."""

    name: str = "repeat"
    train: Dataset = field(default_factory=lambda: _rows(LETTERS[:6]))
    heldout: Dataset = field(default_factory=lambda: _rows(LETTERS[6:]))
    rewards: Mapping[str, Any] = field(default_factory=lambda: {"repeats": repeats})

    def demonstrations(self, num_samples: int, seed: int) -> Iterator[tuple[str, str]]:
        order = torch.randint(
            len(self.train), (num_samples,), generator=torch.Generator().manual_seed(seed)
        )
        for index in order.tolist():
            row = self.train[index]
            yield row["prompt"], row["letter"]


def load(config: TaskConfig, seed: int) -> RepeatTask:
    return RepeatTask()


@dataclass(frozen=True)
class UntaughtTask:
    """The same task without demonstrations."""

    name: str = "untaught"
    train: Dataset = field(default_factory=lambda: _rows(LETTERS[:6]))
    heldout: Dataset = field(default_factory=lambda: _rows(LETTERS[6:]))
    rewards: Mapping[str, Any] = field(default_factory=lambda: {"repeats": repeats})


def load_untaught(config: TaskConfig, seed: int) -> UntaughtTask:
    return UntaughtTask()


class LocalPool:
    """`RolloutPool`'s surface over one engine of this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run_batch(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        session_ids: list[int] | None = None,
        on_finished: Any = None,
    ) -> RolloutBatch:
        found = self.engine.run_batch(prompts, params, return_details=True)
        if on_finished is not None:
            for place in reversed(range(len(prompts))):
                on_finished(place, [r for r in found if r.prompt_index == place])
        return RolloutBatch.from_rollouts(found)

    def get_stats(self) -> list[dict[str, Any]]:
        return [self.engine.get_stats()]


class LocalTrainer(TrainerActor):
    """With the surface of `TrainerHandle`."""

    def step(self, batch, advantages, algorithm, columns=None, *, wait_for_rollouts=None):
        if wait_for_rollouts is None:
            return super().step(batch, advantages, algorithm, columns)
        with ThreadPoolExecutor(1) as beside:
            stats = beside.submit(super().step, batch, advantages, algorithm, columns, 0)
            wait_for_rollouts()
            self.allow_update(0)
            return stats.result()


class LocalColocation:
    """`Colocation` without processes: the same trainer, arena, gate and engine."""

    def __init__(
        self,
        model_folder: str | Path,
        rollout_actors: int,
        trainer: TrainerConfig,
        engine: EngineConfig,
        placement: Placement,
        checkpoint: str | Path | None = None,
        heartbeat_timeout_s: float = 30.0,
        max_restarts: int = 0,
    ) -> None:
        torch.set_num_threads(1)
        self._start = partial(
            LocalTrainer, str(model_folder), replace(trainer, num_threads=1), engine
        )
        self.trainer = self._start(None if checkpoint is None else str(checkpoint))
        weights = self.trainer.weights()
        self.pool = LocalPool(attach_engine(weights, engine))
        self.exactness = {
            "trainer": weights.exactness, "rollout-0": self.pool.engine.exactness,
        }  # fmt: skip
        check_same_bits(self.exactness)
        self.tokenizer = PolicyTokenizer.from_folder(model_folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.engine.check_integrity()

    def restart_trainer(self, checkpoint: str | Path | None) -> int:
        folder = None if checkpoint is None else str(checkpoint)
        self.trainer = self._start(folder, self.pool.engine.gate.attachment())
        return self.trainer.get_stats()["policy_version"]

    def confirm_publication(self, version: int) -> None:
        assert self.pool.engine.gate.echo().version == version

    def verify_weights(self) -> dict[str, WeightsEcho]:
        echoes = {
            "trainer": self.trainer.weights_echo(True),
            "rollout-0": self.pool.engine.gate.echo(checksum=True),
        }
        check_same_weights(echoes)
        return echoes

    def memory(self) -> dict[str, int]:
        return {"trainer": self.trainer.memory_uss()}
