"""Random lives of requests: the machine passes, and fails over every pool that forgets a rule."""

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from kvcache import Block, BlockError, BlockPool
from tests.kvcache.machine import CacheMachine

PROFILE = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_random_lives_of_requests() -> None:
    """K4-K8, K10-K14, K16, K17, K19-K21, W12: thousands of operations in random order."""
    operations = 0

    class Counted(CacheMachine):
        @invariant()
        def is_counted(self) -> None:
            nonlocal operations
            operations += 1

    run_state_machine_as_test(Counted, settings=PROFILE)
    assert operations > 3000


class FindsRetired(BlockPool):
    """Forgets that the version of a block matters to who looks for it."""

    def lookup(self, key: bytes) -> Block | None:
        return self._by_key.get(key)


class CachesRetired(BlockPool):
    """Forgets that a held block may be of retired weights when its last holder leaves."""

    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0 and block.key is None:
                self._free.appendleft(block)
            elif block.ref_count == 0:
                self._free.append(block)
                self._num_cached += 1


class CountsStale(BlockPool):
    """Forgets that cached blocks are stale under a new version."""

    def advance_version(self, policy_version: int) -> None:
        num_cached = self._num_cached
        super().advance_version(policy_version)
        self._num_cached = num_cached


class KeepsKeys(BlockPool):
    """Forgets that a block that is taken over loses its key."""

    def take(self, num_blocks: int) -> list[Block]:
        kept = {block: (block.key, block.policy_version) for block in self._free}
        taken = super().take(num_blocks)
        for block in taken:
            key, version = kept[block]
            if key is not None and version is not None:
                block.set_key(key, version)
                self._by_key[key] = block
        return taken


class TakesTheLatest(BlockPool):
    """Forgets which cached block is the longest unused."""

    def release(self, blocks: Iterable[Block]) -> None:
        super().release(reversed(list(blocks)))


class DropsLive(BlockPool):
    """Forgets that released content of the live version is worth keeping."""

    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.ref_count == 1:
                self.unpublish(block)
            super().release([block])


class FreesTwice(BlockPool):
    """Forgets that a block has other holders when one of them leaves."""

    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_count = min(block.ref_count, 1)
            super().release([block])


class WithdrawsNothing(BlockPool):
    """Forgets to take a key back."""

    def unpublish(self, block: Block) -> None:
        pass


@pytest.mark.parametrize(
    "broken",
    [
        FindsRetired,
        CachesRetired,
        CountsStale,
        KeepsKeys,
        TakesTheLatest,
        DropsLive,
        FreesTwice,
        WithdrawsNothing,
    ],
)
def test_a_pool_that_forgets_a_rule_is_caught(broken: type[BlockPool]) -> None:
    """K4-K6, K10, K16, K20, K21, controls: the machine fails for each rule forgotten."""

    class Broken(CacheMachine):
        pool_class = broken

    with pytest.raises((AssertionError, BlockError, KeyError)):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                PROFILE,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
            ),
        )
