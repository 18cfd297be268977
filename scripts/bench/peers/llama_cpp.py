"""llama.cpp on F32 weights and an F32 cache, through llama-cpp-python's low-level batches.

`Llama.__call__` serves one sequence, so the loop is here: what all prompts begin with is computed
once, each prompt once for its group (`llama_memory_seq_cp`), up to `max_batch` samples decode
together, and a place that becomes free is taken by the next sample. Tokens are drawn and scored in
NumPy. Whether the cache is one for all sequences, and flash attention, are searched.

    sequence   0 … max_batch - 1      running samples
               then `PREPARED`        prompts of groups that still have samples to start
               then one               the common beginning of all prompts
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from scripts.bench.peers.draw import draw
from scripts.bench.peers.protocol import Job, Operation, serve
from scripts.bench.workloads import Group, Sample

PREPARED = 8
"""Prompts computed in one call, and kept, at most."""
TOKENS_PER_PASS = 512


class Batch:
    """A `llama_batch` over arrays of its own; one sequence for each token."""

    def __init__(self, capacity: int) -> None:
        self._token, self._position, self._sequence = np.zeros((3, capacity), np.int32)
        self._wanted = np.zeros(capacity, np.int8)
        self._count = np.ones(capacity, np.int32)
        self._places = self._sequence.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        int32, int8 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self._struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(int32),
            pos=self._position.ctypes.data_as(int32),
            n_seq_id=self._count.ctypes.data_as(int32),
            seq_id=self._places.ctypes.data_as(ctypes.POINTER(int32)),
            logits=self._wanted.ctypes.data_as(int8),
        )

    def clear(self) -> None:
        self._struct.n_tokens = 0

    def add(self, sequence: int, tokens: Sequence[int], position: int, scored: bool) -> None:
        """Tokens of one sequence from `position` on; scored: the last one's logits are wanted."""
        start = self._struct.n_tokens
        stop = self._struct.n_tokens = start + len(tokens)
        self._token[start:stop] = tokens
        self._position[start:stop] = np.arange(position, position + len(tokens))
        self._sequence[start:stop] = sequence
        self._wanted[start:stop] = 0
        self._wanted[stop - 1] = scored

    def decode(self, context: int) -> None:
        """Compute it. RuntimeError if llama.cpp refuses."""
        code = llama_cpp.llama_decode(context, self._struct)
        if code != 0:
            raise RuntimeError(
                f"llama_decode returned {code} for {self._struct.n_tokens} tokens; "
                "1 means that the cache has no room"
            )


@dataclass(slots=True)
class Running:
    """One sample in its place. `length` tokens lie before the one to be computed next."""

    sample: int
    wanted: int
    length: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, token: int, logprob: float) -> None:
        self.tokens.append(int(token))
        self.logprobs.append(float(logprob))


@dataclass(slots=True)
class Prepared:
    """A prompt whose keys and values lie in `sequence`; samples not yet started."""

    sequence: int
    prompt_length: int
    logits: NDArray[np.float32]
    waiting: deque[tuple[int, int]]
    """(index of the sample, its tokens)"""


