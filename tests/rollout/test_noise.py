"""Counter-based noise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.noise import derived_seed, noise_key, uniforms


def draw(key: int, positions) -> np.ndarray:
    positions = np.asarray(positions, dtype=np.int64)
    return uniforms(np.full(len(positions), key, dtype=np.uint64), positions)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.integers(0, 2**40))
def test_inside_the_open_interval(keys, position):
    """L13."""
    u = uniforms(np.array(keys, dtype=np.uint64), np.full(len(keys), position))
    assert (u > 0).all() and (u < 1).all()


def test_uniform_and_uncorrelated():
    u = draw(noise_key(0, [1, 2, 3], 0), range(100_000))
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 50  # chi-squared, 19 degrees of freedom
    across = np.array([draw(noise_key(0, [1], i), [7])[0] for i in range(5000)])
    assert abs(across.mean() - 0.5) < 0.02 and abs(across.var() - 1 / 12) < 0.005


def test_everything_named_matters():
    """L8: seed, prompt, its order, sample index and position each give another stream."""
    keys = {
        noise_key(0, [1, 2], 0), noise_key(1, [1, 2], 0), noise_key(0, [2, 1], 0),
        noise_key(0, [1, 2], 1), noise_key(0, [1, 2, 0], 0), noise_key(0, [], 0),
    }
    assert len(keys) == 6
    assert len(set(draw(5, range(1000)).tolist())) == 1000


def test_the_same_in_another_process():
    code = "from rollout.noise import *; print(noise_key(3, [5, 6], 2), derived_seed(1, 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(noise_key(3, [5, 6], 2)), str(derived_seed(1, 2))]


def test_the_global_generators_are_neither_read_nor_moved():
    torch.manual_seed(0)
    np.random.seed(0)
    state, first = torch.get_rng_state(), draw(9, range(5))
    torch.manual_seed(1)
    np.random.seed(1)
    assert np.array_equal(draw(9, range(5)), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_derived_seeds():
    seeds = {derived_seed(run, uid) for run in range(10) for uid in range(100)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
