"""Loss and gradient of the presets against TRL's, on the same tokens and the same weights.

TRL lives in an environment of its own: `bash scripts/bench/peers/setup.sh trl`, then
`bash scripts/test.sh -m slow tests/recipes/algorithms/test_trl_agreement.py`.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes.algorithms.presets import PRESETS, Preset
from rollout import save_pretrained
from tests.folders import word_tokenizer
from tests.models import tiny_model
from tests.trainer_bridge.test_learner import Bench

ROOT = Path(__file__).parents[3]
TRL = ROOT / ".venv-peers" / "trl" / "bin" / "python"
LONGEST = 12
TOLERANCE = 1e-5


def preset(name: str, **changes: object) -> Preset:
    return dataclasses.replace(PRESETS[name], **changes)


FORMS = {
    "dapo": (preset("dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": (preset("grpo"), {"loss_type": "bnpo"}),
    "grpo": (preset("grpo", aggregation="seq_mean_token_mean"), {"loss_type": "grpo"}),
    "dr_grpo": (
        preset("dr_grpo"), {"loss_type": "dr_grpo", "max_completion_length": LONGEST},
    ),
    "luspo": (preset("grpo", aggregation="seq_mean_token_sum"), {"loss_type": "luspo"}),
    "gspo": (
        preset("gspo"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence",
         "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": (
        preset("cispo").with_loss_options(ratio_max=1.1),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "sapo": (preset("sapo"), {"loss_type": "sapo"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    """Sampled, then moved off-policy: the old log-probs are others, and much is clipped."""
    batch = Bench().batch(stop_token_ids=list(range(0, 40, 3)))
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.3, batch.num_tokens)
    noise[: batch.num_tokens // 2] *= 1e-3  # within the bounds of a ratio per sequence
    moved = (batch.logprobs + noise).astype(np.float32)
    assert len(set(batch.lengths.tolist())) > 2
    return dataclasses.replace(batch, logprobs=moved)


@pytest.fixture(scope="module")
def advantages(batch):
    return np.random.default_rng(1).standard_normal(len(batch)).astype(np.float32)


@pytest.fixture(scope="module")
def theirs(batch, advantages, tmp_path_factory):
    """Loss and gradients of TRL by form."""
    if not TRL.exists():
        pytest.skip("no TRL here: bash scripts/bench/peers/setup.sh trl")
    folder = tmp_path_factory.mktemp("trl")
    save_pretrained(tiny_model(), folder / "model", word_tokenizer())
    np.savez(folder / "batch.npz", **padded(batch, advantages))
    (folder / "settings.json").write_text(json.dumps([form for _, form in FORMS.values()]))
    script = Path(__file__).with_name("trl_loss.py")
    done = subprocess.run([TRL, script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: dict(np.load(folder / f"{i}.npz")) for i, name in enumerate(FORMS)}


def padded(batch, advantages) -> dict[str, np.ndarray]:
    """As TRL has it: prompts padded on the left, completions on the right."""
    prompts = [batch.prompt(p) for p in batch.prompt_index]
    wide, long = max(map(len, prompts)), int(batch.lengths.max())
    columns = {
        name: np.zeros((len(batch), width), np.int64)
        for name, width in (
            ("prompt_ids", wide), ("prompt_mask", wide),
            ("completion_ids", long), ("completion_mask", long),
        )
    }  # fmt: skip
    old = np.zeros((len(batch), long), np.float32)
    for row, prompt in enumerate(prompts):
        tokens = batch.tokens(row)
        columns["prompt_ids"][row, wide - len(prompt) :] = prompt
        columns["prompt_mask"][row, wide - len(prompt) :] = 1
        columns["completion_ids"][row, : len(tokens)] = tokens
        columns["completion_mask"][row, : len(tokens)] = 1
        old[row, : len(tokens)] = batch.logprobs[batch.offsets[row] : batch.offsets[row + 1]]
    count = np.array(batch.num_tokens, np.float32)
    return {
        **columns, "old_per_token_logps": old, "advantages": advantages, "num_items_in_batch": count
    }  # fmt: skip


def ours(form: Preset, batch, advantages, folder: Path) -> dict[str, np.ndarray]:
    """The learner's loss, and its gradient under the names that a checkpoint has."""
    bench = Bench()
    stats = bench.learner.step(batch, advantages, form.algorithm(LONGEST))
    gradient = tiny_model()
    with torch.no_grad():
        for target, source in zip(gradient.parameters(), bench.model.parameters(), strict=True):
            target.copy_(source.grad)
    save_pretrained(gradient, folder, word_tokenizer())
    named = load_file(folder / "model.safetensors")
    return {name: value.numpy() for name, value in named.items()} | {"loss": stats["actor/pg_loss"]}


def distance(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """The largest difference of loss and of each parameter's gradient, relative to its largest."""
    assert left.keys() == right.keys()
    return max(
        float(np.abs(left[name] - right[name]).max() / np.abs(right[name]).max()) for name in left
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradient_are_trls(theirs, batch, advantages, tmp_path, name):
    found = ours(FORMS[name][0], batch, advantages, tmp_path)
    assert distance(found, theirs[name]) <= TOLERANCE


@pytest.mark.slow
def test_forms_are_told_apart(theirs):
    """The control: no two of these forms agree with each other that closely."""
    names = [name for name in FORMS if name != "bnpo"]  # dapo with another upper bound
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            assert distance(theirs[left], theirs[right]) > 100 * TOLERANCE, (left, right)
