"""The README's examples are run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout import SamplingParams, save_pretrained
from tests.folders import word_tokenizer
from tests.models import tiny_model

README = Path(__file__).parent.parent / "README.md"


def example(name: str) -> str:
    pattern = rf"<!-- example: {name} -->\n```python\n(.*?)```"
    found = re.search(pattern, README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"README.md has no example {name!r}"
    return found[1]


@pytest.fixture
def model_folder(tmp_path, monkeypatch):
    folder = tmp_path / "path/to/hf/folder"
    folder.parent.mkdir(parents=True)
    save_pretrained(tiny_model(), folder, word_tokenizer())
    monkeypatch.chdir(tmp_path)
    return folder


def test_one_process(model_folder):
    names: dict[str, object] = {}
    exec(example("one process"), names)
    for scored, rollout in zip(names["logprobs"], names["rollouts"], strict=True):
        assert scored.detach().tolist() == rollout.logprobs


def test_streaming(model_folder, capsys):
    """It goes on where the first example ends."""
    names: dict[str, object] = {}
    exec(example("one process"), names)
    exec(example("streaming"), names)
    assert capsys.readouterr().out.count("[") >= 2
    assert names["engine"].get_stats()["kv_blocks_used"] == 0


@pytest.mark.usefixtures("ray_session")
def test_actors(model_folder):
    names: dict[str, object] = {}
    exec(example("actors"), names)
    assert names["stats"]["sampling/sampling_logp_difference/max"] == 0
    assert names["stats"]["rollout/policy_version"] == 1


@pytest.mark.usefixtures("ray_session")
def test_conversations(model_folder):
    """It goes on where the one with actors ends; with longer completions, so that some of this
    random policy's turns end by themselves."""
    names: dict[str, object] = {}
    exec(example("actors"), names)
    names["params"] = SamplingParams(n=4, max_tokens=200, seed=0)
    exec(example("conversations"), names)
    batch = names["batch"]
    assert len(batch) == len(names["rewards"]) == 4
    assert names["stats"]["sampling/sampling_logp_difference/max"] == 0
    assert (batch.num_turns > 1).any() and not batch.response_mask.all()
