"""DecoderConfig: what is read, what is refused and how, and what transformers makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.model.config import DecoderConfig, Llama3RopeScaling
from rollout.model.files import CheckpointError, UnsupportedModel

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B_V0_3 = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
PUBLISHED = {
    "llama3.2": LLAMA_3_2_1B,
    "smollm2": SMOLLM2_135M,
    "qwen2.5": QWEN2_5_0_5B,
    "qwen3": QWEN3_0_6B,
    "mistral": MISTRAL_7B_V0_3,
}

each_published = pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED)


def minimal(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    values.update(changes)
    return values


def test_llama_3_2_in_every_field() -> None:
    config = DecoderConfig.from_dict(LLAMA_3_2_1B)
    assert config == DecoderConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


@pytest.mark.parametrize(
    ("values", "qkv_bias", "o_bias", "qk_norm", "head_dim"),
    [
        (SMOLLM2_135M, False, False, False, 64),
        (QWEN2_5_0_5B, True, False, False, 64),
        (QWEN3_0_6B, False, False, True, 128),
        (MISTRAL_7B_V0_3, False, False, False, 128),
        (minimal(attention_bias=True), True, True, False, 16),
    ],
)
def test_families_differ_in_biases_and_norms(
    values: dict[str, Any], qkv_bias: bool, o_bias: bool, qk_norm: bool, head_dim: int
) -> None:
    config = DecoderConfig.from_dict(values)
    found = (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim)
    assert found == (qkv_bias, o_bias, qk_norm, head_dim)


@each_published
def test_written_config_reads_back_equal(values: dict[str, Any]) -> None:
    config = DecoderConfig.from_dict(values)
    written = json.loads(json.dumps(config.to_dict()))
    assert DecoderConfig.from_dict(written) == config
    for name in values.keys() & written.keys() - {"sliding_window"}:
        assert written[name] == values[name], name


@each_published
def test_old_and_new_rotary_forms_agree(values: dict[str, Any]) -> None:
    new = {k: v for k, v in values.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {
        **(values.get("rope_scaling") or {"rope_type": "default"}),
        "rope_theta": values["rope_theta"],
    }
    assert DecoderConfig.from_dict(new) == DecoderConfig.from_dict(values)


def test_rope_type_may_be_spelled_type() -> None:
    scaling = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}
    old, new = minimal(rope_scaling=scaling), minimal(rope_scaling=LLAMA3)
    assert DecoderConfig.from_dict(old) == DecoderConfig.from_dict(new)


def test_a_window_that_hides_nothing_is_accepted() -> None:
    assert DecoderConfig.from_dict(minimal("mistral", sliding_window=256))
    assert DecoderConfig.from_dict(
        minimal("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    )


@pytest.mark.parametrize(
    ("field", "value", "base"),
    [
        ("model_type", "gpt2", minimal()),
        ("model_type", None, minimal()),
        ("architectures", ["LlamaForSequenceClassification"], minimal()),
        ("hidden_act", "gelu", minimal()),
        ("attention_dropout", 0.1, minimal()),
        ("sliding_window", 255, minimal("mistral")),
        ("sliding_window", 8, minimal("qwen3", use_sliding_window=True, max_window_layers=1)),
        ("layer_types", ["full_attention", "sliding_attention"], minimal("qwen2")),
        ("attention_bias", True, minimal("mistral")),
        ("attention_bias", True, minimal("qwen2")),
        ("mlp_bias", True, minimal("qwen3")),
        ("mlp_bias", 1, minimal()),
        ("partial_rotary_factor", 0.5, minimal()),
        ("rope_interleaved", True, minimal()),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, minimal()),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, minimal()),
        ("rope_scaling", {**LLAMA3, "attention_factor": 0.9}, minimal()),
        ("rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}, minimal()),
        ("rope_scaling", LLAMA3, minimal(rope_parameters={"rope_type": "default"})),
        ("rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}, minimal(rope_theta=1e4)),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}, minimal()),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, minimal()),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Mine"}, minimal()),
        ("final_logit_softcapping", 30.0, minimal()),
        ("num_local_experts", 8, minimal()),
        ("rms_norm_eps", "1e-5", minimal()),
        ("rms_norm_eps", float("nan"), minimal()),
        ("num_hidden_layers", 2.0, minimal()),
        ("num_hidden_layers", 0, minimal()),
        ("vocab_size", True, minimal()),
        ("eos_token_id", "</s>", minimal()),
        ("tie_word_embeddings", "yes", minimal()),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(
    field: str, value: object, base: dict[str, Any]
) -> None:
    """F6: the message names the file, the field and the value."""
    with pytest.raises(UnsupportedModel) as caught:
        DecoderConfig.from_dict({**base, field: value}, "some/config.json")
    assert f"some/config.json: {field} = {value!r}" in str(caught.value)


def test_the_base_of_those_refusals_is_accepted() -> None:
    for model_type in ("llama", "qwen2", "qwen3"):
        DecoderConfig.from_dict(minimal(model_type))
    DecoderConfig.from_dict(minimal("mistral", sliding_window=None))
    DecoderConfig.from_dict(minimal(rope_scaling=LLAMA3))
    DecoderConfig.from_dict(minimal(unheard_of=None, temperature=0.3, _name_or_path="x"))


@pytest.mark.parametrize("field", sorted(minimal().keys() - {"num_key_value_heads"}))
def test_a_missing_necessary_field_is_named(field: str) -> None:
    values = minimal()
    del values[field]
    with pytest.raises(UnsupportedModel, match=f"{field} is missing"):
        DecoderConfig.from_dict(values)


def test_mistral_without_a_word_on_its_window_has_one() -> None:
    values = minimal("mistral", max_position_embeddings=32768)
    with pytest.raises(UnsupportedModel, match="sliding_window is missing"):
        DecoderConfig.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"model_type": "phi"}, "model_type"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"qk_norm": True}, "qk_norm"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen2"}, "qkv_bias"),
    ],
)
def test_inconsistent_construction_names_the_field(changes: dict[str, Any], name: str) -> None:
    values: dict[str, Any] = {**minimal(), "head_dim": 16, **changes}
    with pytest.raises(ValueError, match=name):
        DecoderConfig(**values)


def test_llama3_scaling_checks_itself() -> None:
    for values in ((0.5, 1.0, 4.0, 8192), (8.0, 4.0, 1.0, 8192), (8.0, 1.0, 4.0, 0)):
        with pytest.raises(ValueError, match="must be"):
            Llama3RopeScaling(*values)


def test_folder_takes_every_eos_of_generation_config(tmp_path: Path) -> None:
    """L10: generation_config.json's EOS ids count before those of config.json."""
    (tmp_path / "config.json").write_text(json.dumps(minimal(eos_token_id=2)))
    assert DecoderConfig.from_folder(tmp_path).eos_token_ids == (2,)
    generation = {"eos_token_id": [2, 7], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = DecoderConfig.from_folder(tmp_path)
    assert config.eos_token_ids == (2, 7)
    assert config.generation_config == generation
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert DecoderConfig.from_folder(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize("text", ['{"model_type": "lla', "[]", ""])
def test_a_damaged_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    """F6"""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        DecoderConfig.from_folder(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    """F6"""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        DecoderConfig.from_folder(tmp_path)


@each_published
def test_transformers_reads_what_is_written(values: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig.from_dict(values)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    original = transformers.AutoConfig.for_model(**values)
    silent = {"dtype", "max_window_layers", "is_llama_config", "rope_interleaved"}
    silent |= {"transformers.js_config", "transformers_version", "_name_or_path"}
    for name, value in original.to_dict().items():
        if name not in silent:
            assert theirs.to_dict()[name] == value, name
    assert DecoderConfig.from_dict(theirs.to_dict()) == config


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_fields_mean_what_transformers_takes_them_to_mean(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = minimal(model_type, num_attention_heads=32, sliding_window=None)
    del values["num_key_value_heads"]
    theirs = transformers.AutoConfig.for_model(**values)
    ours = DecoderConfig.from_dict(values)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 64 // 32)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.initializer_range == theirs.initializer_range
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    if model_type in ("llama", "qwen3"):
        assert ours.qkv_bias == theirs.attention_bias
