"""TRL's own training step: `GRPOTrainer` as it is, let go one step at a time.

Beside "run", which is not for this engine, it knows "prepare", the groups of all steps in order,
and "train", the next one of them: generation, reward, loss, backward and AdamW. The trainer runs on
a thread of its own and waits where it begins to generate, so what is measured is its own loop.

Prompts are ids; TRL takes text, so they are spelled as numbers to a tokenizer of numbers. Searched:
rows of a forward and backward (`per_device_train_batch_size`), and generation by continuous
batching. Activation checkpointing, TRL's default, is off: it costs time and the memory suffices.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from scripts.bench.peers.protocol import Job, Operation, serve
from scripts.bench.workloads import Group, Sample, groups_from_json


class TrlStep:
    """The trainer is built by "prepare", which says how long prompts and answers are."""

    def __init__(self, job: Job) -> None:
        self.version = f"trl {trl.__version__}"
        self.operations: dict[str, Operation] = {"prepare": self._prepare, "train": self._train}
        torch.set_num_threads(job.threads)
        self._job = job
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._trainer: GRPOTrainer | None = None
        self._rollout_seconds = 0.0

    def run(self, groups: Sequence[Group]) -> list[Sample]:
        raise NotImplementedError("this engine trains: ask for an operation")

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        steps = [groups_from_json(groups) for groups in request["steps"]]
        self._trainer = self._build(steps, float(request["learning_rate"]))
        threading.Thread(target=self._loop, args=(self._trainer,), daemon=True).start()
        return {}

    def _train(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._trainer is not None, "prepare comes first"
        started = time.perf_counter()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        log = next(entry for entry in reversed(self._trainer.state.log_history) if "loss" in entry)
        return {
            "seconds": time.perf_counter() - started,
            "rollout_seconds": self._rollout_seconds,
            "grad_norm": log["grad_norm"],
            "mean_length": log["completions/mean_length"],
        }

    def _loop(self, trainer: GRPOTrainer) -> None:
        try:
            trainer.train()
        except BaseException as error:
            self._error = error
            self._done.release()

    def _build(self, steps: Sequence[Sequence[Group]], learning_rate: float) -> GRPOTrainer:
        groups, settings = steps[0], self._job.settings
        samples, new_tokens = len(groups[0].max_tokens), groups[0].max_tokens[0]
        rows = len(groups) * samples
        arguments = GRPOConfig(
            output_dir=str(Path(tempfile.gettempdir()) / "trl_step"),
            use_cpu=True, bf16=False, gradient_checkpointing=False,
            learning_rate=learning_rate, lr_scheduler_type="constant", optim="adamw_torch",
            max_grad_norm=1.0, beta=0.0, loss_type="dapo", num_iterations=1,
            per_device_train_batch_size=settings["rows"],
            gradient_accumulation_steps=rows // settings["rows"],
            num_generations=samples, max_completion_length=new_tokens, temperature=1.0,
            generation_kwargs={"min_new_tokens": new_tokens},
            use_transformers_continuous_batching=settings["continuous_batching"],
            max_steps=len(steps), logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, shuffle_dataset=False, dataloader_num_workers=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(self._job.folder, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=share_of_even_ids,
            args=arguments,
            train_dataset=Dataset.from_list(
                [{"prompt": " ".join(map(str, g.prompt))} for step in steps for g in step]
            ),
            processing_class=number_tokenizer(AutoConfig.from_pretrained(self._job.folder)),
            callbacks=[AtEnd(self._done)],
        )
        generate = trainer._generate

        def timed(prompts: list[str]) -> Any:
            self._go.acquire()
            started = time.perf_counter()
            generated = generate(prompts)
            self._rollout_seconds = time.perf_counter() - started
            return generated

        trainer._generate = timed
        return trainer


class AtEnd(TrainerCallback):
    """Says that a step has ended."""

    def __init__(self, done: threading.Semaphore) -> None:
        self._done = done

    def on_log(self, *arguments: Any, **keywords: Any) -> None:
        self._done.release()


def share_of_even_ids(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """A reward that costs nothing and differs between samples."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def number_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """Id 17 is the word `17`."""
    words = {str(token): token for token in range(config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = config.eos_token_id
    end = str(end[0] if isinstance(end, list) else end)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)


if __name__ == "__main__":
    serve(TrlStep)
