"""RunningBatch: the persistent inputs of a step, one row for each running request.

    row  tokens                            num_tokens  num_computed  block_table   temperature …
     0   | prompt ...... | output .. |             41            40   [7 3 9]      1.0
     1   (free)
     2   | prompt .. |                             17             0   [7 4]        0.7
         ^ logprobs and sampling_logprobs lie at their token's position, beside it

A step reads columns and writes single elements; a row is written whole only when its request comes,
and handed back when it leaves. So a step of decodes makes no Python object per token or request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.request import Request
from rollout.step_plan import IntColumn


class RunningBatch:
    """Columns of at most `max_batch_size` requests of at most `max_total_tokens` tokens each.

    Rows keep their place while a request runs; what a free row holds means nothing. The scheduler
    alone changes columns; memory of long rows is taken from the system when first written.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_total_tokens: int,
        block_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        rows, width = max_batch_size, max_total_tokens
        self.max_batch_size = rows
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * rows
        self.tokens = np.zeros((rows, width), np.int32)
        self.logprobs = np.zeros((rows, width), np.float32)
        self.sampling_logprobs = np.zeros((rows, width), np.float32)
        self.block_table = np.zeros((rows, -(-width // block_size)), np.int64)
        self.num_prompt_tokens = np.zeros(rows, np.int64)
        self.num_tokens = np.zeros(rows, np.int64)
        self.num_computed = np.zeros(rows, np.int64)
        self.stop_length = np.zeros(rows, np.int64)  # tokens at which the request ends by length
        self.num_slots = np.zeros(rows, np.int64)  # tokens its blocks have room for
        self.publish_at = np.zeros(rows, np.int64)  # tokens at which a block has a key to get
        self.version = np.zeros(rows, np.int64)  # of the last span; -1 before the first
        self.arrived = np.zeros(rows, np.float64)  # seconds on the monotonic clock
        self.noise_keys = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)  # 1.0 for greedy rows
        self.greedy = np.zeros(rows, np.bool_)
        self.top_p = np.zeros(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows, np.float64)
        self.num_top = np.zeros(rows, np.int64)  # best tokens asked for beside the sampled one
        self.filtered = np.zeros(rows, np.bool_)
        self.edited = np.zeros(rows, np.bool_)
        self.watched = np.zeros(rows, np.bool_)  # the text of every token is looked at
        self.scored = np.zeros(rows, np.bool_)  # log-probs of the prompt are asked for
        self._eos_token_ids = eos_token_ids
        self._own_stop_ids: Counter[int] = Counter()
        self.stop_ids: IntColumn = np.empty(0, np.int64)  # any that may end some running request
        self._free: list[int] = []
        self.clear()

    def __len__(self) -> int:
        return self.max_batch_size - len(self._free)

    def add(self, request: Request, num_computed: int) -> int:
        """Give the request a row and write all of it but the blocks; returns the row."""
        row = self._free.pop()
        params, tokens = request.params, request.tokens
        prompt, total = request.num_prompt_tokens, len(tokens)
        self.tokens[row, :total] = tokens
        self.logprobs[row, prompt:total] = request.logprobs
        self.sampling_logprobs[row, prompt:total] = request.sampling_logprobs
        self.num_prompt_tokens[row] = prompt
        self.num_tokens[row] = total
        self.num_computed[row] = num_computed
        self.stop_length[row] = request.max_total_tokens
        self.num_slots[row] = 0
        self.version[row] = request.spans[-1][0] if request.spans else -1
        self.arrived[row] = request.arrived
        self.noise_keys[row] = request.noise_key
        self.temperature[row] = params.temperature or 1.0
        self.greedy[row] = params.greedy
        self.top_p[row], self.top_k[row], self.min_p[row] = params.top_p, params.top_k, params.min_p
        self.filtered[row] = params.filters and not params.greedy
        self.num_top[row] = params.logprobs or 0
        self.edited[row] = request.edits is not None
        self.watched[row] = request.detokenizer is not None
        self.scored[row] = request.prompt_scores is not None
        if params.stop_token_ids:
            self._own_stop_ids.update(params.stop_token_ids)
            self._collect_stop_ids()
        self.requests[row] = request
        request.row = row
        return row

    def remove(self, request: Request) -> None:
        """Take the row back; its tokens and log-probs go to the request."""
        row = request.row
        assert row is not None
        self._hand_back(request, row)
        self.requests[row] = None
        for column in (self.filtered, self.edited, self.watched, self.scored):
            column[row] = False
        self._free.append(row)
        if request.params.stop_token_ids:
            self._own_stop_ids.subtract(request.params.stop_token_ids)
            self._own_stop_ids += Counter()  # drops what nobody names any more
            self._collect_stop_ids()

    def clear(self) -> None:
        """Take all rows back, in whatever state an interrupted call has left this."""
        for row, request in enumerate(self.requests):
            if request is not None and request.row == row:
                self._hand_back(request, row)
        self.requests = [None] * self.max_batch_size
        self._free = list(range(self.max_batch_size - 1, -1, -1))
        for column in (self.filtered, self.edited, self.watched, self.scored):
            column[:] = False
        self._own_stop_ids.clear()
        self._collect_stop_ids()

    def _hand_back(self, request: Request, row: int) -> None:
        prompt, total = request.num_prompt_tokens, int(self.num_tokens[row])
        request.tokens = self.tokens[row, :total].copy()
        request.logprobs = self.logprobs[row, prompt:total].copy()
        request.sampling_logprobs = self.sampling_logprobs[row, prompt:total].copy()
        request.row = None

    def add_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        """Append blocks to the row's table."""
        held = int(self.num_slots[row]) // self.block_size
        self.block_table[row, held : held + len(block_ids)] = block_ids
        self.num_slots[row] = (held + len(block_ids)) * self.block_size

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def output(self, request: Request) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Output tokens and log-probs so far, wherever they lie: views, valid until it moves."""
        row, prompt = request.row, request.num_prompt_tokens
        if row is None:
            return request.tokens[prompt:], request.logprobs
        total = int(self.num_tokens[row])
        return self.tokens[row, prompt:total], self.logprobs[row, prompt:total]

    def _collect_stop_ids(self) -> None:
        ids = sorted(self._eos_token_ids.union(self._own_stop_ids))
        self.stop_ids = np.array(ids, np.int64)
