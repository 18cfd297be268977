"""Shared by all tests: few threads, and one Ray for those that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported. Tests share the cores with actors; spinning workers would stall them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ray
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray of this session's own; `Colocation` uses it and leaves it running."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
