"""Block tables of the running requests: match a cached prefix, grow, publish full blocks, free.

    token      0         16        32        48        64   70       80
               |---------|---------|---------|---------|----|--------|
    table      [  b7     |   b3    |   b9    |   b12   |     b5      ]
               '-- matched, may --''---- own, full: ---'''-- own, ---'
                   be shared           published            no key

A request writes KV only into its own blocks. A block is published when the step that fills it is
planned: whoever matches it later in the same plan reads it in a step that has written it by then.
Counts of tokens are totals from the start of the sequence, never increments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvcache.block import Block, BlockError
from kvcache.keys import TokenIds, child_key, root_key
from kvcache.pool import BlockPool
from kvcache.prefix_stats import PrefixCounters, PrefixStats
from kvcache.table import NEVER, BlockTable

RequestId = TypeVar("RequestId", bound=Hashable)

class BlockCopy(NamedTuple):
    """KV of the first num_tokens tokens of block `source` is needed in block `target` too."""

    source: int
    target: int
    num_tokens: int


class KVCacheManager(Generic[RequestId]):
    """Per-request block tables over a pool whose only holder it is. Not thread-safe.

    Life of a request: begin, then grow and publish for every step planned, then free. After
    a preemption it begins again. The token ids of one request only ever grow at their end.
    An unknown request id is a BlockError everywhere.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[RequestId, BlockTable] = {}
        self._counters = PrefixCounters()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that grow() can still take, those that cache old prefixes included."""
        return self.pool.num_available

    @property
    def max_tokens(self) -> int:
        """Tokens that one request alone could hold; one that needs more can never fit."""
        return self.pool.num_total * self.block_size

    @property
    def num_requests(self) -> int:
        return len(self._tables)

    def prefix_stats(self) -> dict[int, PrefixStats]:
        """Counters by policy version, a copy; the latest 64 versions are kept.

        A request counts once per admission: when it is forked, or at the first grow() that
        succeeds after its begin().
        """
        return self._counters.snapshot()

    def begin(
        self,
        request_id: RequestId,
        token_ids: TokenIds,
        policy_version: int,
        salt: str | None = None,
        *,
        match: bool = True,
    ) -> int:
        """Open a table and hold the longest cached prefix; the number of tokens it covers.

        That is whole blocks only, and less than len(token_ids): the last token must be computed
        for its logits. match=False, for whoever needs logits of every position, looks nothing up
        and is not counted, but publishes as others do. A sequence that cannot go on (see grow)
        should be freed again. A version above the live one becomes the live one (see
        advance_version). ValueError for no tokens or a retired version.
        """
        if request_id in self._tables:
            raise BlockError(f"request {request_id!r} has a block table already")
        num_tokens = len(token_ids)
        if num_tokens == 0:
            raise ValueError(f"token_ids of request {request_id!r} must not be empty")
        root = root_key(policy_version, salt)
        self.pool.advance_version(policy_version)
        is_caching = self.pool.enable_prefix_caching
        blocks: list[Block] = []
        keys: list[bytes] = []
        if is_caching and match:
            blocks, keys = self._match(root, token_ids)
            self.pool.retain(blocks)
        num_cached_tokens = len(blocks) * self.block_size
        self._tables[request_id] = BlockTable(
            root=root,
            policy_version=policy_version,
            num_query_tokens=num_tokens,
            blocks=blocks,
            block_ids=[block.block_id for block in blocks],
            keys=keys,
            num_matched=len(blocks),
            publish_at=num_cached_tokens + self.block_size if is_caching else NEVER,
            is_counted=not (is_caching and match),
        )
        return num_cached_tokens

    def fork(
        self,
        request_id: RequestId,
        source_id: RequestId,
        num_tokens: int,
        num_query_tokens: int,
    ) -> BlockCopy | None:
        """Open a table on the first num_tokens tokens of an open one: samples of one prompt.

        Full blocks are shared like matched ones; a rest of less than a block gets a block of its
        own. The caller copies the rest's KV there, as the result says, once it is computed and
        before it is read or the source's table is freed. None if no block can be taken for it, or
        the source has not published these blocks under the live version; nothing has changed then.
        num_query_tokens, the length of the prompt, is for the statistics.
        """
        source = self._table(source_id)
        if request_id in self._tables:
            raise BlockError(f"request {request_id!r} has a block table already")
        num_full, rest = divmod(num_tokens, self.block_size)
        is_live = source.policy_version == self.pool.policy_version
        if not is_live or source.publish_at == NEVER or len(source.keys) < num_full:
            return None
        if rest and not self.pool.num_available:
            return None
        shared = source.blocks[:num_full]
        self.pool.retain(shared)
        blocks = shared + (self.pool.take(1) if rest else [])
        table = BlockTable(
            root=source.root,
            policy_version=source.policy_version,
            num_query_tokens=num_query_tokens,
            blocks=blocks,
            block_ids=[block.block_id for block in blocks],
            keys=source.keys[:num_full],
            num_matched=num_full,
            publish_at=(num_full + 1) * self.block_size,
        )
        self._tables[request_id] = table
        self._count(table, num_tokens)
        if not rest:
            return BlockCopy(0, 0, 0)
        return BlockCopy(source.block_ids[num_full], table.block_ids[num_full], rest)

    def grow(self, request_id: RequestId, num_tokens: int) -> Sequence[int] | None:
        """Have room for num_tokens tokens in total; the ids of the blocks newly taken for that.

        They follow those that block_ids() gave before. Empty if there was room; never shrinks.
        None if more blocks are needed than can be taken; then nothing is taken and the table
        stands as before.
        """
        table = self._table(request_id)
        num_missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if num_missing <= 0:
            return ()
        if num_missing > self.pool.num_available:
            return None
        taken = self.pool.take(num_missing)
        taken_ids = [block.block_id for block in taken]
        table.blocks += taken
        table.block_ids += taken_ids
        if not table.is_counted:
            self._count(table, table.num_matched * self.block_size)
        return taken_ids

    def publish(self, request_id: RequestId, token_ids: TokenIds, num_tokens: int) -> int:
        """Make every full block among the first num_tokens tokens findable; incremental.

        Returns the number of tokens from which on a next call has something to do: NEVER after
        seal(), with caching off, and for a request begun under a version retired since. A call
        below that number does nothing.
        Call it when the step that computes token num_tokens - 1 is planned, after grow(). A token
        that was only sampled has no KV and must not be counted. token_ids begins with the tokens
        given to begin() and earlier calls; only its part since then is read.
        ValueError if num_tokens exceeds token_ids, BlockError if it exceeds the blocks held.
        """
        table = self._table(request_id)
        if table.policy_version < self.pool.policy_version:
            table.publish_at = NEVER
        if num_tokens < table.publish_at:
            return table.publish_at
        if num_tokens > len(token_ids):
            raise ValueError(
                f"num_tokens must be at most the {len(token_ids)} token_ids, got {num_tokens}"
            )
        num_full = num_tokens // self.block_size
        if num_full > len(table.blocks):
            raise BlockError(
                f"request {request_id!r} publishes {num_full} blocks, holds {len(table.blocks)}"
            )
        parent = table.keys[-1] if table.keys else table.root
        for index in range(len(table.keys), num_full):
            start = index * self.block_size
            parent = child_key(parent, token_ids[start : start + self.block_size])
            table.keys.append(parent)
            self.pool.publish(table.blocks[index], parent, table.policy_version)
        table.publish_at = (num_full + 1) * self.block_size
        return table.publish_at

    def unpublish_from(self, request_id: RequestId, num_tokens: int) -> None:
        """Take back what this request published beyond its first num_tokens tokens.

        For a planned step that was not computed: num_tokens is what was computed before it.
        Requests begun or forked for that step may hold such blocks, whose KV was never written:
        free them, and begin them again. Matched blocks are others' and stay.
        """
        table = self._table(request_id)
        first = max(num_tokens // self.block_size, table.num_matched)
        for block in table.blocks[first : len(table.keys)]:
            self.pool.unpublish(block)
        del table.keys[first:]
        if table.publish_at != NEVER:
            table.publish_at = (len(table.keys) + 1) * self.block_size

    def seal(self, request_id: RequestId) -> None:
        """From now on publish() does nothing for this request: later tokens are of other weights.

        What it published before stays: it was computed by the version it is keyed under.
        """
        self._table(request_id).publish_at = NEVER

    def free(self, request_id: RequestId) -> None:
        """Close the table and let go of its blocks, tail first, so that heads stay cached longest.

        Published blocks stay findable until evicted. If its last planned step was not computed,
        call unpublish_from() before.
        """
        table = self._table(request_id)
        del self._tables[request_id]
        self.pool.release(reversed(table.blocks))

    def advance_version(self, policy_version: int) -> None:
        """Make policy_version the live one and retire all below it; O(1), nothing is visited.

        No begin() can use or find the retired ones, and tables begun under them publish nothing
        more. Their blocks stay theirs until freed, then they are the next to be taken.
        The live version again: nothing happens. ValueError for a lower one.
        """
        self.pool.advance_version(policy_version)

    def block_ids(self, request_id: RequestId) -> Sequence[int]:
        """The request's block ids, head first: token t lies in entry t // block_size.

        It is the live list, for reading: it gets longer at grow(), never changes otherwise, and
        means nothing after free().
        """
        return self._table(request_id).block_ids

    def reset(self) -> None:
        """Forget all cached content; BlockError, with nothing changed, while a table is open."""
        if self._tables:
            raise BlockError(f"the cache cannot be reset with {len(self._tables)} tables open")
        self.pool.reset()

    def clear(self) -> None:
        """Close all tables and forget everything, after a call that was interrupted midway."""
        self._tables.clear()
        self.pool.clear()

    def check_integrity(self) -> None:
        """BlockError naming what is inconsistent, in the pool or between the tables and it."""
        self.pool.check_integrity()
        holders: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            holders.update(table.block_ids)
            fault = table.fault(self.block_size)
            if fault:
                raise BlockError(f"request {request_id!r}: {fault}")
        for block in self.pool.blocks:
            if block.ref_count != holders[block.block_id]:
                raise BlockError(f"{block}: {holders[block.block_id]} tables hold it")

    def _match(self, root: bytes, token_ids: TokenIds) -> tuple[list[Block], list[bytes]]:
        blocks: list[Block] = []
        keys: list[bytes] = []
        parent = root
        for end in range(self.block_size, len(token_ids), self.block_size):
            parent = child_key(parent, token_ids[end - self.block_size : end])
            block = self.pool.lookup(parent)
            if block is None:
                break
            blocks.append(block)
            keys.append(parent)
        return blocks, keys

    def _table(self, request_id: RequestId) -> BlockTable:
        try:
            return self._tables[request_id]
        except KeyError:
            raise BlockError(f"request {request_id!r} has no block table") from None

    def _count(self, table: BlockTable, num_hits: int) -> None:
        table.is_counted = True
        self._counters.add(table.policy_version, table.num_query_tokens, num_hits)