class LlamaCpp:
    """One model and one context, kept for all runs."""

    def __init__(self, job: Job) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.operations: dict[str, Operation] = {}
        self._places = job.max_batch
        self._prefix_sequence = job.max_batch + PREPARED
        self._model = llama_cpp.llama_model_load_from_file(
            job.gguf.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {job.gguf}; its log says why")
        sequences = self._prefix_sequence + 1
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * -(-job.max_seq_len // 256) * 256
        params.n_batch = PREPARED * job.max_seq_len
        params.n_ubatch = TOKENS_PER_PASS
        params.n_outputs_max = max(job.max_batch, sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = job.threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.kv_unified = job.settings["kv_unified"]
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if job.settings["flash_attention"]
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context with these settings; its log says why")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = Batch(params.n_batch)
        self._rng = np.random.default_rng(0)

    def run(self, groups: Sequence[Group]) -> list[Sample]:
        llama_cpp.llama_memory_clear(self._memory, False)
        prefix = self._common_prefix([group.prompt for group in groups])
        first = np.cumsum([0, *(len(group.max_tokens) for group in groups)])
        queue = deque(
            (group, deque((first[index] + i, n) for i, n in enumerate(group.max_tokens)))
            for index, group in enumerate(groups)
        )
        prepared: deque[Prepared] = deque()
        free = deque(range(self._places))
        running: dict[int, Running] = {}
        samples: dict[int, Sample] = {}
        while queue or prepared or running:
            while free and (prepared or queue):
                if not prepared:
                    prepared = self._prepare(queue, prefix, len(free))
                self._start(prepared, free, running)
            self._finish(running, free, samples)
            if running:
                self._step(running)
        return [samples[index] for index in range(len(samples))]

    def _common_prefix(self, prompts: Sequence[Sequence[int]]) -> int:
        """Compute what all prompts begin with, short of any one's last token; its length."""
        shortest, longest = min(prompts), max(prompts)  # in the order of lists
        most = min(len(prompt) for prompt in prompts) - 1
        length = 0
        while length < most and shortest[length] == longest[length]:
            length += 1
        if length:
            self._batch.clear()
            self._batch.add(self._prefix_sequence, prompts[0][:length], 0, False)
            self._batch.decode(self._context)
        return length

    def _prepare(
        self, queue: deque[tuple[Group, deque[tuple[int, int]]]], prefix: int, places: int
    ) -> deque[Prepared]:
        """The prompts of the next groups, as many as the free places can use, in one call."""
        taken = []
        while queue and len(taken) < PREPARED and places > 0:
            taken.append(queue.popleft())
            places -= len(taken[-1][1])
        self._batch.clear()
        for index, (group, _) in enumerate(taken):
            sequence = self._places + index
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            if prefix:
                llama_cpp.llama_memory_seq_cp(
                    self._memory, self._prefix_sequence, sequence, -1, -1
                )
            self._batch.add(sequence, group.prompt[prefix:], prefix, True)
        self._batch.decode(self._context)
        logits = self._logits(len(taken)).copy()
        return deque(
            Prepared(self._places + index, len(group.prompt), logits[index], waiting)
            for index, (group, waiting) in enumerate(taken)
        )

    def _start(
        self, prepared: deque[Prepared], free: deque[int], running: dict[int, Running]
    ) -> None:
        """Samples of prepared groups into free places, each with its first token."""
        started, rows = [], []
        while free and prepared:
            group = prepared[0]
            sample, wanted = group.waiting.popleft()
            place = free.popleft()
            llama_cpp.llama_memory_seq_cp(self._memory, group.sequence, place, -1, -1)
            running[place] = Running(sample, wanted, group.prompt_length)
            started.append(running[place])
            rows.append(group.logits)
            if not group.waiting:
                prepared.popleft()
        for each, token, logprob in zip(started, *draw(np.stack(rows), self._rng), strict=True):
            each.take(token, logprob)

    def _finish(
        self, running: dict[int, Running], free: deque[int], samples: dict[int, Sample]
    ) -> None:
        """Places of samples that have all their tokens become free."""
        for place in [p for p, each in running.items() if len(each.tokens) == each.wanted]:
            done = running.pop(place)
            samples[done.sample] = Sample(done.tokens, done.logprobs)
            llama_cpp.llama_memory_seq_rm(self._memory, place, -1, -1)
            free.append(place)

    def _step(self, running: dict[int, Running]) -> None:
        """One more token for everyone."""
        self._batch.clear()
        places = sorted(running)
        for place in places:
            each = running[place]
            self._batch.add(place, each.tokens[-1:], each.length, True)
            each.length += 1
        self._batch.decode(self._context)
        tokens, logprobs = draw(self._logits(len(places)), self._rng)
        for place, token, logprob in zip(places, tokens, logprobs, strict=True):
            running[place].take(token, logprob)

    def _logits(self, rows: int) -> NDArray[np.float32]:
        """Logits `[rows, vocab]` of the last call's scored tokens; overwritten by the next call."""
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self._vocab_size))


if __name__ == "__main__":
    serve(LlamaCpp)
