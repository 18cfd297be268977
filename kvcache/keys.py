"""Content keys: equal keys mean equal tokens, after equal tokens, under the same weights.

    root_key(version, salt) -> child_key(root, tokens of block 0) -> child_key(., block 1) -> ...

A key is a digest of the previous key and the block's token ids, so one changed token, version or
salt changes every key after it. Keys do not depend on the process, its hash seed or its byte order.
Whoever looks a prefix up trusts the digest alone: at 128 bits of BLAKE2b no collision is to be met.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32]
"""Token ids as ints, or as a 1-d array whose bytes are hashed as they lie; the keys are equal."""

_HASHED = np.dtype("<i4")


def check_policy_version(policy_version: int) -> None:
    """ValueError if policy_version is not an int ≥ 0 (a bool is not an int here)."""
    if isinstance(policy_version, bool) or not isinstance(policy_version, int):
        raise ValueError(f"policy_version must be an int, got {policy_version!r}")
    if policy_version < 0:
        raise ValueError(f"policy_version must be at least 0, got {policy_version}")


def root_key(policy_version: int, salt: str | None = None) -> bytes:
    """Parent of every first block computed under one version of the weights.

    Different salts keep users of one cache apart; None and "" are two different salts.
    ValueError if policy_version is not an int ≥ 0.
    """
    check_policy_version(policy_version)
    salt_bytes = b"" if salt is None else b"+" + salt.encode()
    content = b"%d:" % policy_version + salt_bytes
    return blake2b(content, digest_size=KEY_BYTES, person=b"lockstep.kvroot").digest()


def child_key(parent: bytes, token_ids: TokenIds) -> bytes:
    """Key of the block that holds token_ids and follows the block (or root) keyed parent.

    Token ids are read as int32; one that does not fit is a struct.error. ValueError for none, and
    for an array that is not 1-d.
    """
    if len(token_ids) == 0:
        raise ValueError("token_ids must hold at least one token, got none")
    return blake2b(parent + _packed(token_ids), digest_size=KEY_BYTES).digest()


def block_keys(root: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Keys of all full blocks of token_ids, in order; a partial last block has none."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    keys: list[bytes] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = child_key(parent, token_ids[end - block_size : end])
        keys.append(parent)
    return keys


def _packed(token_ids: TokenIds) -> bytes:
    """Little-endian int32, on any machine."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1:
            raise ValueError(f"token_ids must be 1-d, got shape {token_ids.shape}")
        if token_ids.dtype == _HASHED:
            return token_ids.tobytes()
    return pack(f"<{len(token_ids)}i", *token_ids)
