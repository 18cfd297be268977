"""A policy on disk for the tests over real actors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import save_pretrained
from tests.folders import word_tokenizer
from tests.models import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "model"
    save_pretrained(tiny_model(), path, word_tokenizer())
    return path
