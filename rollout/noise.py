"""Counter-based noise: a draw is a hash of what it is for, not the next number of a generator.

u(seed, prompt ids, sample index, position) needs no state, so nothing is lost on preemption,
restart or migration, and the global torch generator is neither read nor moved.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def noise_key(seed: int, prompt_token_ids: Sequence[int], sample_index: int) -> int:
    """The 64-bit stream of one sample of one prompt."""
    hasher = hashlib.blake2b(digest_size=8, person=b"lockstep-noise")
    hasher.update(array("q", (seed, sample_index)).tobytes())
    hasher.update(array("q", prompt_token_ids).tobytes())
    return int.from_bytes(hasher.digest(), "little")


def derived_seed(run_seed: int, uid: int) -> int:
    """A seed in [0, 2**63) for the prompt number `uid` of a run."""
    packed = array("q", (run_seed, uid)).tobytes()
    digest = hashlib.blake2b(packed, digest_size=8, person=b"lockstep-seed").digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) per row, from stream and position.

    The finaliser of splitmix64 (Steele, Lea and Flood 2014) on key + golden ratio · position; 53
    bits, centred in their interval so that neither 0 nor 1 can occur.
    """
    with np.errstate(over="ignore"):
        x = keys + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        x = x ^ (x >> np.uint64(31))
    fraction: NDArray[np.float64] = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return fraction
