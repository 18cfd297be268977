"""The proof on whole workloads: what engines returned, scored again by the trainer, bit for bit.

    workload ─┬─► engine or actors, limits drawn at random ─► rollouts ─► score()   must be equal
              ├─► some of its prompts in other order, limits and threads           must be equal
              └─► stock operations on both sides, the control                      must differ

Limits are those a batch's company depends on: requests and tokens at once, chunks, block size, KV
memory (preemption), prefix cache, threads, packs of the trainer, number of actors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout import (
    Decoder,
    EngineConfig,
    Rollout,
    RolloutBatch,
    RolloutEngine,
    SamplingParams,
    load_pretrained,
)
from rollout.exactness import torch_threads
from trainer_bridge.colocation import Colocation
from trainer_bridge.scoring import score
from trainer_bridge.trainer_config import TrainerConfig

CONTROL_TOKENS = 2_000
LONGEST_PROMPT = 160
LONGEST_OUTPUT = 64
ROLLOUTS_PER_SCORE = 32
"""Most rollouts whose graphs are held at once."""


@dataclass(slots=True)
class Comparison:
    """Log-probs held against each other. `differing`: those that are not the same bits."""

    tokens: int = 0
    differing: int = 0
    max_difference: float = 0.0

    def add(self, left: NDArray[np.float32], right: NDArray[np.float32]) -> None:
        self.tokens += len(left)
        self.differing += int((left.view(np.int32) != right.view(np.int32)).sum())
        gaps = np.abs(left.astype(np.float64) - right)
        self.max_difference = max(self.max_difference, float(gaps.max(initial=0.0)))


@dataclass(slots=True)
class Proof:
    """What was compared. Reads as a paragraph with `str()`.

    scored: the rollouts' log-probs against the trainer's. repeated: against those of the same
    prompts and seeds under other settings; `other_tokens` of these were not even the same tokens.
    control: as `scored`, by stock operations. engines: sets of limits tried.
    """

    scored: Comparison = field(default_factory=Comparison)
    repeated: Comparison = field(default_factory=Comparison)
    control: Comparison = field(default_factory=Comparison)
    other_tokens: int = 0
    engines: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    threads: tuple[int, ...] = ()
    actors: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """Something was compared, and not one bit differed."""
        wrong = self.scored.differing + self.repeated.differing + self.other_tokens
        return self.scored.tokens > 0 and self.repeated.tokens > 0 and wrong == 0

    @property
    def conclusive(self) -> bool:
        """The control differed: this workload on this machine can tell."""
        return self.control.differing > 0

    def __str__(self) -> str:
        verdict = "held" if self.held else "DID NOT HOLD"
        if self.held and not self.conclusive:
            verdict = "NOT SHOWN: the control did not differ either"
        return "\n".join((
            f"scored by the trainer   {_line(self.scored)}",
            f"other settings          {_line(self.repeated)}"
            + (f"; {self.other_tokens:,} other tokens" if self.other_tokens else ""),
            f"control (mode off)      {_line(self.control)}",
            f"settings                {self.engines} engines, threads {_list(self.threads)}, "
            f"actors {_list(self.actors)}, {self.preemptions:,} preemptions, "
            f"{self.prefix_hit_tokens:,} prefix tokens hit",
            f"exactness               {verdict} ({self.seconds:.0f} s)",
        ))  # fmt: skip


def prove(
    model: str | Path | Decoder,
    *,
    tokens: int = 20_000,
    seed: int = 0,
    threads: Sequence[int] = (1, 2),
    actors: Sequence[int] = (1,),
    control_tokens: int = CONTROL_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> Proof:
    """Random rollouts of `model`, at least `tokens` of them, against the trainer's own log-probs.

    model: a Hugging Face folder or Hub id, or a `Decoder`, whose weights are not changed.
    threads: torch thread counts, chosen from anew for every rollout and every scoring. actors: 1 =
    an engine in this process; more = as many rollout actors over Ray, which needs a folder; the
    tokens are shared out among the counts. progress: called with the tokens compared so far.

    Neither raises nor returns early where bits differ: see `Proof.held` and `Proof.conclusive`.
    """
    if tokens < 1 or not threads or not actors or min(*threads, *actors, 1) < 1:
        raise ValueError("tokens, and every entry of threads and actors, must be at least 1")
    if isinstance(model, Decoder):
        folder, decoder = None, model
        if max(actors) > 1:
            raise ValueError("several actors load the model themselves; pass its folder")
    else:
        folder, decoder = Path(model), load_pretrained(str(model))[0]
        if max(actors) > 1 and not folder.is_dir():
            raise ValueError(f"several actors need a folder; {model} is none")
    started = time.monotonic()
    proof = Proof(threads=tuple(threads), actors=tuple(actors))
    with torch_threads(torch.get_num_threads()):
        prover = _Prover(decoder, random.Random(seed), proof)
        for index, count in enumerate(actors):
            goal = tokens * (index + 1) // len(actors)
            with ExitStack() as stack:
                run: Run = prover.in_process
                if count > 1:
                    assert folder is not None
                    run = stack.enter_context(prover.over_actors(folder, count))
                while proof.scored.tokens < goal:
                    prover.round(run)
                    if progress is not None:
                        progress(proof.scored.tokens)
        proof.control = _control(decoder, random.Random(seed), proof.threads, control_tokens)
    proof.seconds = time.monotonic() - started
    return proof


def _control(
    model: Decoder, rng: random.Random, threads: tuple[int, ...], tokens: int
) -> Comparison:
    """The same comparison with the mechanism off: stock operations on both sides."""
    exact, model.operators = model.operators, "stock"
    try:
        prover = _Prover(model, rng, Proof(threads=threads), attention="reference")
        while prover.proof.scored.tokens < tokens:
            prover.score(prover.in_process(prover.workload()))
        return prover.proof.scored
    finally:
        model.operators = exact


@dataclass(frozen=True, slots=True)
class _Workload:
    """Distinct prompts with seeds of their own, so that any part of them can be run again."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def part(self, indices: Sequence[int]) -> _Workload:
        return _Workload([self.prompts[i] for i in indices], [self.params[i] for i in indices])

    @property
    def longest(self) -> int:
        return max(
            len(prompt) + (params.max_tokens or 0)
            for prompt, params in zip(self.prompts, self.params, strict=True)
        )


