"""Random lives of requests over a small pool, against a model of what the KV storage contains.

The model knows, for every block, which tokens under which version and salt its KV was computed
from. Hypothesis plans steps, lets some fail, preempts, frees, seals and changes versions; after
every operation the bookkeeping is consistent, every findable block contains what its key says, and
every running request reads the KV of its own tokens.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache import BlockError, BlockPool, KVCacheManager, block_keys, root_key

Content = tuple[int, str | None, tuple[int, ...]]

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from([None, "salt"])


@dataclass
class Running:
    """The model of one open table."""

    tokens: list[int]
    version: int
    salt: str | None
    computed: int
    matched: int
    sealed: bool = False
    foreign: bool = False  # computed something under another version than its own


@dataclass
class Planned:
    """One request's part of a step."""

    request_id: int
    start: int
    end: int


class CacheMachine(RuleBasedStateMachine):
    manager: KVCacheManager[int]

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def create(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.manager = KVCacheManager(BlockPool(num_blocks, caching), block_size)
        self.caching = caching
        self.version = 0
        self.next_id = 0
        self.running: dict[int, Running] = {}
        self.contents: dict[int, Content] = {}

    @rule(
        choices=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
        prompts=st.lists(st.tuples(PROMPTS, SALTS), max_size=3),
        sampled=st.integers(0, 1),
        fails=st.sampled_from([False, False, True]),
    )
    def step(
        self,
        choices: list[tuple[int, int]],
        prompts: list[tuple[list[int], str | None]],
        sampled: int,
        fails: bool,
    ) -> None:
        """Plan running requests and new prompts together, then compute them all, or none."""
        plan: list[Planned] = []
        for choice, num_new in choices:
            ids = [i for i in self.running if i not in {part.request_id for part in plan}]
            if ids:
                self.plan(plan, ids[choice % len(ids)], num_new)
        for prompt, salt in prompts:
            self.plan(plan, self.begin(prompt, salt), len(prompt))
        if fails:
            self.fail(plan)
        else:
            self.compute(plan, sampled)

    def begin(self, tokens: list[int], salt: str | None) -> int:
        size = self.manager.block_size
        found = 0
        for key in block_keys(root_key(self.version, salt), tokens[:-1], size):
            if self.manager.pool.lookup(key) is None:
                break
            found += 1
        request_id = self.next_id
        self.next_id += 1
        cached = self.manager.begin(request_id, tokens, self.version, salt)
        assert cached == found * size <= len(tokens) - 1
        assert self.caching or cached == 0
        self.running[request_id] = Running(list(tokens), self.version, salt, cached, found)
        return request_id

    def plan(self, plan: list[Planned], request_id: int, num_new: int) -> None:
        request = self.running[request_id]
        end = min(len(request.tokens), request.computed + num_new)
        before = list(self.manager.block_ids(request_id))
        needed = max(0, -(-end // self.manager.block_size) - len(before))
        free = self.manager.num_free_blocks
        grown = self.manager.grow(request_id, end)
        assert grown == (needed <= free)
        assert self.manager.num_free_blocks == free - needed * grown
        assert list(self.manager.block_ids(request_id))[: len(before)] == before
        if not grown:
            assert list(self.manager.block_ids(request_id)) == before
            self.free(request_id)
            return
        for block_id in self.manager.block_ids(request_id)[len(before) :]:
            self.contents.pop(block_id, None)
        keyed = self.keyed_of(request_id)
        self.manager.publish(request_id, request.tokens, end)
        if request.sealed:
            assert self.keyed_of(request_id) == keyed
        plan.append(Planned(request_id, request.computed, end))

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

    def fail(self, plan: list[Planned]) -> None:
        misled: set[int] = set()
        for part in plan:
            named = self.manager.unpublish_from(part.request_id, part.start)
            assert part.request_id not in named
            misled.update(named)
        assert misled <= {part.request_id for part in plan}, "an older request is named"
        for request_id in misled:
            self.free(request_id)

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
        self.begin(request.tokens, request.salt)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def seal(self, choice: int) -> None:
        request_id = self.pick(choice)
        self.manager.seal(request_id)
        self.running[request_id].sealed = True

    @rule()
    def change_version(self) -> None:
        self.version += 1
        self.manager.unpublish_older(self.version)
        assert all(block.key is None for block in self.manager.pool.blocks)

    @rule()
    def reset(self) -> None:
        if not self.running:
            self.manager.reset()
            assert self.manager.pool.num_free == self.manager.pool.num_total
            return
        pool = self.manager.pool
        before = (pool.num_free, pool.num_cached, pool.num_used)
        with pytest.raises(BlockError):
            self.manager.reset()
        assert (pool.num_free, pool.num_cached, pool.num_used) == before

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
        self.manager.free(request_id)
        del self.running[request_id]
        with pytest.raises(BlockError):
            self.manager.free(request_id)

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.manager.check_integrity()
        pool = self.manager.pool
        assert pool.num_free + pool.num_cached + pool.num_used == len(pool.blocks) - 1

    @invariant()
    def findable_blocks_contain_what_their_keys_say(self) -> None:
        for block in self.manager.pool.blocks:
            if block.key is not None:
                version, salt, prefix = self.contents[block.block_id]
                assert block.policy_version == version == self.version
                keys = block_keys(root_key(version, salt), prefix, self.manager.block_size)
                assert keys[-1] == block.key

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


PROFILE = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_random_lives_of_requests() -> None:
    """K4-K8, K10-K14, K16, K17, K19-K21: thousands of operations in random order."""
    run_state_machine_as_test(CacheMachine, settings=PROFILE)
