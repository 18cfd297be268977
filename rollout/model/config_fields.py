"""What each model family fixes, and which config.json fields may be passed over.

A field is in exactly one of three states: read by `DecoderConfig` (`READ`); allowed only with
values that change nothing (`NEUTRAL`); or without influence on the forward pass (`BENIGN`).
Anything else is refused, unless it is null.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.model.files import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """What `model_type` decides. Defaults are those transformers takes when the field is absent."""

    model_type: str
    architecture: str
    fixed_bias: tuple[bool, bool] | None  # (qkv_bias, o_bias); None: attention_bias says both
    has_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    num_key_value_heads: int | None = None  # None: num_attention_heads
    sliding_window: int | None = None
    window_off: Mapping[str, Any] = field(default_factory=dict)  # what config.json says for "none"


_QWEN_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": None}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", None, has_mlp_bias=True),
        Family(
            "mistral",
            "MistralForCausalLM",
            (False, False),
            num_key_value_heads=8,
            sliding_window=4096,
            window_off={"sliding_window": None},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            (True, False),
            num_key_value_heads=32,
            window_off=_QWEN_WINDOW_OFF,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            None,
            qk_norm=True,
            head_dim=128,
            num_key_value_heads=32,
            window_off=_QWEN_WINDOW_OFF,
        ),
    )
}

READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters attention_bias mlp_bias tie_word_embeddings initializer_range bos_token_id "
    "eos_token_id pad_token_id architectures sliding_window use_sliding_window "
    "max_window_layers layer_types".split()
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "dropout": (0, None),
    "resid_pdrop": (0, None),
    "embd_pdrop": (0, None),
    "neftune_noise_alpha": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "chunk_size_feed_forward": (0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}

BOOKKEEPING = frozenset(
    "_name_or_path name_or_path transformers_version _commit_hash torch_dtype dtype use_cache "
    "pretraining_tp tokenizer_class prefix torchscript use_bfloat16 tf_legacy_loss "
    "task_specific_params finetuning_task id2label label2id num_labels problem_type "
    "output_hidden_states output_attentions output_scores return_dict return_dict_in_generate "
    "is_decoder cross_attention_hidden_size decoder_start_token_id sep_token_id unk_token_id "
    "_attn_implementation attn_implementation _attn_implementation_autoset use_flash_attn "
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version "
    "max_sequence_length".split()
)

# Old configs carried them. Sampling settings are never inherited from a model folder.
GENERATION = frozenset(
    "do_sample temperature top_k top_p typical_p epsilon_cutoff eta_cutoff min_length "
    "max_length max_new_tokens early_stopping num_beams num_beam_groups diversity_penalty "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)

BENIGN = BOOKKEEPING | GENERATION


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a config's values; a refusal names source, field and value."""

    values: Mapping[str, Any]
    source: str

    def refusal(self, name: str, reason: str) -> UnsupportedModel:
        if name not in self.values:
            return UnsupportedModel(f"{self.source}: {name} is missing; {reason}")
        return UnsupportedModel(f"{self.source}: {name} = {self.values[name]!r}; {reason}")

    def size(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(name, "it must be a positive integer")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        return None if self.values.get(name, default) is None else self.size(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, "it must be a number")
        if not math.isfinite(value):
            raise self.refusal(name, "it must be finite")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.refusal(name, "it must be true or false")
        return value

    def token(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.refusal(name, "it must be a token id or null")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in found):
            raise self.refusal(name, "it must be a token id, a list of them, or null")
        return tuple(found)


def check_fields(fields: Fields, family: Family) -> None:
    """UnsupportedModel for the first field that would change what the model computes."""
    values, refusal = fields.values, fields.refusal
    for name, value in values.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                allowed = " or ".join(repr(each) for each in NEUTRAL[name])
                raise refusal(name, f"only {allowed} is supported")
        elif name not in READ and name not in BENIGN and value is not None:
            raise refusal(name, "a field unknown here, which may change what the model computes")
    architectures = values.get("architectures")
    if architectures and architectures != [family.architecture]:
        raise refusal("architectures", f"only [{family.architecture!r}] is supported")
    if family.fixed_bias is not None and values.get("attention_bias"):
        raise refusal("attention_bias", f"{family.model_type} has no such switch")
    if values.get("mlp_bias") and not family.has_mlp_bias:
        raise refusal("mlp_bias", f"{family.model_type} has no such switch")
    _check_window(fields, family)


def _check_window(fields: Fields, family: Family) -> None:
    """A window as long as the context hides nothing; a shorter one that is on is refused."""
    values, refusal = fields.values, fields.refusal
    kinds = values.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise refusal("layer_types", "only 'full_attention' layers are supported")
    window = values.get("sliding_window", family.sliding_window)
    switched_by_field = "use_sliding_window" in family.window_off
    if window is None or (switched_by_field and not values.get("use_sliding_window", False)):
        return
    layers = values.get("num_hidden_layers")
    first_windowed = values.get("max_window_layers", 28)
    if switched_by_field and isinstance(layers, int) and first_windowed >= layers:
        return
    context = values.get("max_position_embeddings")
    if not isinstance(context, int) or not isinstance(window, int) or window < context:
        raise refusal(
            "sliding_window",
            f"a sliding window shorter than the context ({context}) is not supported",
        )
