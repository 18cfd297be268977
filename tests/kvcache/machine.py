"""Random lives of requests over a small pool, against a model of what the KV storage contains.

The model knows, for every block, which tokens under which version and salt its KV was computed
from, and in which order cached blocks were last used. Hypothesis plans steps, lets some fail,
preempts, frees, seals, changes versions under running requests and drops the storage; after every
operation the bookkeeping is consistent, every findable block contains what its key says, nothing
of older weights is found, and every running request reads the KV of its own tokens.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcache import (
    NEVER,
    BlockError,
    BlockPool,
    KVCacheManager,
    PrefixStats,
    TokenIds,
    block_keys,
    root_key,
)

Content = tuple[int, str | None, tuple[int, ...]]

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from([None, "salt"])
PROMPTS = st.tuples(TOKENS, SALTS, st.sampled_from([True, True, False]))


@dataclass
class Running:
    """The model of one open table."""

    tokens: list[int]
    version: int
    salt: str | None
    match: bool
    computed: int
    matched: int
    published: int  # blocks
    num_query_tokens: int = 0  # that the statistics do not know yet
    sealed: bool = False
    foreign: bool = False  # computed something under another version than its own


@dataclass
class Planned:
    """One request's part of a step."""

    request_id: int
    start: int
    end: int


