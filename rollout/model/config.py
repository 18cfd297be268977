"""DecoderConfig: the shape of a decoder, read from a Hugging Face config.json.

Reading is strict. A field that would change the numbers and is not honoured here is refused by
name, and so is a field nobody here has heard of; fields known to leave the forward pass alone are
listed in `config_fields.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout.model.config_fields import FAMILIES, Family, Fields, check_fields
from rollout.model.files import UnsupportedModel, read_json


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's rotary frequencies: low ones divided by `factor`, high ones kept, a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be above 0 and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                "original_max_position_embeddings must be positive, got "
                f"{self.original_max_position_embeddings}"
            )


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the forward pass depends on, apart from the weights.

    Token ids and `generation_config` (the folder's generation_config.json, verbatim) change no
    number; they travel along so that what is saved generates as what was loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    generation_config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        family = FAMILIES.get(self.model_type)
        if family is None:
            raise ValueError(
                f"model_type must be one of {', '.join(FAMILIES)}, got {self.model_type!r}"
            )
        self._check_family(family)

    def _check_family(self, family: Family) -> None:
        """What the family's config.json cannot say would be saved as something else."""
        if family.fixed_bias is not None:
            if (self.qkv_bias, self.o_bias) != family.fixed_bias:
                raise ValueError(
                    f"{self.model_type} has qkv_bias, o_bias = {family.fixed_bias}, got "
                    f"{(self.qkv_bias, self.o_bias)}"
                )
        elif self.qkv_bias != self.o_bias:
            raise ValueError(
                f"{self.model_type} has qkv_bias equal to o_bias, got "
                f"{(self.qkv_bias, self.o_bias)}"
            )
        if self.mlp_bias and not family.has_mlp_bias:
            raise ValueError(f"{self.model_type} has no mlp_bias, got {self.mlp_bias}")
        if self.qk_norm != family.qk_norm:
            raise ValueError(f"{self.model_type} has qk_norm={family.qk_norm}, got {self.qk_norm}")

    @classmethod
    def from_folder(cls, path: str | Path) -> "DecoderConfig":
        """Reads `path/config.json` and, where there is one, `path/generation_config.json`.

        The EOS ids are those of generation_config.json if it names any. CheckpointError if a file
        is damaged or config.json is missing, UnsupportedModel as in `from_dict`.
        """
        folder = Path(path)
        config = cls.from_dict(read_json(folder / "config.json"), str(folder / "config.json"))
        file = folder / "generation_config.json"
        if not file.exists():
            return config
        generation = read_json(file)
        eos = Fields(generation, str(file)).tokens("eos_token_id")
        return replace(
            config, eos_token_ids=eos or config.eos_token_ids, generation_config=generation
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config.json") -> "DecoderConfig":
        """Reads a Hugging Face config. UnsupportedModel names `source`, the field and its value.

        An absent field means what transformers takes it to mean for this family; the fields
        without which there is no model must be there. Rotary settings may be in the old form
        (`rope_theta`, `rope_scaling`) or in that of transformers 5 (`rope_parameters`); both at
        once must agree.
        """
        fields = Fields(values, source)
        model_type = values.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise fields.refusal("model_type", f"only {', '.join(FAMILIES)} are supported")
        check_fields(fields, family)
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads = fields.optional_size("num_key_value_heads", family.num_key_value_heads)
        head_dim = fields.optional_size("head_dim", family.head_dim)
        if head_dim is None and hidden % heads:
            raise fields.refusal("hidden_size", f"without head_dim {heads} heads must divide it")
        max_positions = fields.size("max_position_embeddings")
        theta, scaling = _read_rope(fields, max_positions)
        attention_bias = family.fixed_bias or (fields.flag("attention_bias"),) * 2
        try:
            return cls(
                model_type=family.model_type,
                vocab_size=fields.size("vocab_size"),
                hidden_size=hidden,
                intermediate_size=fields.size("intermediate_size"),
                num_hidden_layers=fields.size("num_hidden_layers"),
                num_attention_heads=heads,
                num_key_value_heads=kv_heads or heads,
                head_dim=head_dim or hidden // heads,
                max_position_embeddings=max_positions,
                rms_norm_eps=fields.number("rms_norm_eps"),
                rope_theta=theta,
                rope_scaling=scaling,
                qkv_bias=attention_bias[0],
                o_bias=attention_bias[1],
                mlp_bias=fields.flag("mlp_bias"),
                qk_norm=family.qk_norm,
                tie_word_embeddings=fields.flag("tie_word_embeddings"),
                initializer_range=fields.number("initializer_range", 0.02),
                bos_token_id=fields.token("bos_token_id"),
                eos_token_ids=fields.tokens("eos_token_id"),
                pad_token_id=fields.token("pad_token_id"),
            )
        except ValueError as error:
            raise UnsupportedModel(f"{source}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """A config.json for transformers, with the rotary settings in both its forms."""
        family = FAMILIES[self.model_type]
        eos = list(self.eos_token_ids)
        scaling = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **asdict(self.rope_scaling)}
        rope = {**(scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta}
        values: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.model_type,
        }
        values |= {name: getattr(self, name) for name in _SIZES}
        values |= {
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self.pad_token_id,
            "use_cache": True,
        }
        if family.fixed_bias is None:
            values["attention_bias"] = self.qkv_bias
        if family.has_mlp_bias:
            values["mlp_bias"] = self.mlp_bias
        return values | dict(family.window_off)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _read_rope(fields: Fields, max_positions: int) -> tuple[float, Llama3RopeScaling | None]:
    theta, found = None, []
    if fields.values.get("rope_theta") is not None:
        theta = fields.number("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.values.get(name)
        if not value:
            continue
        if not isinstance(value, Mapping):
            raise fields.refusal(name, "it must be an object or null")
        inner_theta = value.get("rope_theta")
        if inner_theta is not None:
            if theta is not None and theta != inner_theta:
                raise fields.refusal(name, f"its rope_theta contradicts the other one, {theta}")
            theta = Fields(value, f"{fields.source}: {name}").number("rope_theta")
        found.append((name, _read_scaling(fields, name, value, max_positions)))
    if len({scaling for _, scaling in found}) > 1:
        raise fields.refusal("rope_scaling", "it contradicts rope_parameters")
    return 10_000.0 if theta is None else theta, found[0][1] if found else None


def _read_scaling(
    fields: Fields, name: str, value: Mapping[str, Any], max_positions: int
) -> Llama3RopeScaling | None:
    kind = value.get("rope_type", value.get("type", "default"))
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "llama3":
        known |= set(_LLAMA3)
    elif kind != "default":
        raise fields.refusal(name, f"only rope_type 'default' and 'llama3', not {kind!r}")
    if value.get("type", kind) != kind:
        raise fields.refusal(name, "its type contradicts its rope_type")
    if value.get("partial_rotary_factor") not in (None, 1):
        raise fields.refusal(name, "a partial rotary embedding is not supported")
    unknown = sorted(key for key in value if key not in known and value[key] is not None)
    if unknown:
        raise fields.refusal(name, f"{', '.join(unknown)} is not supported with rope_type {kind!r}")
    if kind == "default":
        return None
    inner = Fields(value, f"{fields.source}: {name}")
    try:
        return Llama3RopeScaling(
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            inner.size("original_max_position_embeddings", max_positions),
        )
    except ValueError as error:
        raise UnsupportedModel(f"{fields.source}: {name}: {error}") from error
