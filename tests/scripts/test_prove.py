"""`python -m scripts.prove`: what it runs, and its exit code."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from rollout import DecoderConfig, load_pretrained
from rollout.model.config import FAMILIES
from scripts import prove as script
from trainer_bridge import Proof
from trainer_bridge.proof import Comparison


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["prove", *arguments])
    return script.main()


def test_every_family_is_proved(monkeypatch, capsys):
    tokens = ("--tokens", "100", "--actors", "1", "--json")
    assert run(monkeypatch, "families", *tokens) == 0
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert [line["model"] for line in lines] == sorted(FAMILIES)
    assert all(line["held"] and line["conclusive"] for line in lines)
    assert all(line["scored"]["tokens"] >= 100 for line in lines)


@pytest.mark.usefixtures("ray_session")
def test_over_actors(monkeypatch, capsys):
    """L5: two processes return what one does."""
    assert run(monkeypatch, "embedded", "--tokens", "100", "--actors", "2") == 0
    assert "actors 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("differing", "control", "code"), [(0, 3, 0), (1, 3, 1), (0, 0, 1)]
)
def test_the_exit_code_says_whether_it_was_shown(monkeypatch, capsys, differing, control, code):
    proof = Proof(Comparison(9, differing), Comparison(9), Comparison(9, control))
    monkeypatch.setattr(script, "prove", lambda *args, **settings: proof)
    assert run(monkeypatch, "embedded") == code
    assert ("held (" in capsys.readouterr().out) == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["no/such/folder"], "no/such"), (["embedded", "--tokens", "0"], "at least 1")],
)
def test_what_cannot_be_run_is_said_in_a_sentence(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_families_differ_as_their_checkpoints_do(tmp_path):
    """Biases, norms of q and k, tied and untied projections are all there."""
    configs = {f: script.family_config(f) for f in FAMILIES}
    assert configs["qwen2"].qkv_bias and configs["qwen3"].qk_norm
    assert {c.tie_word_embeddings for c in configs.values()} == {True, False}
    folder = script.write_family("qwen2", tmp_path / "qwen2")
    assert DecoderConfig.from_folder(folder) == configs["qwen2"]
    model, _ = load_pretrained(str(folder))
    assert float(model.model.layers[0].self_attn.q_proj.bias.detach().std()) > 0.1


def test_no_two_families_are_one_model_twice():
    with script.models("families") as chosen:
        embeddings = [load_pretrained(at)[0].model.embed_tokens.weight for _, at in chosen]
    assert len(embeddings) == len(FAMILIES)
    for left, right in itertools.combinations(embeddings, 2):
        assert not torch.equal(left, right)
    with script.models("qwen3") as chosen:
        assert [name for name, _ in chosen] == ["qwen3"]
