"""RolloutEngine: batches of token ids in, tokens with log-probs and policy versions out.

The public face of this package. It lives on the weights it is given and never copies them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from attention import AttentionBackend
from kvcache import BlockPool, KVCacheManager
from kvcache.storage import KVStorage
from rollout.admission import Admission, AdmissionLimits
from rollout.construction import (
    ParameterAddresses,
    checked_device,
    checked_dtype,
    checked_length,
    kv_storage,
)
from rollout.core import IN_FLIGHT_MODES, EngineCore
from rollout.exactness import Exactness, settle
from rollout.model import Decoder, attention_for
from rollout.open_batch import OpenBatch
from rollout.policy import LocalGate, WeightGate
from rollout.request import PromptTask, Request, Rollout, prompt_tasks
from rollout.runner import ModelRunner
from rollout.running import RunningBatch
from rollout.sampling import SamplingParams, merged_params
from rollout.scheduler import Scheduler
from rollout.serving import Serving
from rollout.tasks import TaskBoard, TaskEvent, stream_events
from rollout.tokenizer import Tokenizer

T = TypeVar("T")


class RolloutEngine:
    """A continuous-batching engine on a live module.

    model: the `Decoder` the trainer mutates; parameters are read where they lie.
    tokenizer: its EOS ids end samples, and text in `SamplingParams` and tasks needs it; None takes
        the EOS ids of the model's config.
    max_batch_size: requests that run at once; more of them queue.
    max_seq_len: prompt + output tokens; None = the model's context length.
    device, dtype: checked against the parameters, never converted.
    cache: a `KVStorage` to use in place of one of the budget below.
    attention_backend: name, class or instance; an explicit choice is strict.
    policy_version: the version the weights have now.
    max_num_batched_tokens: token budget of one step; long prompts are computed in chunks.
    long_prefill_token_threshold: most tokens of one request in a step; 0 = the budget.
    num_kv_blocks, kv_cache_bytes: the KV budget, one of them; default: enough for
        `max_batch_size` full sequences, at most 2 GiB.
    run_seed: from which seeds are derived for prompts whose `seed` is None.
    exact: True = log-probs bit for bit the trainer's, proved by a start-up probe or refused
        (`ExactnessRefused`); None = on where the kernels claim it, a CPU in fp32; False = no probe.
        `exactness` says what was settled.
    enforce_eager: whether Python runs the module in every step. Otherwise small steps on the native
        kernels are recorded once and replayed, with the same bits (`recorded.py`).
    in_flight: what becomes of running requests when another process publishes: "recompute" (drop
        their KV, go on under the new weights) or "keep" (go on with old KV, never shared again).
    gate: who guards the weights; None = this process alone (`LocalGate`).

    Thread-safe: batches, tasks and updates of any thread are served by one scheduler, one step at
    a time.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        max_batch_size: int = 64,
        max_seq_len: int | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        cache: KVStorage | None = None,
        attention_backend: str | type[AttentionBackend] | AttentionBackend | None = None,
        enable_cuda_graph: bool = False,
        policy_version: int = 0,
        max_num_batched_tokens: int = 2048,
        long_prefill_token_threshold: int = 0,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        run_seed: int = 0,
        exact: bool | None = None,
        enforce_eager: bool = False,
        in_flight: str = "recompute",
        gate: WeightGate | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = checked_device(model, device)
        self.dtype = checked_dtype(model, dtype)
        if enable_cuda_graph:
            raise ValueError(
                f"enable_cuda_graph=True, but no backend captures graphs on {self.device}; "
                "leave it at False"
            )
        if in_flight not in ("recompute", "keep"):
            raise ValueError(f"in_flight must be 'recompute' or 'keep', got {in_flight!r}")
        self.cuda_graph_enabled = False
        self.max_seq_len = checked_length(model, max_seq_len)
        eos = tokenizer.eos_token_ids if tokenizer is not None else model.config.eos_token_ids
        self.eos_token_ids = frozenset(eos)
        self._backend = attention_for(model, attention_backend)
        self._gate: WeightGate = gate if gate is not None else LocalGate(policy_version)
        storage = kv_storage(
            model,
            cache,
            block_size=block_size,
            max_batch_size=max_batch_size,
            max_seq_len=self.max_seq_len,
            num_kv_blocks=num_kv_blocks,
            kv_cache_bytes=kv_cache_bytes,
        )
        self._kv: KVCacheManager[int] = KVCacheManager(
            BlockPool(storage.num_blocks, enable_prefix_caching), storage.block_size
        )
        limits = AdmissionLimits(
            self.max_seq_len, model.config.vocab_size, self._kv.max_tokens, tokenizer is not None
        )
        self._admission = Admission(limits, tokenizer, self.eos_token_ids)
        batch = RunningBatch(
            max_batch_size, limits.max_total_tokens, storage.block_size, self.eos_token_ids
        )
        self._scheduler = Scheduler(
            self._kv,
            batch,
            max(max_num_batched_tokens, max_batch_size),
            self.eos_token_ids,
            long_prefill_token_threshold,
        )
        self._board = TaskBoard(self._scheduler)
        self._core = EngineCore(
            self._scheduler,
            ModelRunner(model, storage, self._backend, enforce_eager),
            self._kv,
            storage,
            self._gate,
            ParameterAddresses(model).check,
            self._board.deliver,
            keeps_in_flight=in_flight == "keep",
        )
        self._serving = Serving(self._core, self._board)
        self._exact = exact
        self.exactness = self.probe()[1]
        self._run_seed = run_seed
        self._next_uid = 0

    @property
    def policy_version(self) -> int:
        """The live policy version."""
        return self._gate.version

    @property
    def gate(self) -> WeightGate:
        """Who guards the weights."""
        return self._gate

    @property
    def backend_name(self) -> str:
        return self._backend.name

    # ---------------------------------------------------------------- batches

    def run_batch(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_logprobs: bool = False,
        return_details: bool = False,
        **fields: Any,
    ) -> list[Any]:
        """Sample every prompt; flat results in the order of the prompts, `n` for each.

        prompts: token ids. params: one for all, or one per prompt; `fields` (`max_tokens`,
        `temperature`, …) override single fields; an unknown one is a TypeError. Returns token id
        lists; with `return_logprobs` pairs `(token_ids, logprobs)`; with `return_details` full
        `Rollout`s. A bad prompt fails alone: it comes back empty, with the reason in its
        `Rollout`. Prompts beyond `max_batch_size`, or beyond the KV that fits, queue.

        An exception (or Ctrl-C) frees all KV this call holds and leaves the engine usable.
        """
        rollouts = self.run_tasks(self._prompt_tasks(prompts, params, fields))
        if return_details:
            return rollouts
        if return_logprobs:
            return [(r.token_ids, r.logprobs) for r in rollouts]
        return [r.token_ids for r in rollouts]

    def run_tasks(self, tasks: Sequence[PromptTask]) -> list[Rollout]:
        """`run_batch` for prompts whose seeds are settled (see `prompt_tasks`)."""
        batch = self.open_batch(tasks)
        batch.compute()
        return batch.take_rest()

    def open_batch(self, tasks: Sequence[PromptTask]) -> OpenBatch:
        """`run_tasks` in parts: one thread calls `compute()`, another takes what has ended.

        The tasks' `prompt_index`es must differ. Nothing is queued before `compute()`.
        """
        return OpenBatch(self._requests(tasks), self._core.run, self._core.abort)

    def _prompt_tasks(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        fields: dict[str, Any],
    ) -> list[PromptTask]:
        settled, prompts = merged_params(params, fields), list(prompts)
        with self._core.lock:
            tasks = prompt_tasks(prompts, settled, self._run_seed, self._next_uid)
            self._next_uid += len(tasks)
        return tasks

    def _requests(self, tasks: Sequence[PromptTask]) -> list[Request]:
        with self._core.lock:
            return self._admission.requests(tasks)

    # ---------------------------------------------------------------- streaming

    def add_task(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        *,
        callback: Callable[[TaskEvent], None],
        **fields: Any,
    ) -> int:
        """Queue one prompt whose tokens are handed to `callback` as they come; the task's id.

        prompt: token ids, or text (then events carry text). The serving loop computes it once it
        is started. `callback` runs on the thread that made the progress and must not block; it may
        be called before this returns, for a prompt that is rejected. If it raises, its task ends
        with `callback_failed` and nobody else is touched. Exactly one event is `finished`, and
        none follows it.
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable, got {type(callback).__name__}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "a prompt of text needs a tokenizer; build the engine with one or pass ids"
                )
            prompt = self.tokenizer.encode(prompt, add_special_tokens=True)
            fields = {"detokenize": True, **fields}
        tasks = self._prompt_tasks([prompt], params, fields)
        with self._core.lock:
            requests = self._requests(tasks)
            self._core.submit(requests)
            task_id = self._board.open(requests, callback)
            self._board.deliver(requests)
        self._serving.wake()
        return task_id

    def cancel_task(self, task_id: int) -> bool:
        """End a waiting or running task as `aborted`, tokens kept; False if it had ended.

        Its last event is delivered before this returns, and no token comes after.
        """
        with self._core.lock:
            requests = self._board.requests(task_id)
            self._core.abort(requests)
            return bool(requests)

    remove_task = cancel_task

    async def stream(
        self, prompt: Sequence[int] | str, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[TaskEvent]:
        """The events of one task, for `async for`; leaving the loop early cancels the task.

        RuntimeError if the serving loop is not started: nobody would compute it.
        """
        if not self._serving.alive:
            raise RuntimeError("stream() needs the serving loop; call engine.start() first")
        add = functools.partial(self.add_task, prompt, params, **fields)
        async for event in stream_events(add, self.cancel_task):
            yield event

    def start(self) -> None:
        """Start the serving loop, which computes tasks in the background.

        Waits for a weight update that runs. RuntimeError if a loop runs already, also one that
        `stop` could not wait for; `EngineReleased` while the KV memory is released.
        """
        self._serving.start()

    def stop(self, timeout_s: float | None = 30.0, *, drain: bool = False) -> bool:
        """End the serving loop after its present step, or with `drain` when all is computed.

        True once it has ended: tasks that are left end as `aborted`. False if it has not within
        the time, or if the loop itself asks, in a callback: then it keeps running to that end with
        all it holds, and `stop` may be called again.
        """
        return self._serving.stop(timeout_s, drain)

    def pause(self) -> None:
        """No step runs once this returns, nor before `resume`; batches and tasks wait."""
        self._core.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._core.resume()
        self._serving.wake()

    # ---------------------------------------------------------------- policy versions

    def update_weights(self, version: int) -> int:
        """Acknowledge weights already changed in place as `version`; returns the live version.

        The live version again is a no-op; a lower one is a ValueError. Every prefix cached under
        an older version becomes unreachable.
        """
        if version == self.policy_version and not isinstance(version, bool):
            self._core.raise_if_poisoned()
            return version
        self.apply_weight_update(version, _nothing)
        return self.policy_version

    def apply_weight_update(
        self,
        version: int | None,
        update: Callable[..., T],
        *,
        in_flight: str = "refuse",
    ) -> T:
        """Mutate the weights in place and publish them, as one atomic act.

        version: None = live + 1; an explicit one must be greater than the live one (ValueError).
        update: called once, alone; it gets the target version if it has a parameter named
        `policy_version`. Returns what it returns. If it raises, the engine is poisoned
        (`PoisonedWeights`) until `recover()`, and the number is burnt.

        in_flight decides over requests queued or running: "refuse" (RuntimeError), "drain" (finish
        them first), "abort" (end them, tokens kept), "recompute" (drop their KV, go on under the
        new weights) or "keep" (go on with old KV, which is never shared again).
        """
        if not callable(update):
            raise TypeError(f"update must be callable, got {type(update).__name__}")
        if in_flight not in IN_FLIGHT_MODES:
            raise ValueError(f"in_flight must be one of {IN_FLIGHT_MODES}, got {in_flight!r}")
        takes_version = _takes_policy_version(update)
        return self._core.apply_weight_update(
            version,
            lambda target: update(policy_version=target) if takes_version else update(),
            in_flight,
        )

    def with_policy_snapshot(self, fn: Callable[[int], T]) -> T:
        """Run `fn(version)` while the version cannot change; an update inside it is refused.

        `fn` may run batches; those of other threads, and tasks, wait for it, so it must not wait
        for them.
        """
        return self._core.snapshot(fn)

    def recover(self, reload: Callable[[], None] | None = None) -> int:
        """Leave the poisoned state after `reload` has rewritten every weight; new version."""
        return self._core.recover(reload)

    def probe(self) -> tuple[int, Exactness]:
        """Settle and prove the mode again, on the weights as they are now: their version, and what
        was found. `ExactnessRefused` where it does not hold."""
        if self._exact is False:  # nothing is read
            return self.policy_version, settle(False, self.model, self._backend)
        return self._core.snapshot(
            lambda version: (version, settle(self._exact, self.model, self._backend))
        )

    # ---------------------------------------------------------------- KV memory

    def release(self, *, in_flight: str = "refuse") -> None:
        """Give the KV memory back to the system between phases; idempotent.

        All cached prefixes go. Until `restore`, rollouts and tasks raise `EngineReleased`; weight
        updates and statistics work. in_flight as in `apply_weight_update`, without "keep":
        with "recompute" running tasks wait for `restore`.
        """
        if in_flight not in IN_FLIGHT_MODES or in_flight == "keep":
            raise ValueError(
                f"in_flight must be 'refuse', 'drain', 'abort' or 'recompute', got {in_flight!r}"
            )
        self._core.release(in_flight)

    def restore(self) -> None:
        """Take KV memory again after `release`; idempotent. Rollouts are what they were before."""
        self._core.restore()
        self._serving.wake()

    # ---------------------------------------------------------------- observation

    def get_stats(self) -> dict[str, Any]:
        """Counters and gauges, callable from any thread at any time. See `EngineMetrics`."""
        stats = self._core.metrics.snapshot(self._scheduler, self._kv, self.policy_version)
        return {**stats, "kv_released": self._core.released}

    def check_integrity(self) -> None:
        """Raise if the block bookkeeping contradicts itself (used by tests, cheap)."""
        with self._core.lock:
            self._kv.check_integrity()


def _nothing() -> None:
    """The weights were changed before; only the version moves."""


def _takes_policy_version(update: Callable[..., Any]) -> bool:
    try:
        return "policy_version" in inspect.signature(update).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
