"""SamplingParams: what is accepted, what is stored, what is refused and in which words."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest

from rollout.generation_config import MAPPED, REFUSED
from rollout.sampling import SamplingParams, checked_fields, merged_params

EVERY_FIELD: dict[str, object] = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
    "frequency_penalty": -0.5, "presence_penalty": 0.5, "logit_bias": {4: 1.0, "3": -2},
    "allowed_token_ids": [1, 2], "bad_words": ["no", [3, 4]], "max_tokens": 9, "min_tokens": 2,
    "stop": "end", "include_stop_str_in_output": True, "detokenize": True,
    "stop_token_ids": [7], "ignore_eos": True, "seed": 3, "logprobs": 0, "prompt_logprobs": 5,
}
STORED = {
    **EVERY_FIELD, "logit_bias": ((3, -2.0), (4, 1.0)), "allowed_token_ids": (1, 2),
    "bad_words": ("no", (3, 4)), "stop": ("end",), "stop_token_ids": (7,),
}


def test_every_field_is_stored_hashable_and_survives_a_pickle():
    params = SamplingParams(**EVERY_FIELD)
    assert set(EVERY_FIELD) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert {name: getattr(params, name) for name in EVERY_FIELD} == STORED
    assert {params: 1}[pickle.loads(pickle.dumps(params))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 1


@pytest.mark.parametrize("name", EVERY_FIELD)
def test_each_field_can_be_replaced_and_tells_params_apart(name):
    changed = dataclasses.replace(SamplingParams(max_tokens=8), **{name: EVERY_FIELD[name]})
    assert getattr(changed, name) == STORED[name]
    assert changed != SamplingParams(max_tokens=8)
    assert dataclasses.replace(changed) == changed


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("stop", ["a", "b"], ("a", "b")), ("stop", (), ()),
        ("stop_token_ids", np.array([3, 4]), (3, 4)), ("stop_token_ids", {5}, (5,)),
        ("logit_bias", [(9, 1), [2, 0.5]], ((2, 0.5), (9, 1.0))),
        ("logit_bias", {np.int64(1): np.float32(0.5)}, ((1, 0.5),)),
        ("bad_words", [np.array([1, 2]), "x"], ((1, 2), "x")),
        ("allowed_token_ids", range(3), (0, 1, 2)), ("max_tokens", 0, 0), ("top_k", -1, -1),
        ("temperature", 1e-5, 1e-5),
    ],
)
def test_what_is_accepted(name, given, stored):
    """Plain ints and floats, whatever number type they came in: repr tells the types apart."""
    assert repr(getattr(SamplingParams(**{name: given}), name)) == repr(stored)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", True), ("n", 1.5), ("n", "2"),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"),
        ("temperature", True), ("temperature", 1e-40), ("temperature", None),
        ("temperature", 10**400), ("top_p", 10**400), ("logit_bias", {3: 10**400}),
        ("top_p", 1.1), ("top_p", -0.1), ("top_p", float("nan")), ("top_p", "0.5"),
        ("top_k", -2), ("top_k", True), ("top_k", 2.5), ("top_k", None),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", False),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", True),
        ("repetition_penalty", float("inf")),
        ("frequency_penalty", 2.1), ("frequency_penalty", "0"), ("presence_penalty", -2.1),
        ("presence_penalty", float("nan")),
        ("logit_bias", {3: float("nan")}), ("logit_bias", {3: float("inf")}),
        ("logit_bias", {"x": 1.0}), ("logit_bias", {True: 1.0}), ("logit_bias", {3: True}),
        ("logit_bias", {3: "1"}), ("logit_bias", [3]), ("logit_bias", {3: 1.0, "3": 1.0}),
        ("logit_bias", 3), ("logit_bias", "3:1"), ("logit_bias", {1.5: 1.0}),
        ("allowed_token_ids", []), ("allowed_token_ids", 3), ("allowed_token_ids", [True]),
        ("allowed_token_ids", [1.0]), ("allowed_token_ids", "12"),
        ("bad_words", "word"), ("bad_words", [""]), ("bad_words", [[]]), ("bad_words", [3]),
        ("bad_words", [[True]]), ("bad_words", [{1: 2}]), ("bad_words", [["a"]]),
        ("max_tokens", True), ("max_tokens", 3.0), ("max_tokens", "3"),
        ("min_tokens", -1), ("min_tokens", True), ("min_tokens", None),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [3]), ("stop", None), ("stop", 3),
        ("include_stop_str_in_output", 1), ("detokenize", "yes"), ("ignore_eos", 0),
        ("stop_token_ids", 3), ("stop_token_ids", [True]), ("stop_token_ids", ["a"]),
        ("seed", -1), ("seed", 2**63), ("seed", True), ("seed", 1.0),
        ("logprobs", -1), ("logprobs", True), ("logprobs", 1.5), ("prompt_logprobs", -1),
        ("prompt_logprobs", False),
    ],
)
def test_bad_values_name_field_and_value(name, value):
    with pytest.raises(ValueError, match=rf"SamplingParams\.{name} must be .*, got ") as raised:
        SamplingParams(**{name: value})
    assert repr(value).strip("[]") in str(raised.value)  # of several words, the wrong one


def test_min_tokens_above_max_tokens():
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=0).max_tokens == 0  # the prompt is rejected


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, set()), ({"temperature": 0}, {"greedy"}), ({"top_p": 0.5}, {"filters"}),
        ({"top_k": 1}, {"filters"}), ({"min_p": 0.5}, {"filters"}), ({"top_k": -1}, set()),
        ({"repetition_penalty": 1.1}, {"edits"}), ({"repetition_penalty": 1}, set()),
        ({"frequency_penalty": 0.1}, {"edits"}), ({"presence_penalty": -0.1}, {"edits"}),
        ({"logit_bias": {1: 1}}, {"edits"}), ({"allowed_token_ids": [1]}, {"edits"}),
        ({"bad_words": ["a"]}, {"edits"}), ({"min_tokens": 1}, {"edits"}),
        ({"stop": "a"}, {"needs_text"}), ({"detokenize": True}, {"needs_text"}),
        ({"stop_token_ids": [1], "logprobs": 3}, set()),
    ],
)
def test_what_is_on(fields, on):
    params = SamplingParams(**fields)
    names = ("greedy", "filters", "edits", "needs_text")
    assert {name for name in names if getattr(params, name)} == on


def test_unknown_fields_name_the_nearest():
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        checked_fields({"max_token": 3})
    with pytest.raises(TypeError, match="known: n, temperature"):
        SamplingParams.from_fields({"zzz": 1})
    assert SamplingParams.from_fields({"n": 2, "stop_token_ids": [3]}).stop_token_ids == (3,)


def test_fields_are_merged_into_params():
    assert merged_params(None, {"n": 2}) == SamplingParams(n=2)
    each = [SamplingParams(seed=1), SamplingParams(seed=2, n=3)]
    merged = merged_params(each, {"n": 4})
    assert merged == [SamplingParams(seed=1, n=4), SamplingParams(seed=2, n=4)]
    assert merged_params(each[0], {}) == each[0]
    with pytest.raises(TypeError, match="did you mean 'top_p'"):
        merged_params(each, {"topp": 0.5})


# ------------------------------------------------------------------ generation_config.json

CONTENT = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05,
    "repetition_penalty": 1.05, "max_new_tokens": 64, "min_new_tokens": 2,
    "stop_strings": ["<end>"], "bad_words_ids": [[3], [4, 5]], "num_return_sequences": 2,
    "bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "5.0", "use_cache": True,
    "typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": None,
    "forced_eos_token_id": None, "cache_implementation": "static", "max_length": 4096,
    "begin_suppress_tokens": [], "length_penalty": 1.0,
}
EXPECTED = SamplingParams(
    n=2, temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, max_tokens=64,
    min_tokens=2, stop=("<end>",), bad_words=((3,), (4, 5)),
)


def test_a_generation_config_is_read_from_folder_file_or_mapping(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(CONTENT))
    for source in (CONTENT, tmp_path, str(tmp_path), file):
        assert SamplingParams.from_generation_config(source) == EXPECTED


def test_overrides_go_before_the_file():
    params = SamplingParams.from_generation_config(CONTENT, temperature=1.0, seed=5)
    assert params == dataclasses.replace(EXPECTED, temperature=1.0, seed=5)
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_generation_config(CONTENT, temprature=1.0)


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_without_do_sample_it_is_greedy(do_sample):
    """As transformers decodes then; the rest of the file is kept for an override."""
    content = {"temperature": 0.6, "top_p": 0.9, **do_sample}
    assert SamplingParams.from_generation_config(content) == SamplingParams(
        temperature=0.0, top_p=0.9
    )
    assert SamplingParams.from_generation_config(content, temperature=0.6).temperature == 0.6


def test_defaults_of_the_library_are_not_added():
    """transformers has a top_k of 50 for a file that names none."""
    assert SamplingParams.from_generation_config({"do_sample": True}) == SamplingParams()


ON = {
    "num_beams": 4, "num_beam_groups": 2, "typical_p": 0.9, "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4, "penalty_alpha": 0.6, "no_repeat_ngram_size": 3, "min_length": 5,
    "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2, "guidance_scale": 1.5,
    "diversity_penalty": 0.5, "token_healing": True, "max_time": 3.0, "top_h": 0.4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_sampling_is_refused_by_name(name):
    value = ON.get(name, [5])
    with pytest.raises(ValueError, match=f"{name} = .* would change what is sampled"):
        SamplingParams.from_generation_config({**CONTENT, name: value})
    for off in (REFUSED[name], None):
        assert SamplingParams.from_generation_config({**CONTENT, name: off}) == EXPECTED


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id", "guidance_scale"])
def test_a_zero_is_off_only_where_zero_means_off(name):
    """Token id 0 is a token."""
    with pytest.raises(ValueError, match=f"{name} = 0 would change what is sampled"):
        SamplingParams.from_generation_config({**CONTENT, name: 0})
    assert SamplingParams.from_generation_config({**CONTENT, "min_length": 0}) == EXPECTED


def test_bad_values_of_a_file_name_our_field():
    with pytest.raises(ValueError, match=r"SamplingParams\.top_p must be .*, got 1\.5"):
        SamplingParams.from_generation_config({"top_p": 1.5})


def test_unusable_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json does not exist; pass"):
        SamplingParams.from_generation_config(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is no valid JSON"):
        SamplingParams.from_generation_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        SamplingParams.from_generation_config(file)


WITHOUT_INFLUENCE = {
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
    *("assistant_lookbehind", "target_lookbehind", "is_assistant", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("speculation_type", "use_mtp", "bos_token_id", "decoder_start_token_id", "eos_token_id"),
    *("pad_token_id", "cache_config", "cache_implementation", "max_cache_len", "use_cache"),
    *("compile_config", "continuous_batching_config", "disable_compile", "prefill_chunk_size"),
    *("low_memory", "early_stopping", "length_penalty", "renormalize_logits", "max_length"),
    *("remove_invalid_values", "output_attentions", "output_hidden_states", "output_logits"),
    *("output_scores", "return_dict_in_generate", "transformers_version", "_from_model_config"),
}


def test_every_field_of_transformers_is_decided_on():
    """A field that a new version brings is not dropped silently: this test names it."""
    transformers = pytest.importorskip("transformers")
    theirs = set(vars(transformers.GenerationConfig()))
    assert theirs - WITHOUT_INFLUENCE - set(REFUSED) - set(MAPPED) == {"do_sample"}
    assert not WITHOUT_INFLUENCE & (set(REFUSED) | set(MAPPED))


def test_scalars_of_other_libraries_become_plain():
    """A length computed with NumPy is as good as an int; what is stored is plain and hashes so."""
    given = SamplingParams(
        n=np.int32(2), max_tokens=np.int64(3), seed=np.int64(4), temperature=np.float32(0.5)
    )
    assert given == SamplingParams(n=2, max_tokens=3, seed=4, temperature=0.5)
    kinds = [type(v) for v in (given.n, given.max_tokens, given.seed, given.temperature)]
    assert kinds == [int, int, int, float]
    with pytest.raises(ValueError, match=r"SamplingParams\.n must be"):
        SamplingParams(n=np.float32(2))


@pytest.mark.parametrize("field", ["top_k", "logprobs", "prompt_logprobs"])
def test_counts_that_no_column_can_hold_are_refused(field):
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}"):
        SamplingParams(**{field: 2**63})


def test_params_of_the_wrong_kind_are_named():
    for wrong in ({"max_tokens": 3}, [None], [SamplingParams(), {"n": 2}]):
        with pytest.raises(TypeError, match="params must be SamplingParams"):
            merged_params(wrong, {})
