"""Model folders in the Hugging Face form: load a decoder, save what transformers reads."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from rollout.model.config import DecoderConfig
from rollout.model.decoder import Decoder
from rollout.model.files import CheckpointError, whole_folder, write_json
from rollout.model.weight_files import WeightFiles, write_weights
from rollout.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class SavesAsDecoder(Protocol):
    """A module with Hugging Face parameter names and the config that describes them."""

    @property
    def config(self) -> DecoderConfig: ...

    def named_parameters(self) -> Any: ...


def load_pretrained(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Decoder, Tokenizer | None]:
    """The model of a local folder or, if there is no such folder, of a Hugging Face Hub id.

    Weights are converted to `dtype`. The tokenizer is None, with a warning, when the folder has no
    tokenizer.json. CheckpointError says in one sentence what is missing, damaged or not supported.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device={device!r}, but torch sees no CUDA device; use device='cpu'")
    folder = resolve_folder(path)
    model = Decoder(DecoderConfig.from_folder(folder), dtype, device)
    load_weights(model, folder)
    if (folder / "tokenizer.json").exists():
        return model, Tokenizer.from_folder(folder)
    warnings.warn(
        f"{folder} has no tokenizer.json, so token ids are all that goes in and out; transformers' "
        "AutoTokenizer(...).save_pretrained(folder) writes one",
        stacklevel=2,
    )
    return model, None


def resolve_folder(path: str | Path) -> Path:
    """`path` if it is a folder, else the local copy of the Hub repository of that name."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; a model is a folder with a config.json")
    if isinstance(path, Path) or not _HUB_ID.fullmatch(path):
        raise CheckpointError(f"{folder} does not exist")
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} is no folder here, and fetching it from the Hugging Face Hub failed: {cause}"
        ) from error


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copies the folder's weights into the model's parameters, in place, one tensor at a time.

    Names and shapes are checked before the first byte is written: a CheckpointError for a missing,
    unexpected or misshaped tensor leaves the model as it was. A tied model accepts a stored
    output projection only if it equals the embedding.
    """
    parameters = dict(model.named_parameters())
    files = WeightFiles.open(Path(folder))
    tied_head = _HEAD in files.shapes and _HEAD not in parameters and _EMBEDDING in parameters
    stored = {name for name in files.shapes if not _ROTARY_BUFFER.fullmatch(name)}
    if tied_head:
        stored.discard(_HEAD)
        _check_tied(files)
    for problem, names in (
        ("lacks", parameters.keys() - stored),
        ("has, unexpectedly,", stored - parameters.keys()),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{folder} {problem} the tensor {min(names)}{more}")
    for name, parameter in parameters.items():
        if files.shapes[name] != tuple(parameter.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {list(files.shapes[name])}, "
                f"config.json makes it {list(parameter.shape)}"
            )
    for name, tensor in files.read(list(parameters)):
        parameters[name].copy_(tensor)


def _check_tied(files: WeightFiles) -> None:
    stored: dict[str, Tensor] = {}
    if _EMBEDDING in files.shapes:
        stored = dict(files.read([_EMBEDDING, _HEAD]))
    if len(stored) == 2 and not torch.equal(stored[_EMBEDDING], stored[_HEAD]):
        raise CheckpointError(
            f"{files.folder}: config.json ties {_HEAD} to {_EMBEDDING}, but the stored tensors "
            "differ; set tie_word_embeddings to false if the stored projection is meant"
        )


def save_pretrained(
    model: SavesAsDecoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers and `load_pretrained` read with equal numbers.

    The folder appears whole or not at all; one that exists is replaced (files of other kinds in it
    stay). Without a `generation_config`, the one the model was loaded with is written again, or
    one that names the config's BOS, EOS and PAD ids. Nothing of the model is changed. A tied
    output projection is not stored. CheckpointError if the folder cannot be written.
    """
    parameters = [(name, p.detach()) for name, p in model.named_parameters()]
    if not parameters:
        raise CheckpointError("the model has no parameters to save")
    config = model.config
    generation = generation_config or config.generation_config or _generation_defaults(config)
    dtype = str(parameters[0][1].dtype).removeprefix("torch.")
    with whole_folder(Path(folder)) as staging:
        write_json(staging / "config.json", {**config.to_dict(), "dtype": dtype})
        write_json(staging / "generation_config.json", dict(generation))
        if tokenizer is not None:
            tokenizer.save(staging)
        write_weights(staging, parameters, max_shard_bytes)


def _generation_defaults(config: DecoderConfig) -> dict[str, Any]:
    values = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    return {name: value for name, value in values.items() if value is not None}
