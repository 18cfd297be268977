"""The decoder against transformers: equal logits after loading, and after saving, per family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import AttentionMetadata, PackedAttention, select_backend
from rollout.model import Decoder, DecoderConfig, load_weights, save_pretrained

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biases": ("qwen3", {"head_dim": 32, "attention_bias": True}),
}
LENGTHS = [37, 1, 120, 5]


def their_model(model_type: str, changes: dict[str, Any]) -> Any:
    """A tiny random model whose every parameter matters: biases and norms are random too."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if p.dim() == 1 else 0.15 * noise)
    return model


def our_logits(model: Decoder, sequences: list[Tensor]) -> list[Tensor]:
    """Logits of every token, all sequences in one packed forward."""
    lengths = [len(sequence) for sequence in sequences]
    metadata = AttentionMetadata.packed(lengths)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    attention = PackedAttention(metadata, select_backend(), group, torch.device("cpu"))
    with torch.no_grad():
        positions = torch.from_numpy(metadata.positions)
        hidden = model(torch.cat(sequences), positions, attention)
        return list(model.logits(hidden).split(lengths))


def their_logits(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(sequence.unsqueeze(0)).logits[0] for sequence in sequences]


def largest_gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    scale = max(t.abs().max().item() for t in theirs)
    gaps = [(a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    return max(gaps) / scale


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 320, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES.values(), ids=FAMILIES)
def test_logits_equal_transformers_both_ways(
    model_type: str, changes: dict[str, Any], sequences: list[Tensor], tmp_path: Path
) -> None:
    theirs = their_model(model_type, changes)
    theirs.save_pretrained(tmp_path / "theirs")
    model = Decoder(DecoderConfig.from_folder(tmp_path / "theirs"))
    load_weights(model, tmp_path / "theirs")
    expected = their_logits(theirs, sequences)
    assert largest_gap(our_logits(model, sequences), expected) < 1e-5

    save_pretrained(model, tmp_path / "ours", max_shard_bytes=100_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == dict(again.named_parameters()).keys()
    for name, p in again.named_parameters():
        assert torch.equal(p, parameters[name]), name
    # Not to the bit: stock matrix products depend on where in memory equal weights lie.
    assert largest_gap(their_logits(again, sequences), expected) < 1e-5
    assert again.generation_config.eos_token_id == theirs.generation_config.eos_token_id


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", {"rope_theta": 20000.0}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama-llama3-rope", {"rope_scaling": None}),
    ],
)
def test_the_bound_is_tight_enough_to_see_a_wrong_setting(
    name: str, wrong: dict[str, Any], sequences: list[Tensor], tmp_path: Path
) -> None:
    """The control: one setting off, and the comparison above would fail."""
    theirs = their_model(*FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    right = DecoderConfig.from_folder(tmp_path)
    values = {field: getattr(right, field) for field in DecoderConfig.__dataclass_fields__}
    model = Decoder(DecoderConfig(**{**values, **wrong}))
    load_weights(model, tmp_path)
    assert largest_gap(our_logits(model, sequences), their_logits(theirs, sequences)) > 1e-4


def test_a_bfloat16_model_keeps_its_bits(tmp_path: Path) -> None:
    theirs = their_model("qwen2", {}).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    model = Decoder(DecoderConfig.from_folder(tmp_path / "theirs"), torch.bfloat16)
    load_weights(model, tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == torch.bfloat16
    parameters = dict(theirs.named_parameters())
    for name, p in again.named_parameters():
        assert torch.equal(p, parameters[name]), name
