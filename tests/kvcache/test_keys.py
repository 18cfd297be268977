"""Content keys."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import block_keys, child_key, root_key

REPOSITORY = Path(__file__).parents[2]
ROOT = root_key(0)


def test_same_tokens_and_parent_same_key() -> None:
    """K9: equal parents and tokens give equal keys; another parent or token another key."""
    key = child_key(ROOT, [1, 2, 3, 4])
    assert child_key(root_key(0), (1, 2, 3, 4)) == key
    assert child_key(key, [1, 2, 3, 4]) != key
    assert child_key(ROOT, [1, 2, 3, 5]) != key
    assert child_key(ROOT, [1, 2, 4, 3]) != key
    assert child_key(ROOT, [1, 2, 3]) != key


def test_change_in_block_0_changes_all_later_keys() -> None:
    """K9: the chain carries a change on; a change in a later block leaves earlier keys."""
    tokens = list(range(40))
    keys = block_keys(ROOT, tokens, 4)
    first_changed = block_keys(ROOT, [99, *tokens[1:]], 4)
    last_changed = block_keys(ROOT, [*tokens[:-1], 99], 4)
    assert all(a != b for a, b in zip(keys, first_changed, strict=True))
    assert last_changed[:-1] == keys[:-1]
    assert last_changed[-1] != keys[-1]
    assert len(set(keys + first_changed)) == 20


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_only_full_blocks_have_keys(block_size: int) -> None:
    """K9: n tokens have n // block_size keys, and more tokens do not change them."""
    tokens = [token * 7 % 101 for token in range(150)]
    whole = block_keys(ROOT, tokens, block_size)
    for length in range(151):
        keys = block_keys(ROOT, tokens[:length], block_size)
        assert keys == whole[: length // block_size]


def test_incremental_equals_from_scratch() -> None:
    """K9: chaining block by block gives the same keys as all at once."""
    tokens = list(range(64))
    parent, chained = ROOT, []
    for start in range(0, 64, 16):
        parent = child_key(parent, tokens[start : start + 16])
        chained.append(parent)
    assert chained == block_keys(ROOT, tokens, 16)


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=70),
    block_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from(["<i4", ">i4", "<i8"]),
    stride=st.integers(1, 3),
)
def test_arrays_have_the_keys_of_lists(
    tokens: list[int], block_size: int, dtype: str, stride: int
) -> None:
    """K9: a key depends on the ids, not on their container, its byte order, width or strides."""
    spread: Any = np.zeros(len(tokens) * stride, dtype)
    spread[::stride] = tokens
    assert block_keys(ROOT, spread[::stride], block_size) == block_keys(ROOT, tokens, block_size)
    assert child_key(ROOT, spread[::stride]) == child_key(ROOT, tokens)


def test_array_is_hashed_without_visiting_its_tokens() -> None:
    """K9: an int32 array is read as bytes: no token is ever made an int."""

    class Bytes(np.ndarray):
        def __iter__(self) -> Any:
            raise AssertionError("tokens are visited one by one")

        def __getitem__(self, index: Any) -> Any:
            assert isinstance(index, slice), "a token is read alone"
            return super().__getitem__(index)

    tokens: Any = np.arange(48, dtype=np.int32)
    assert block_keys(ROOT, tokens.view(Bytes), 16) == block_keys(ROOT, range(48), 16)
    with pytest.raises(AssertionError, match="one by one"):
        child_key(ROOT, tokens.astype(np.int64).view(Bytes))


def test_versions_and_salts_have_roots_of_their_own() -> None:
    """K10: every version and salt starts another chain; no salt is not the empty salt."""
    roots = [
        root_key(version, salt)
        for version in (0, 1, 10, 2**40)
        for salt in (None, "", "a", "+a", "0:", "b")
    ]
    assert len(set(roots)) == len(roots)
    assert root_key(10, "a") == root_key(10, "a")
    keys = [key for root in roots for key in block_keys(root, range(8), 2)]
    assert len(set(keys)) == len(keys)


def test_deterministic_across_processes() -> None:
    """K9: processes with other hash seeds compute the same keys."""
    code = (
        "from kvcache import block_keys, root_key\n"
        "keys = block_keys(root_key(7, 'salt'), range(48), 16)\n"
        "print(' '.join(key.hex() for key in keys))"
    )
    expected = [key.hex() for key in block_keys(root_key(7, "salt"), range(48), 16)]
    for hash_seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert output.split() == expected


@pytest.mark.parametrize("version", [True, -1, 1.0, "1", None])
def test_bad_version_is_named(version: object) -> None:
    """K10, W2: a version that is a bool, negative or no int makes no root."""
    with pytest.raises(ValueError, match="policy_version must be"):
        root_key(version)  # type: ignore[arg-type]


def test_bad_tokens_and_block_size_are_refused() -> None:
    """K9: no key for no tokens, for ids beyond int32 or for blocks of no size."""
    with pytest.raises(ValueError, match="token_ids must hold at least one token"):
        child_key(ROOT, [])
    with pytest.raises(ValueError, match="token_ids must hold at least one token"):
        child_key(ROOT, np.zeros(0, np.int32))
    with pytest.raises(ValueError, match=r"token_ids must be 1-d, got shape \(2, 4\)"):
        child_key(ROOT, np.zeros((2, 4), np.int32))
    with pytest.raises(struct.error):
        child_key(ROOT, [2**31])
    with pytest.raises(struct.error):
        child_key(ROOT, np.array([2**31]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        block_keys(ROOT, [1], 0)
