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

KEY_BYTES = 16


def root_key(policy_version: int, salt: str | None = None) -> bytes:
    """Parent of every first block computed under one version of the weights.

    Different salts keep users of one cache apart; None and "" are two different salts.
    ValueError if policy_version is not an int ≥ 0 (a bool is not an int here).
    """
    if isinstance(policy_version, bool) or not isinstance(policy_version, int):
        raise ValueError(f"policy_version must be an int, got {policy_version!r}")
    if policy_version < 0:
        raise ValueError(f"policy_version must be at least 0, got {policy_version}")
    salt_bytes = b"" if salt is None else b"+" + salt.encode()
    content = b"%d:" % policy_version + salt_bytes
    return blake2b(content, digest_size=KEY_BYTES, person=b"lockstep.kvroot").digest()


def child_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the block that holds token_ids and follows the block (or root) keyed parent.

    Token ids are read as int32; one that does not fit is a struct.error.
    """
    num_tokens = len(token_ids)
    if num_tokens == 0:
        raise ValueError("token_ids must hold at least one token, got none")
    content = parent + pack(f"<{num_tokens}i", *token_ids)
    return blake2b(content, digest_size=KEY_BYTES).digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of token_ids, in order; a partial last block has none."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    keys: list[bytes] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = child_key(parent, token_ids[end - block_size : end])
        keys.append(parent)
    return keys
