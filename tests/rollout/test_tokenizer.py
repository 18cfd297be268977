"""Tokenizer: ids as transformers gives them, sandboxed chat templates, every EOS id."""

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from rollout.model.files import CheckpointError
from rollout.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}\n"
    "    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "def f(x):\n    return x  # two  spaces\t",
    "Ünïcödé — 東京, emoji 🙂🇩🇪, zero\u200bwidth",
    "line\r\nline\n\n\nend ",
    "1234567890 3.14",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b",
    "\x00\x7f\ud7ff",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 7 + 5? <|im_end|>"},
    {"role": "assistant", "content": "12 \n"},
    {"role": "user", "content": "Ünïcödé?"},
]


def write_folder(folder: Path, **settings: Any) -> Path:
    """A small byte-level BPE with special tokens 0, 1, 2 and a post-processor that adds a BOS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["hello world, user and assistant return 12 two spaces"] * 4, trainer
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


def test_ids_and_text_equal_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    found = (ours.bos_token_id, ours.pad_token_id, ours.eos_token_ids)
    assert found == (theirs.bos_token_id, theirs.pad_token_id, (theirs.eos_token_id,))


@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_transformers(folder: Path, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False)
    assert ours.render_chat(CHAT, prompt) == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
    assert ours.apply_chat_template(CHAT, prompt) == ids


TEMPLATES = {
    "special tokens": "{{ bos_token }}{{ messages[0].content | trim }}{{ eos_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.role }};{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[3] | tojson(indent=2) }}",
    "undefined": "{% if tools %}tools{% endif %}{% if tools is none %}none{% endif %}"
    "{{ nothing_of_that_name }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "blocks": "  {% if true %}\n    kept\n  {% endif %}\nend\n",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_template_features_render_as_in_transformers(folder: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    ours = with_template(folder, template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=False
    )


def test_variables_reach_the_template(folder: Path) -> None:
    tokenizer = with_template(folder, "{% if enable_thinking %}<think>{% endif %}{{ tools }}")
    variables = {"enable_thinking": True, "tools": ["t"]}
    assert tokenizer.render_chat(CHAT, variables=variables) == "<think>['t']"
    assert tokenizer.render_chat(CHAT) == "None"


def test_todays_date_is_available(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ strftime_now('%Y') }}")
    assert int(tokenizer.render_chat(CHAT)) in (datetime.now().year, datetime.now().year - 1)


def test_a_template_that_objects_says_why(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.mro() }}",
    ],
)
def test_templates_run_in_a_sandbox(folder: Path, template: str) -> None:
    with pytest.raises(ValueError, match="unsafe"):
        with_template(folder, template).render_chat(CHAT)


def test_messages_are_not_changed(folder: Path) -> None:
    chat = [{"role": "user", "content": "x", "tool_calls": None}]
    Tokenizer.from_folder(folder).apply_chat_template(chat)
    assert chat == [{"role": "user", "content": "x", "tool_calls": None}]


def test_a_template_file_goes_before_the_config(folder: Path) -> None:
    assert with_template(folder, "from the file").render_chat(CHAT) == "from the file"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = write_folder(tmp_path / "model", chat_template=named)
    assert Tokenizer.from_folder(folder).render_chat(CHAT) == "yes"


def test_without_a_template_it_says_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_folder(folder).apply_chat_template(CHAT)


def test_every_eos_id_counts_and_the_first_file_that_names_one_decides(folder: Path) -> None:
    """L10: generation_config.json, else config.json, else tokenizer_config.json."""
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (2, 0)
    assert Tokenizer.from_folder(folder, eos_token_ids=[5]).eos_token_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = '</s>'"):
        Tokenizer.from_folder(folder)


def test_special_tokens_may_be_objects_or_in_their_own_file(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["bos_token"] = {"content": "<|im_start|>", "lstrip": False}
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (0,))


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path) -> None:
    """L12: how a tokenizer was used in training is no property of the text."""
    plain = Tokenizer.from_folder(folder).encode("hello world")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(backend.encode("hello world").ids) != len(plain)
    assert Tokenizer.from_folder(folder).encode("hello world") == plain


def test_saved_and_pickled_it_is_the_same(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder, eos_token_ids=[2, 0])
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    saved = Tokenizer.from_folder(tmp_path / "saved", eos_token_ids=[2, 0])
    for other in (saved, pickle.loads(pickle.dumps(tokenizer))):
        assert other.eos_token_ids == (2, 0)
        assert other.render_chat(CHAT) == tokenizer.render_chat(CHAT)
        for text in TEXTS:
            assert other.encode(text) == tokenizer.encode(text)


def test_transformers_reads_what_is_saved(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "saved").mkdir()
    ours = Tokenizer.from_folder(folder)
    ours.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text, add_special_tokens=True)
    assert theirs.apply_chat_template(CHAT, tokenize=False) == ours.render_chat(CHAT, False)


def test_a_missing_or_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    """F6"""
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"model: tokenizer\.json cannot be used"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text(text)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="the chat template cannot be parsed"):
        Tokenizer.from_folder(folder)
