"""Hugging Face transformers: `generate` on padded batches, or its continuous batching.

`generate`: up to `max_batch` samples at a time, prompts padded on the left, samples of similar
prompt length together. The log-prob of a drawn token is taken from the scores of its step as they
pass by (`DrawnLogprobs`), so that no step's logits are kept. A batch ends with its longest sample.

continuous batching: log-probs are the library's own (`return_logprobs`); the samples of a group
with one length share their prompt (`num_return_sequences`). The CPU has no kernel for its paged
attention: it falls back to SDPA over the gathered cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from scripts.bench.peers.protocol import Engine, Job, Operation, serve
from scripts.bench.workloads import Group, Sample, requests

KV_BYTES = 2 << 30
PAD = 0


def load(job: Job) -> PreTrainedModel:
    """The job's model in fp32, with the job's threads, and no EOS that could end a sample."""
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def sampling(max_new_tokens: int) -> GenerationConfig:
    """Temperature 1 and no filter."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=max_new_tokens, pad_token_id=PAD, eos_token_id=None,
    )  # fmt: skip


class DrawnLogprobs(LogitsProcessor):
    """Changes nothing; keeps a step's log-softmax until it is known which token was drawn."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._last: Tensor | None = None
        self._drawn: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > self._prompt_length:
            self._take(input_ids[:, -1:])
        self._last = torch.log_softmax(scores, dim=-1)
        return scores

    def _take(self, drawn: Tensor) -> None:
        assert self._last is not None
        self._drawn.append(self._last.gather(1, drawn))

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probs `[rows, new tokens]` of the sequences that `generate` returned."""
        self._take(sequences[:, -1:])
        return torch.cat(self._drawn, dim=1)


class Rows:
    """The samples of some groups as rows, and batches of rows with similar prompt lengths."""

    def __init__(self, groups: Sequence[Group], batch: int) -> None:
        self.prompts = [group.prompt for group in groups for _ in group.max_tokens]
        self.lengths = [length for group in groups for length in group.max_tokens]
        self._batch = batch

    def batches(self) -> Iterator[list[int]]:
        """Indices of rows; rows of one prompt stay together."""
        order = sorted(range(len(self.prompts)), key=lambda row: len(self.prompts[row]))
        for start in range(0, len(order), self._batch):
            yield order[start : start + self._batch]

    def padded(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Prompts padded on the left, and the mask of what is no padding; int64 `[rows, width]`."""
        width = max(len(self.prompts[row]) for row in rows)
        ids = torch.full((len(rows), width), PAD)
        mask = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            prompt = self.prompts[row]
            ids[index, width - len(prompt) :] = torch.tensor(prompt)
            mask[index, width - len(prompt) :] = 1
        return ids, mask


class PaddedGenerate:
    """`generate`, one padded batch after the other."""

    def __init__(self, job: Job) -> None:
        self.version = f"transformers {transformers.__version__}"
        self.operations: dict[str, Operation] = {}
        self._model = load(job)
        self._batch = job.max_batch

    @torch.no_grad()
    def run(self, groups: Sequence[Group]) -> list[Sample]:
        rows = Rows(groups, self._batch)
        samples: dict[int, Sample] = {}
        for batch in rows.batches():
            ids, mask = rows.padded(batch)
            width = ids.shape[1]
            drawn = DrawnLogprobs(width)
            sequences = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=sampling(max(rows.lengths[row] for row in batch)),
                logits_processor=LogitsProcessorList([drawn]),
            )
            logprobs = drawn.finish(sequences)
            for index, row in enumerate(batch):
                length = rows.lengths[row]
                tokens = sequences[index, width : width + length].tolist()
                samples[row] = Sample(tokens, logprobs[index, :length].tolist())
        return [samples[row] for row in range(len(samples))]


class ContinuousBatching:
    """The engine behind `generate_batch`, driven through its manager so that lengths may differ."""

    def __init__(self, job: Job) -> None:
        self.version = f"transformers {transformers.__version__}"
        self.operations: dict[str, Operation] = {}
        self._model = load(job)
        config = self._model.config
        self._page = job.settings["page_size"]
        token_bytes = 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        wanted = job.max_batch * (-(-job.max_seq_len // self._page) + 1)
        self._blocks = min(wanted, KV_BYTES // (token_bytes * self._page))
        self._batch = job.max_batch

    @torch.no_grad()
    def run(self, groups: Sequence[Group]) -> list[Sample]:
        wanted = requests(groups)
        n = wanted[0].n  # one for all: it belongs to the manager
        generation = sampling(max(request.max_tokens for request in wanted))
        generation.num_return_sequences = n
        generation.eos_token_id = -1
        config = ContinuousBatchingConfig(
            page_size=self._page,
            num_blocks=self._blocks,
            max_batch_tokens=2048,
            max_requests_per_batch=self._batch,
            return_logprobs=True,
        )
        results: dict[str, Sample] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            for index, request in enumerate(wanted):
                manager.add_request(request.prompt, f"{index}", request.max_tokens)
            while len(results) < len(wanted) * n:
                output = manager.get_result(timeout=1)
                if output is None:
                    if not manager.is_running():
                        raise RuntimeError("continuous batching stopped; see the log above")
                    continue
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                if output.is_finished():
                    results[output.request_id] = Sample(output.generated_tokens, output.logprobs)
        ids = [[f"{i}", *(f"{i}__child#{c}" for c in range(n - 1))] for i in range(len(wanted))]
        return [results[name] for names in ids for name in names]


def build(job: Job) -> Engine:
    """The engine for the job's `method`."""
    if job.settings["method"] == "generate":
        return PaddedGenerate(job)
    return ContinuousBatching(job)


if __name__ == "__main__":
    serve(build)
