"""RolloutEngine: batches of token ids in, tokens with log-probs and policy versions out.

The public face of this package. It lives on the weights it is given and never copies them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from attention import AttentionBackend, select_backend
from kvcache import BlockPool, KVCacheManager
from kvcache.storage import KVShape, KVStorage, num_blocks
from rollout.admission import AdmissionLimits
from rollout.fair_lock import FairLock
from rollout.metrics import EngineMetrics
from rollout.model import Decoder
from rollout.policy import LocalGate, ParameterLeftArena, WeightGate
from rollout.request import PromptTask, Request, Rollout, prompt_tasks
from rollout.runner import ModelRunner
from rollout.sampling import SamplingParams, checked_fields
from rollout.scheduler import Scheduler
from rollout.tokenizer import Tokenizer

T = TypeVar("T")

IN_FLIGHT_MODES = ("refuse", "drain", "abort", "recompute", "keep")


class RolloutEngine:
    """A continuous-batching engine on a live module.

    model: the `Decoder` the trainer mutates; parameters are read where they lie.
    tokenizer: only its EOS ids are used; None takes those of the model's config.
    max_batch_size: requests that run at once; more of them queue.
    max_seq_len: prompt + output tokens; None = the model's context length.
    device, dtype: checked against the parameters, never converted.
    attention_backend: name, class or instance; an explicit choice is strict.
    policy_version: the version the weights have now.
    max_num_batched_tokens: token budget of one step; long prompts are computed in chunks.
    num_kv_blocks, kv_cache_bytes: the KV budget, one of them; default: enough for
        `max_batch_size` full sequences, at most 2 GiB.
    run_seed: from which seeds are derived for prompts whose `seed` is None.
    gate: who guards the weights; None = this process alone (`LocalGate`).

    Thread-safe: concurrent `run_batch` calls are served by one scheduler, one step at a time.
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
        attention_backend: str | type[AttentionBackend] | AttentionBackend | None = None,
        enable_cuda_graph: bool = False,
        policy_version: int = 0,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        run_seed: int = 0,
        gate: WeightGate | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = _checked_device(model, device)
        self.dtype = _checked_dtype(model, dtype)
        if enable_cuda_graph:
            raise ValueError(
                f"enable_cuda_graph=True, but no backend captures graphs on {self.device}; "
                "leave it at False"
            )
        self.cuda_graph_enabled = False
        self.max_seq_len = max_seq_len or model.config.max_position_embeddings
        if not self.max_seq_len:
            raise ValueError(
                "max_seq_len is not given and the model's config has no context length; pass one"
            )
        if self.max_seq_len > model.config.max_position_embeddings > 0:
            raise ValueError(
                f"max_seq_len={self.max_seq_len} exceeds the model's context length "
                f"{model.config.max_position_embeddings}"
            )
        eos = tokenizer.eos_token_ids if tokenizer is not None else model.config.eos_token_ids
        self.eos_token_ids = frozenset(eos)
        self._backend = select_backend(attention_backend)
        self._gate: WeightGate = gate if gate is not None else LocalGate(policy_version)
        self._shape = KVShape(
            model.config.num_hidden_layers,
            model.config.num_key_value_heads,
            model.config.head_dim,
            block_size,
            self.dtype,
        )
        blocks = num_blocks(
            self._shape, max_batch_size, self.max_seq_len, num_kv_blocks, kv_cache_bytes
        )
        self._storage = KVStorage(self._shape, blocks, self.device)
        self._pool = BlockPool(blocks, enable_prefix_caching)
        self._kv: KVCacheManager[int] = KVCacheManager(self._pool, block_size)
        self._scheduler = Scheduler(
            self._kv, max_batch_size, max(max_num_batched_tokens, max_batch_size),
            self.eos_token_ids,
        )
        self._limits = AdmissionLimits(
            self.max_seq_len, model.config.vocab_size, self._kv.max_tokens
        )
        self._runner = ModelRunner(model, self._storage, self._backend, self.eos_token_ids)
        self._metrics = EngineMetrics()
        self._addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        self._lock = FairLock()  # guards everything below and all scheduling
        self._planned_version = self._gate.version
        self._run_seed = run_seed
        self._next_uid = 0
        self._next_request_id = 0

    @property
    def policy_version(self) -> int:
        """The live policy version."""
        return self._gate.version

    @property
    def backend_name(self) -> str:
        return self._backend.name

    # ---------------------------------------------------------------- rollouts

    def run_batch(
        self,
        prompts: Sequence[Sequence[int]],
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
        params = _merged(params, checked_fields(fields))
        with self._lock:
            tasks = prompt_tasks(prompts, params, self._run_seed, self._next_uid)
            self._next_uid += len(tasks)
        rollouts = self.run_tasks(tasks)
        if return_details:
            return rollouts
        if return_logprobs:
            return [(r.token_ids, r.logprobs) for r in rollouts]
        return [r.token_ids for r in rollouts]

    def run_tasks(self, tasks: Sequence[PromptTask]) -> list[Rollout]:
        """`run_batch` for prompts whose seeds are settled (see `prompt_tasks`)."""
        requests = self._enqueue(tasks)
        try:
            while True:
                with self._lock:
                    if all(r.finished for r in requests):
                        break
                    self._step()
        except BaseException:
            with self._lock:
                self._scheduler.abort(requests)
            raise
        return [r.result() for r in requests]

    def _enqueue(self, tasks: Sequence[PromptTask]) -> list[Request]:
        with self._lock:
            requests = []
            for task in tasks:
                problem = self._limits.problem(task)
                for sample in range(task.params.n):
                    request = Request(self._next_request_id, task, sample)
                    self._next_request_id += 1
                    requests.append(request)
                    if problem is not None:
                        self._scheduler.reject(request, *problem)
                        continue
                    request.max_total_tokens = self._limits.max_total_tokens
                    self._scheduler.add(request)
            return requests

    def _step(self) -> None:
        """One step of whatever is queued. The weights are held still from plan to commit."""
        if not self._scheduler.has_work:
            return
        with self._gate.read() as version:
            if version != self._planned_version:
                # Published while requests were running: their KV is of another policy.
                self._scheduler.requeue_running()
                self._enter_version(version)
            plan = self._scheduler.plan(version)
            try:
                sampled = self._runner.execute(plan, self._kv)
            except BaseException:
                self._scheduler.abandon(plan)
                raise
        ended = self._scheduler.commit(plan, sampled, version)
        self._metrics.count_step(plan, sampled, ended)

    # ---------------------------------------------------------------- policy versions

    def update_weights(self, version: int) -> int:
        """Acknowledge weights already changed in place as `version`; returns the live version.

        The live version again is a no-op; a lower one is a ValueError. Every prefix cached under
        an older version becomes unreachable.
        """
        if version == self.policy_version and not isinstance(version, bool):
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
        with self._lock:
            self._settle(in_flight)
            result = self._gate.write(
                version,
                lambda target: update(policy_version=target) if takes_version else update(),
                self._check_addresses,
            )
            if in_flight == "keep":
                self._scheduler.seal_running()
            else:
                self._scheduler.requeue_running()
            self._enter_version(self._gate.version)
            return result

    def _enter_version(self, version: int) -> None:
        """From here on plan under `version`; every key of an older one is taken back."""
        self._kv.unpublish_older(version)
        self._planned_version = version

    def _settle(self, in_flight: str) -> None:
        if not self._scheduler.has_work:
            return
        if in_flight == "refuse":
            raise RuntimeError(
                f"{len(self._scheduler.running)} requests run and {len(self._scheduler.waiting)} "
                "wait; finish them, or pass in_flight='drain', 'abort', 'recompute' or 'keep'"
            )
        if in_flight == "drain":
            while self._scheduler.has_work:
                self._step()
        elif in_flight == "abort":
            self._scheduler.abort([*self._scheduler.running, *self._scheduler.waiting])

    def with_policy_snapshot(self, fn: Callable[[int], T]) -> T:
        """Run `fn(version)` while the version cannot change; an update inside it is refused."""
        with self._gate.read() as version:
            return fn(version)

    def recover(self, reload: Callable[[], None] | None = None) -> int:
        """Leave the poisoned state after `reload` has rewritten every weight; new version."""
        with self._lock:
            version = self._gate.recover(reload)
            if version != self._planned_version:
                self._scheduler.requeue_running()
                self._enter_version(version)
            return version

    def _check_addresses(self) -> None:
        """Every parameter still lies where it lay when the engine was built."""
        for name, parameter in self.model.named_parameters():
            if parameter.data_ptr() != self._addresses.get(name):
                raise ParameterLeftArena(
                    f"parameter {name!r} no longer lies where the engine reads it: its data was "
                    "re-bound (`.data = …`, `load_state_dict(assign=True)`, `.to(…)`, "
                    "`vector_to_parameters`). Copy into it in place instead: p.copy_(new)"
                )

    # ---------------------------------------------------------------- observation

    def get_stats(self) -> dict[str, Any]:
        """Counters and gauges, callable from any thread at any time. See `EngineMetrics`."""
        return self._metrics.snapshot(self._scheduler, self._kv, self.policy_version)

    def check_integrity(self) -> None:
        """Raise if the block bookkeeping contradicts itself (used by tests, cheap)."""
        with self._lock:
            self._kv.check_integrity()


def _nothing() -> None:
    """The weights were changed before; only the version moves."""


def _takes_policy_version(update: Callable[..., Any]) -> bool:
    try:
        return "policy_version" in inspect.signature(update).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def _merged(
    params: SamplingParams | Sequence[SamplingParams] | None, fields: dict[str, Any]
) -> SamplingParams | list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return dataclasses.replace(params, **fields)
    return [dataclasses.replace(p, **fields) for p in params]


def _checked_device(model: Decoder, device: str | torch.device | None) -> torch.device:
    own = next(model.parameters()).device
    if device is not None and torch.device(device).type != own.type:
        raise ValueError(
            f"device={device!s}, but the model's parameters lie on {own}; "
            "load the model onto that device first"
        )
    return own


def _checked_dtype(model: Decoder, dtype: torch.dtype | None) -> torch.dtype:
    own = next(model.parameters()).dtype
    if dtype is not None and dtype != own:
        raise ValueError(f"dtype={dtype}, but the model's parameters are {own}; load it so")
    return own
