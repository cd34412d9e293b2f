"""What the JSON files beside a tokenizer say: tokens with a role, end tokens, BOS rules, chat templates.

Reads `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, `generation_config.json`, `config.json`
and the template files of a Hugging Face folder; every one of them may be missing. Knows no vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlxr.core.errors import NotFound, TokenizerError
from mlxr.core.sampling import name_file_defaults
from mlxr.tokenizers.vocabulary import MAX_VOCABULARY_TOKENS, AddedSpelling

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file, or an empty one if there is no file; raises TokenizerError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object")
    return value


class FolderConfig:
    """The configuration of one folder. Raises NotFound when there is no such folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotFound(f"{folder} is not a folder")
        self.folder = folder
        self._tokenizer = read_json_object(folder / "tokenizer_config.json")
        self._specials = read_json_object(folder / "special_tokens_map.json")
        self._generation = read_json_object(folder / "generation_config.json")
        self._model = read_json_object(folder / "config.json")

    def read_role(self, name: str) -> str | None:
        """The spelling of `bos_token`, `eos_token`, `unk_token` or `pad_token`, or None."""
        value = self._tokenizer[name] if name in self._tokenizer else self._specials.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise self._refuse("tokenizer_config.json", name, "must be a string")
        return value

    def read_flag(self, name: str) -> bool | None:
        """`add_bos_token` and the like: true, false, or None when the file does not say."""
        value = self._tokenizer.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refuse("tokenizer_config.json", name, "must be true or false")
        return value

    def list_end_ids(self) -> list[int]:
        """End tokens named by generation_config.json and config.json."""
        ids: list[int] = []
        for file, values in (("generation_config.json", self._generation), ("config.json", self._model)):
            value = values.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is None:
                    continue
                if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                    raise self._refuse(file, "eos_token_id", "must be a token id or a list of them")
                ids.append(token_id)
        return ids

    def name_sampling(self) -> dict[str, object]:
        """The sampling parameters that generation_config.json recommends, under GGUF's keys."""
        return name_file_defaults(self._generation)

    def read_vocab_size(self) -> int | None:
        """The number of rows of the model's embedding, if config.json says."""
        text = self._model.get("text_config")
        value = self._model.get("vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_VOCABULARY_TOKENS:
            raise self._refuse("config.json", "vocab_size", f"must be from 1 to {MAX_VOCABULARY_TOKENS}")
        return value

    def list_added(self) -> list[AddedSpelling]:
        """Tokens that the configuration adds, by ascending id."""
        added: dict[int, AddedSpelling] = {}
        for text, token_id in read_json_object(self.folder / "added_tokens.json").items():
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self._refuse("added_tokens.json", text, "must be a token id")
            added[token_id] = AddedSpelling(token_id, text, False)
        decoder = self._tokenizer.get("added_tokens_decoder", {})
        if not isinstance(decoder, Mapping):
            raise self._refuse("tokenizer_config.json", "added_tokens_decoder", "must be an object")
        for key, entry in decoder.items():
            if not key.isdecimal() or not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
                raise self._refuse("tokenizer_config.json", f"added_tokens_decoder[{key}]", "is malformed")
            added[int(key)] = AddedSpelling(int(key), entry["content"], bool(entry.get("special")))
        return [added[token_id] for token_id in sorted(added)]

    def read_templates(self) -> dict[str, str]:
        """Chat templates by name: `default`, `tool_use`, ...; template files win over tokenizer_config.json."""
        templates: dict[str, str] = {}
        value = self._tokenizer.get("chat_template")
        legacy = read_json_object(self.folder / "chat_template.json").get("chat_template")
        for entry in value if isinstance(value, list) else [value, legacy]:
            if isinstance(entry, str):
                templates.setdefault(DEFAULT_TEMPLATE, entry)
            elif isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", DEFAULT_TEMPLATE))] = entry["template"]
            elif entry is not None:
                raise self._refuse("tokenizer_config.json", "chat_template", "must be a string or a list of templates")
        files = {DEFAULT_TEMPLATE: self.folder / "chat_template.jinja"}
        files |= {file.stem: file for file in sorted((self.folder / "additional_chat_templates").glob("*.jinja"))}
        for name, file in files.items():
            if file.is_file():
                templates[name] = _read_template(file)
        return templates

    def _refuse(self, file: str, field: str, reason: str) -> TokenizerError:
        return TokenizerError(f"{self.folder / file}: {field} {reason}")


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: cannot be read: {error}") from error