Run = Callable[[_Workload], list[Rollout]]


class _Prover:
    """Draws workloads and settings, and fills the proof.

    Its engines run without the start-up probe: what that would refuse is for the proof to show.
    """

    def __init__(
        self, model: Decoder, rng: random.Random, proof: Proof, attention: str | None = None
    ) -> None:
        self.proof = proof
        self._model, self._rng, self._attention = model, rng, attention
        context = model.config.max_position_embeddings or 1 << 30
        self._longest_prompt = max(2, min(LONGEST_PROMPT, context // 2))
        self._longest_output = max(1, min(LONGEST_OUTPUT, context - self._longest_prompt))
        self._stems = [self._ids(self._longest_prompt // 2) for _ in range(3)]

    def round(self, run: Run) -> None:
        """One workload, scored; a part of it again, in another order and company."""
        workload = self.workload()
        found = run(workload)
        self.score(found)
        again = self._rng.sample(range(len(workload.prompts)), max(2, len(workload.prompts) // 4))
        repeated = self.in_process(workload.part(again), smallest_batch=1)
        by_prompt: dict[int, list[Rollout]] = {}
        for rollout in found:
            by_prompt.setdefault(rollout.prompt_index, []).append(rollout)
        before = [rollout for i in again for rollout in by_prompt[i]]
        for first, second in zip(before, repeated, strict=True):
            if first.token_ids != second.token_ids:
                self.proof.other_tokens += len(first.token_ids)
                continue
            self.proof.repeated.add(
                np.array(first.logprobs, np.float32), np.array(second.logprobs, np.float32)
            )

    def in_process(self, workload: _Workload, smallest_batch: int = 8) -> list[Rollout]:
        """One engine in this process, its limits drawn at random."""
        settings = self._settings(smallest_batch, workload.longest)
        torch.set_num_threads(self._rng.choice(self.proof.threads))
        engine = RolloutEngine(
            self._model, attention_backend=self._attention, exact=False, **settings
        )
        found: list[Rollout] = engine.run_batch(
            workload.prompts, workload.params, return_details=True
        )
        self._count_settings([engine.get_stats()])
        return found

    @contextmanager
    def over_actors(self, folder: Path, count: int) -> Iterator[Run]:
        """Rollout actors in processes of their own, on the weights that a trainer loaded."""
        settings = self._settings(8, self._longest_prompt + self._longest_output)
        threads = self._rng.choice(self.proof.threads)
        with Colocation(
            folder,
            rollout_actors=count,
            trainer=TrainerConfig(num_threads=self._rng.choice(self.proof.threads)),
            engine=EngineConfig(exact=False, num_threads=threads, **settings),
        ) as run:

            def run_batch(workload: _Workload) -> list[Rollout]:
                return list(run.pool.run_batch(workload.prompts, workload.params))

            yield run_batch
            self._count_settings(run.pool.get_stats())

    def _count_settings(self, stats: Sequence[dict[str, Any]]) -> None:
        self.proof.engines += 1
        self.proof.preemptions += sum(s["preemptions"] for s in stats)
        self.proof.prefix_hit_tokens += sum(s["prefix_hit_tokens"] for s in stats)

    def score(self, found: list[Rollout]) -> None:
        """The trainer's forward over the rollouts, in packs of any size, graphs and all."""
        torch.set_num_threads(self._rng.choice(self.proof.threads))
        start = 0
        while start < len(found):
            some = found[start : start + self._rng.randint(1, ROLLOUTS_PER_SCORE)]
            start += len(some)
            batch = RolloutBatch.from_rollouts(some)
            logprobs = score(
                self._model,
                batch,
                micro_batch_tokens=self._rng.choice([1, 200, 2048]),
                attention_backend=self._attention,
            )
            trainer = torch.cat([each.detach() for each in logprobs]).cpu().numpy()
            self.proof.scored.add(batch.logprobs, trainer)

    def workload(self) -> _Workload:
        """Groups and single samples; beginnings shared with others, now and in other rounds."""
        rng = self._rng
        prompts: dict[tuple[int, ...], SamplingParams] = {}
        for seed in range(rng.randint(8, 24)):
            stem = rng.choice([[], *self._stems])
            own = self._ids(rng.randint(1, self._longest_prompt - len(stem)))
            prompts[tuple(stem + own)] = SamplingParams(
                n=rng.choice([1, 2, 4, 8]),
                seed=seed,
                max_tokens=rng.randint(1, self._longest_output),
                temperature=rng.choice([1.0, 1.0, 0.7, 1.3]),
                ignore_eos=rng.random() < 0.5,
            )
        return _Workload([list(prompt) for prompt in prompts], list(prompts.values()))

    def _settings(self, smallest_batch: int, longest: int) -> dict[str, Any]:
        """Limits of an engine, for requests of at most `longest` tokens."""
        rng = self._rng
        batch = rng.choice([size for size in (1, 3, 8, 17, 64) if size >= smallest_batch])
        block_size = rng.choice([1, 8, 16, 32, 48])
        blocks = -(-longest // block_size)
        tight = rng.random() < 0.5  # so little KV memory that requests are preempted
        return {
            "max_batch_size": batch,
            "max_seq_len": longest,
            "max_num_batched_tokens": batch + rng.choice([0, 13, 100, 2048]),
            "enforce_eager": rng.random() < 0.25,
            "long_prefill_token_threshold": rng.choice([0, 0, 7, 64]),
            "block_size": block_size,
            "num_kv_blocks": blocks + rng.randint(1, 3 * blocks) if tight else None,
            "enable_prefix_caching": rng.random() < 0.75,
        }

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._model.config.vocab_size) for _ in range(count)]


def _line(comparison: Comparison) -> str:
    return (
        f"{comparison.tokens:>9,} tokens, {comparison.differing:,} differ, "
        f"max |Δ log-prob| {comparison.max_difference:.3g}"
    )


def _list(values: Sequence[int]) -> str:
    return " and ".join(map(str, values))
