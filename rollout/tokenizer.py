"""Tokenizer: text to ids and back, and chat templates, from the files of a model folder."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout.model.files import CheckpointError, read_json, write_json

_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of one model. Nothing in it changes after construction; it can be pickled.

    Ids are plain ints. `eos_token_ids` are all ids that end a generation, `special_token_ids` those
    that are no text. `vocab_size` counts the
    tokens of the tokenizer; a model's embedding may have more rows.
    """

    def __init__(
        self,
        tokenizer_json: str,
        settings: Mapping[str, Any],
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`tokenizer_json` is the text of tokenizer.json, `settings` of tokenizer_config.json."""
        self._arguments = (tokenizer_json, dict(settings), chat_template, tuple(eos_token_ids))
        try:
            self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = {name: _content(settings.get(name)) for name in _SPECIAL}
        self._special = {name: text for name, text in self._special.items() if text is not None}
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")
        eos = self._special_id("eos_token")
        fallback = () if eos is None else (eos,)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids) or fallback
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.chat_template = chat_template
        self._template = None if chat_template is None else _compile(chat_template)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Any, ...]]:
        return type(self), self._arguments

    @classmethod
    def from_folder(
        cls, path: str | Path, eos_token_ids: Sequence[int] | None = None
    ) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and the chat template of a model folder.

        EOS ids, unless given: those of generation_config.json, else of config.json, else the
        eos_token of tokenizer_config.json. CheckpointError if a file is missing or damaged.
        """
        folder = Path(path)
        if not (folder / "tokenizer.json").exists():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; transformers' AutoTokenizer can write one: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).exists():
                settings |= read_json(folder / name)
        template = _read_template(folder, settings)
        eos = _read_eos(folder) if eos_token_ids is None else tuple(eos_token_ids)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        try:
            return cls(text, settings, template, eos)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. Special tokens spelled out in it become their ids, as in transformers."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without tidying of spaces. Bytes that are no UTF-8 come out as U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation of {"role", "content"} messages, by the folder's template.

        `variables` are passed to the template, e.g. `{"tools": [...], "enable_thinking": False}`.
        ValueError if there is no template, or with the template's own words if it objects.
        """
        if self._template is None:
            raise ValueError("this tokenizer has no chat template; encode plain text instead")
        context: dict[str, Any] = {"tools": None, "documents": None, **self._special}
        context |= variables or {}
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return str(
                self._template.render(
                    context, messages=chat, add_generation_prompt=add_generation_prompt
                )
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template rejects these messages: {error}") from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of `render_chat`; the template writes the special tokens, none is added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, variables))

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
        folder = Path(folder)
        tokenizer_json, settings, template, _ = self._arguments
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        settings = {name: value for name, value in settings.items() if name != "chat_template"}
        write_json(folder / "tokenizer_config.json", settings)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    def _special_id(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _content(token: object) -> str | None:
    """A special token is written as its text, or as an object with the text under `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_eos(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id = {value!r} is no token id")
        if ids:
            return tuple(ids)
    return ()


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for other tools; here it just prints them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _compile(template: str) -> Any:
    """Templates come with the weights of strangers: they run sandboxed and cannot change data."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise CheckpointError(f"the chat template cannot be parsed: {error}") from error
