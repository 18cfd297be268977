"""Lockstep itself: one `run_batch` call; the trainer's `score` as the judge of log-probs.

Beside "run" it knows "score" (log-probs of given tokens in one dense forward of the trainer's side)
and "profile" (one run with its time divided among the parts of a step).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rollout import RolloutBatch, RolloutEngine, SamplingParams
from rollout.model import Decoder, DecoderConfig
from rollout.model.checkpoint import load_weights
from scripts.bench.peers.protocol import Job, Operation, serve
from scripts.bench.peers.step_profile import profiled
from scripts.bench.workloads import Group, Sample, groups_from_json, requests
from trainer_bridge import score


class Lockstep:
    """The engine as the README shows it."""

    def __init__(self, job: Job) -> None:
        self.version = f"lockstep {importlib.metadata.version('lockstep-rl')}"
        self.operations: dict[str, Operation] = {"score": self._score, "profile": self._profile}
        torch.set_num_threads(job.threads)
        self._model = Decoder(DecoderConfig.from_folder(job.folder))
        load_weights(self._model, job.folder)
        self._engine = RolloutEngine(
            self._model,
            max_batch_size=job.max_batch,
            max_seq_len=job.max_seq_len,
            **job.settings,
        )

    def run(self, groups: Sequence[Group]) -> list[Sample]:
        wanted = requests(groups)
        params = [SamplingParams(n=r.n, max_tokens=r.max_tokens, ignore_eos=True) for r in wanted]
        rollouts = self._engine.run_batch([r.prompt for r in wanted], params, return_details=True)
        return [Sample(r.token_ids, r.logprobs) for r in rollouts]

    def _score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        batch = RolloutBatch.from_demonstrations([request["prompt"]], [request["token_ids"]])
        with torch.no_grad():
            (logprobs,) = score(self._model, batch, temperature=1.0)
        return {"logprobs": logprobs.tolist()}

    def _profile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        groups = groups_from_json(request["groups"])
        return asdict(profiled(self._engine, lambda: self.run(groups)))


if __name__ == "__main__":
    serve(Lockstep)
