"""`--dry-run`: sizes by hand, and an answer that can be no."""

import dataclasses

import pytest

from recipes import grpo, plan
from recipes.command_line import parse_config
from recipes.plan import plan_run
from recipes.plugins import configured_preset
from rollout import RolloutEngine, load_pretrained

OPTIONS = ["--rollout.prompts_per_step=10", "--rollout.group_size=4", "--rollout.max_tokens=20",
           "--rollout.actors=3", "--optimizer.micro_batch_tokens=100"]  # fmt: skip


def planned(policy, *options):
    config = parse_config([f"--model={policy}", *OPTIONS, *options])
    return plan_run(config, configured_preset(config), policy, prompt_tokens=5)


def test_sizes_by_hand(policy):
    model, tokenizer = load_pretrained(policy)
    found = planned(policy)
    weights = found.memory["weights, once"]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert 4 * found.parameters <= weights <= 1.1 * 4 * found.parameters  # the arena is aligned
    assert found.memory["gradient and both moments"] == 3 * weights
    engine = RolloutEngine(model, tokenizer, max_batch_size=64)
    assert found.kv_blocks == engine.get_stats()["kv_blocks_total"] + 1  # and the scratch block
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    assert found.memory["KV of 3 rollout actors, at most"] == 3 * found.kv_blocks * 16 * per_token
    assert dict(found.tokens) == {"sampled": 800, "prompt": 50} and found.micro_batches == 9
    layer = 4 * 32 + 3 * 32 + 4 * 16 + 3 * 64
    logits = 2 * 256 * 10
    assert found.memory["activations of a micro-batch"] == 4 * (100 * 2 * layer + logits)
    assert found.fits and found.seconds["update"] == pytest.approx(3 * found.seconds["rollout"])


def test_what_an_algorithm_adds(policy):
    plain, ppo = planned(policy), planned(policy, "--algorithm=ppo")
    more = {name: ppo.memory[name] for name in ppo.memory if name not in plain.memory}
    weights = plain.memory["weights, once"]
    assert list(more) == ["critic, with gradient and moments", "reference policy"]
    assert more["reference policy"] == weights < more["critic, with gradient and moments"]
    shared = planned(policy, "--algorithm=ppo", "--critic.trunk=shared", "--ppo.kl_coefficient=0")
    assert set(shared.memory) == set(plain.memory)
    kept = planned(policy, "--optimizer.gradient_checkpointing=true")
    name = "activations of a micro-batch"
    assert kept.memory[name] < plain.memory[name]
    assert kept.seconds["update"] / kept.seconds["rollout"] == pytest.approx(4)


def test_what_does_not_fit_is_refused_with_the_numbers(policy, monkeypatch, capsys, tmp_path):
    output = tmp_path / "run"
    arguments = [f"--model={policy}", "--task.name=tiny_run:load", f"--output={output}"]
    assert grpo.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.strip().endswith("it fits")
    monkeypatch.setattr(plan, "_available", lambda: 1 << 30)
    assert grpo.main(["--dry-run", *arguments, "--rollout.actors=9"]) == 1
    said = capsys.readouterr().out
    assert "it does NOT fit: " in said and "1.0 GiB available" in said
    assert "| weights, once | " in said and "| available here | 1,024 |" in said
    assert not output.exists(), "nothing was begun"
    assert grpo.main(["--dry-run", f"--model={policy}", "--task.name=nowhere:load"]) == 1
    assert "cannot be imported" in capsys.readouterr().err


def test_the_sentence_names_the_largest(policy):
    found = dataclasses.replace(planned(policy), available=1)
    assert "the most goes to driver, trainer, rollout actors and Ray themselves" in found.text()
