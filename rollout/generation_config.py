"""What a model folder's generation_config.json says about sampling, in our fields' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAPPED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "num_return_sequences": "n",
}
"""Their name -> ours, where both mean the same."""

REFUSED = {
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Fields that change what is sampled and that this engine has not -> the value that is off."""


def sampling_fields(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Fields for `SamplingParams` from a model folder, a generation_config.json or its content.

    Without `do_sample: true` the temperature is 0, as transformers decodes greedily then. Only
    what the file says is read: defaults of transformers, such as its top_k of 50, are not added.
    A field of `REFUSED` that is on is a ValueError naming it. Fields without influence on single
    samples (ids, caches, speculation, beams) are ignored; so is `max_length`, as `max_tokens`
    left open already means up to the context.
    """
    content = source if isinstance(source, Mapping) else _read(Path(source))
    for name, off in REFUSED.items():
        value = content.get(name)
        # Not by truth: token id 0 can be forced, and a scale of 0 is not a scale of 1.
        empty = value is None or value is False or value == [] or value == {}
        if not empty and value != off:
            raise ValueError(
                f"generation_config: {name} = {value!r} would change what is sampled, and there "
                f"is no such parameter here; set it to {json.dumps(off)} if you can do without"
            )
    fields = {
        ours: content[theirs]
        for theirs, ours in MAPPED.items()
        if content.get(theirs) is not None
    }
    if not content.get("do_sample"):
        fields["temperature"] = 0.0
    return fields


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "generation_config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; pass a model folder that has a generation_config.json, the "
            "file itself or a mapping"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content