class CacheMachine(RuleBasedStateMachine):
    pool_class: type[BlockPool] = BlockPool
    manager: KVCacheManager[int]

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.sampled_from([True, True, True, False]),
        as_array=st.booleans(),
    )
    def create(self, num_blocks: int, block_size: int, caching: bool, as_array: bool) -> None:
        self.manager = KVCacheManager(self.pool_class(num_blocks, caching), block_size)
        self.caching = caching
        self.as_array = as_array
        self.version = 0
        self.cached: list[int] = []  # longest unused first
        self.stats: dict[int, PrefixStats] = {}
        self.next_id = 0
        self.running: dict[int, Running] = {}
        self.contents: dict[int, Content] = {}

    @rule(
        choices=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
        prompts=st.lists(PROMPTS, max_size=3),
        sampled=st.integers(0, 1),
        fails=st.sampled_from([False, False, True]),
    )
    def step(
        self,
        choices: list[tuple[int, int]],
        prompts: list[tuple[list[int], str | None, bool]],
        sampled: int,
        fails: bool,
    ) -> None:
        """Plan running requests and new prompts together, then compute them all, or none."""
        plan: list[Planned] = []
        first_new = self.next_id
        for choice, num_new in choices:
            ids = [i for i in self.running if i not in {part.request_id for part in plan}]
            if ids:
                self.plan(plan, ids[choice % len(ids)], num_new)
        for prompt, salt, match in prompts:
            self.plan(plan, self.begin(prompt, salt, match), len(prompt))
        if fails:
            self.fail(plan, first_new)
        else:
            self.compute(plan, sampled)

    def ids(self, tokens: list[int]) -> TokenIds:
        return np.array(tokens, np.int32) if self.as_array else tokens

    def begin(self, tokens: list[int], salt: str | None, match: bool) -> int:
        size = self.manager.block_size
        found = 0
        for key in block_keys(root_key(self.version, salt), tokens[:-1], size):
            if self.manager.pool.lookup(key) is None or not match:
                break
            found += 1
        request_id = self.next_id
        self.next_id += 1
        ids = self.ids(tokens)
        cached = self.manager.begin(request_id, ids, self.version, salt, match=match)
        assert cached == found * size <= len(tokens) - 1
        assert self.caching or cached == 0
        held = self.manager.block_ids(request_id)
        self.cached = [block_id for block_id in self.cached if block_id not in held]
        request = Running(list(tokens), self.version, salt, match, cached, found, found)
        request.num_query_tokens = len(tokens) if match and self.caching else 0
        self.running[request_id] = request
        return request_id

    def expected(self, num_blocks: int) -> list[set[int]]:
        """What the next num_blocks blocks taken are: some of a set, after all of those before."""
        blocks = self.manager.pool.blocks[1:]
        free = [block for block in blocks if block.ref_count == 0]
        plain = {block.block_id for block in free if block.key is None}
        stale = {block.block_id for block in free if block.key is not None} - set(self.cached)
        return [*[plain] * len(plain), *[stale] * len(stale), *({i} for i in self.cached)][
            :num_blocks
        ]

    def plan(self, plan: list[Planned], request_id: int, num_new: int) -> None:
        request = self.running[request_id]
        end = min(len(request.tokens), request.computed + num_new)
        before = list(self.manager.block_ids(request_id))
        needed = max(0, -(-end // self.manager.block_size) - len(before))
        free = self.manager.num_free_blocks
        expected = self.expected(needed)
        taken = self.manager.grow(request_id, end)
        if taken is None:
            assert needed > free == self.manager.num_free_blocks
            assert list(self.manager.block_ids(request_id)) == before
            self.free(request_id)
            return
        assert len(taken) == len(set(taken)) == needed
        assert self.manager.num_free_blocks == free - needed
        assert list(self.manager.block_ids(request_id)) == [*before, *taken]
        for block_id, among in zip(taken, expected, strict=True):
            assert block_id in among, "taken out of order"
            self.contents.pop(block_id, None)
        self.cached = [block_id for block_id in self.cached if block_id not in taken]
        if taken:
            self.count(request)
        self.publish(request_id, end)
        plan.append(Planned(request_id, request.computed, end))

    def count(self, request: Running) -> None:
        if request.num_query_tokens:
            queries, hits = self.stats.get(request.version, PrefixStats(0, 0))
            hits += request.matched * self.manager.block_size
            self.stats[request.version] = PrefixStats(queries + request.num_query_tokens, hits)
            request.num_query_tokens = 0

    def publish(self, request_id: int, end: int) -> None:
        request = self.running[request_id]
        size = self.manager.block_size
        keyed = self.keyed_of(request_id)
        publish_at = self.manager.publish(request_id, self.ids(request.tokens), end)
        if request.sealed or request.version != self.version or not self.caching:
            assert publish_at == NEVER
            assert self.keyed_of(request_id) == keyed
            return
        assert publish_at == (end // size + 1) * size
        keys = block_keys(root_key(request.version, request.salt), request.tokens[:end], size)
        for key in keys[request.published :]:
            assert self.manager.pool.lookup(key) is not None
        request.published = len(keys)

    def compute(self, plan: list[Planned], sampled: int) -> None:
        for part in plan:
            request = self.running[part.request_id]
            request.foreign |= request.version != self.version
            self.write(part, request)
            request.computed = part.end
            if part.end == len(request.tokens):
                request.tokens.append(sampled)

    def write(self, part: Planned, request: Running) -> None:
        size = self.manager.block_size
        ids = self.manager.block_ids(part.request_id)
        for index in range(part.start // size, -(-part.end // size)):
            assert index >= request.matched, "KV is written into a matched block"
            self.contents.pop(ids[index], None)
            if (index + 1) * size <= part.end and not request.foreign:
                prefix = tuple(request.tokens[: (index + 1) * size])
                self.contents[ids[index]] = (request.version, request.salt, prefix)

    def fail(self, plan: list[Planned], first_new: int) -> None:
        """Those begun for the step go, whatever they matched; the others plan it again."""
        for part in plan:
            self.manager.unpublish_from(part.request_id, part.start)
            request = self.running[part.request_id]
            request.published = max(part.start // self.manager.block_size, request.matched)
        for part in plan:
            if part.request_id >= first_new:
                self.free(part.request_id)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9), wanted=st.integers(0, 14))
    def fork(self, choice: int, wanted: int) -> None:
        """A sample of the same prompt: shares full blocks, has the rest in a block of its own."""
        source_id = self.pick(choice)
        source = self.running[source_id]
        num_tokens = min(wanted, source.computed)
        manager, size = self.manager, self.manager.block_size
        num_full, rest = divmod(num_tokens, size)
        free = manager.num_free_blocks
        expected = self.expected(1) if rest else []
        copy = manager.fork(self.next_id, source_id, num_tokens, num_tokens + 1)
        usable = self.caching and not source.sealed and source.version == self.version
        if not usable or num_full > source.published or (rest and not free):
            assert copy is None and manager.num_free_blocks == free
            return
        assert copy is not None
        ids, held = list(manager.block_ids(self.next_id)), list(manager.block_ids(source_id))
        assert ids[:num_full] == held[:num_full] and len(ids) == num_full + (rest > 0)
        if rest:
            assert copy == (held[num_full], ids[num_full], rest) and ids[num_full] in expected[0]
            self.contents.pop(ids[num_full], None)
            self.cached = [i for i in self.cached if i != ids[num_full]]
        else:
            assert copy.num_tokens == 0
        tokens = source.tokens[:num_tokens]
        request = Running(
            [*tokens, 0], self.version, source.salt, True, num_tokens, num_full, num_full
        )
        request.foreign = source.foreign
        self.running[self.next_id] = request
        queries, hits = self.stats.get(self.version, PrefixStats(0, 0))
        self.stats[self.version] = PrefixStats(queries + num_tokens + 1, hits + num_tokens)
        self.next_id += 1

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def finish(self, choice: int) -> None:
        self.free(self.pick(choice))

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def preempt(self, choice: int) -> None:
        request_id = self.pick(choice)
        request = self.running[request_id]
        self.free(request_id)
        self.begin(request.tokens, request.salt, request.match)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def seal(self, choice: int) -> None:
        request_id = self.pick(choice)
        self.manager.seal(request_id)
        self.running[request_id].sealed = True

    @rule(by=st.integers(0, 2))
    def advance_version(self, by: int) -> None:
        """Running requests go on under `keep`; with by = 0 nothing changes."""
        pool = self.manager.pool
        keys = [block.key for block in pool.blocks]
        available = pool.num_available
        self.version += by
        self.manager.advance_version(self.version)
        assert pool.num_available == available
        assert [block.key for block in pool.blocks] == keys, "a block was visited"
        if by:
            self.cached.clear()
            with pytest.raises(ValueError):
                self.manager.begin(self.next_id, [0], self.version - 1)
            with pytest.raises(ValueError):
                self.manager.advance_version(self.version - 1)

    @rule()
    def lose_the_storage(self) -> None:
        """The pages were released and restored: refused while held, else nothing is known."""
        pool = self.manager.pool
        before = (pool.num_free, pool.num_cached, pool.num_used)
        if self.running:
            with pytest.raises(BlockError):
                self.manager.reset()
            assert (pool.num_free, pool.num_cached, pool.num_used) == before
            return
        self.manager.reset()
        self.contents.clear()
        self.cached.clear()
        assert (pool.num_free, pool.num_cached, pool.num_used) == (pool.num_total, 0, 0)
        assert all(block.key is None for block in pool.blocks)

    @rule()
    def drain(self) -> None:
        for request_id in list(self.running):
            self.free(request_id)
        assert self.manager.pool.num_used == 0

    def pick(self, choice: int) -> int:
        ids = list(self.running)
        return ids[choice % len(ids)]

    def keyed_of(self, request_id: int) -> list[bytes | None]:
        return [self.manager.pool.blocks[i].key for i in self.manager.block_ids(request_id)]

    def free(self, request_id: int) -> None:
        pool = self.manager.pool
        held = [pool.blocks[block_id] for block_id in self.manager.block_ids(request_id)]
        before = [(block, block.key, block.policy_version, block.ref_count) for block in held]
        self.manager.free(request_id)
        del self.running[request_id]
        for block, key, version, holders in reversed(before):
            assert block.ref_count == holders - 1
            if holders == 1:
                is_live = version == self.version
                assert block.key == (key if is_live else None), "live kept, retired dropped"
                if is_live:
                    self.cached.append(block.block_id)
        with pytest.raises(BlockError):
            self.manager.free(request_id)

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.manager.check_integrity()
        pool = self.manager.pool
        assert pool.num_free + pool.num_cached + pool.num_used == len(pool.blocks) - 1

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        pool = self.manager.pool
        assert pool.num_cached == len(self.cached)
        assert pool.num_used == sum(block.ref_count > 0 for block in pool.blocks)
        assert self.manager.prefix_stats() == self.stats

    @invariant()
    def findable_blocks_contain_what_their_keys_say(self) -> None:
        pool = self.manager.pool
        for block in pool.blocks:
            if block.key is None:
                continue
            version, salt, prefix = self.contents[block.block_id]
            assert block.policy_version == version
            keys = block_keys(root_key(version, salt), prefix, self.manager.block_size)
            assert keys[-1] == block.key
            found = pool.lookup(block.key)
            assert found is (block if version == self.version else None)

    @invariant()
    def requests_read_the_kv_of_their_tokens(self) -> None:
        size = self.manager.block_size
        for request_id, request in self.running.items():
            if request.foreign:
                continue
            ids = self.manager.block_ids(request_id)
            for index in range(request.computed // size):
                prefix = tuple(request.tokens[: (index + 1) * size])
                assert self.contents[ids[index]] == (request.version, request.salt, prefix)
