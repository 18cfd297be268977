"""The tokenizer that a GGUF file describes, written as tokenizer.json and its companions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rollout.model.files import UnsupportedModel, write_json

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole in text
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_MORE_EOS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """Byte-level BPE. `splitter` is llama.cpp's name for how text is cut before merging."""

    vocabulary: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    token_types: tuple[int, ...]
    splitter: str
    special: Mapping[str, int]  # "bos" -> id
    eos_token_ids: tuple[int, ...]
    chat_template: str | None

    @classmethod
    def read(cls, metadata: Mapping[str, Any], source: str) -> "GgufTokenizer":
        """From a GGUF file's key-value pairs; UnsupportedModel for other kinds."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise UnsupportedModel(
                f"{source}: tokenizer.ggml.model = {kind!r} is not supported, only 'gpt2'"
            )
        splitter = metadata.get("tokenizer.ggml.pre", "default")
        if splitter not in _SPLITTERS:
            raise UnsupportedModel(
                f"{source}: tokenizer.ggml.pre = {splitter!r} is not supported, only "
                f"{', '.join(_SPLITTERS)}"
            )
        for flag in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            if metadata.get(f"tokenizer.ggml.{flag}"):
                raise UnsupportedModel(f"{source}: tokenizer.ggml.{flag} = true is not supported")
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
            if key not in metadata:
                raise UnsupportedModel(f"{source}: {key} is missing, so there is no tokenizer")
        tokens = metadata["tokenizer.ggml.tokens"]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise UnsupportedModel(f"{source}: tokenizer.ggml.tokens lists a token twice")
        special = {
            name: metadata[f"tokenizer.ggml.{key}_token_id"]
            for name, key in _SPECIAL_IDS.items()
            if f"tokenizer.ggml.{key}_token_id" in metadata
        }
        ends = [special.get("eos"), *(metadata.get(key) for key in _MORE_EOS)]
        pairs = (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
        return cls(
            vocabulary=vocabulary,
            merges=tuple((left, right) for left, right in pairs),
            token_types=tuple(metadata["tokenizer.ggml.token_type"]),
            splitter=splitter,
            special=special,
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    def write(self, folder: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
        self._backend().save(str(folder / "tokenizer.json"))
        names = list(self.vocabulary)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        settings |= {f"{name}_token": names[index] for name, index in self.special.items()}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        write_json(folder / "tokenizer_config.json", settings)
        generation: dict[str, Any] = {"eos_token_id": list(self.eos_token_ids)}
        for name in ("bos", "pad"):
            if name in self.special:
                generation[f"{name}_token_id"] = self.special[name]
        write_json(folder / "generation_config.json", generation)

    def _backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(dict(self.vocabulary), list(self.merges)))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*_SPLITTERS[self.splitter], byte_level])
        backend.decoder = decoders.ByteLevel()
        for token, kind in zip(self.vocabulary, self.token_types, strict=True):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            if kind == _CONTROL:
                backend.add_special_tokens([added])
            elif kind == _USER_DEFINED:
                backend.add_tokens([added])
        return backend


_SPLITTERS: Mapping[str, list[pre_tokenizers.PreTokenizer]] = {
    "default": [],
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
}
"""What each splitter does before GPT-2's regular expression, which all of them share."""
