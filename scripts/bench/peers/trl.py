"""TRL's rollout with log-probs, as `GRPOTrainer` makes it without vLLM.

Left-padded batches through transformers' `generate`, which keeps no log-probs; then TRL's own pass,
`GRPOTrainer._get_per_token_logps_and_entropies` with its fused head, over prompt and completion,
`score_batch` rows at a time (the trainer's `per_device_train_batch_size`, searched).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from scripts.bench.peers.protocol import Job, Operation, serve
from scripts.bench.peers.transformers import Rows, load, sampling
from scripts.bench.workloads import Group, Sample


class Trl:
    """Generation, then scoring, one batch of samples after the other."""

    def __init__(self, job: Job) -> None:
        self.version = f"trl {trl.__version__}"
        self.operations: dict[str, Operation] = {}
        self._model = load(job)
        add_fused_lm_head(self._model, temperature=1.0, outputs=("log_probs", "entropy"))
        self._batch = job.max_batch
        self._score_batch = job.settings["score_batch"]
        # all that the method reads of its trainer
        self._trainer = SimpleNamespace(accelerator=Accelerator(cpu=True))

    @torch.no_grad()
    def run(self, groups: Sequence[Group]) -> list[Sample]:
        rows = Rows(groups, self._batch)
        samples: dict[int, Sample] = {}
        for batch in rows.batches():
            ids, mask = rows.padded(batch)
            lengths = [rows.lengths[row] for row in batch]
            sequences = self._model.generate(
                input_ids=ids, attention_mask=mask, generation_config=sampling(max(lengths))
            )
            completions = sequences[:, ids.shape[1] :]
            positions = torch.arange(completions.shape[1])
            kept = (positions < torch.tensor(lengths).unsqueeze(1)).to(mask.dtype)
            logprobs = self._logprobs(sequences, torch.cat((mask, kept), 1), completions.shape[1])
            for index, row in enumerate(batch):
                length = lengths[index]
                tokens = completions[index, :length].tolist()
                samples[row] = Sample(tokens, logprobs[index, :length].tolist())
        return [samples[row] for row in range(len(samples))]

    def _logprobs(self, sequences: Tensor, mask: Tensor, new_tokens: int) -> Tensor:
        """TRL's log-probs of the last `new_tokens` columns, `[rows, new_tokens]`."""
        logprobs, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            self._trainer, self._model, sequences, mask, new_tokens, batch_size=self._score_batch
        )
        return logprobs


if __name__ == "__main__":
    serve(Trl)
