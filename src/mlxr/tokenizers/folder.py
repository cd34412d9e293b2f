"""Tokenizers from a Hugging Face folder: `tokenizer.json` through the `tokenizers` library, or else `tokenizer.model`.

Gets a path; reads the vocabulary file and the configuration beside it. BOS and EOS follow `add_bos_token` and
`add_eos_token` where the configuration has them, otherwise the file's own post-processor, and are written once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from mlxr.core.errors import NotFound, TokenizerError
from mlxr.core.sampling import name_file_defaults
from mlxr.tokenizers.library import LibraryTokenizer, explain_failures
from mlxr.tokenizers.spm import (
    SentencePieceTokenizer,
    check_whitespace_rules,
    make_model_vocabulary,
    parse_sentencepiece_model,
)
from mlxr.tokenizers.tokenizer_json import TokenizerJson
from mlxr.tokenizers.vocabulary import (
    MAX_VOCABULARY_TOKENS,
    AddedSpelling,
    SpecialRules,
    Tokenizer,
    TokenType,
    Vocabulary,
    add_spellings,
    find_end_ids,
    mark_control_tokens,
    surround_ids,
)

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file, an empty one if there is no file; raises TokenizerError naming the file."""
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
        """`add_bos_token` and the like: true, false, or None if the file does not set it."""
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
        """The number of rows of the model's embedding, None if config.json does not tell."""
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


JSON_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
WORDS_FILE = "vocab.txt"  # the file of BERT's first tokenizers: a token on each line
_OTHER_FILES = ("tekken.json", "tokenizer.tiktoken", "qwen.tiktoken", "vocab.json", "spiece.model")


def from_folder(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model folder; raises NotFound without one, TokenizerError naming file and part at fault."""
    config = FolderConfig(Path(path))
    if (config.folder / JSON_FILE).is_file():
        return _from_tokenizer_json(config)
    if (config.folder / MODEL_FILE).is_file():
        return _from_sentencepiece(config)
    if (config.folder / WORDS_FILE).is_file():
        return _from_tokenizer_json(config)
    raise refuse_folder(config.folder)


def refuse_folder(folder: Path) -> NotFound | TokenizerError:
    """The error for a folder without a tokenizer file that can be read."""
    others = [name for name in _OTHER_FILES if (folder / name).is_file()]
    if not others:
        return NotFound(f"{folder} has neither {JSON_FILE} nor {MODEL_FILE}")
    return TokenizerError(
        f"{folder}: {', '.join(others)} cannot be read here; save the tokenizer with transformers' save_pretrained, "
        f"which writes {JSON_FILE}"
    )


def read_tokenizer_json(config: FolderConfig) -> tuple[str, TokenizerJson]:
    """The text of a folder's tokenizer.json and its parts; without one, the equivalent of vocab.txt.

    Raises TokenizerError naming the file.
    """
    file = config.folder / JSON_FILE
    if not file.is_file():
        stated = _state_words(config)
        return json.dumps(stated), TokenizerJson(stated, str(config.folder / WORDS_FILE))
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{file}: must hold a JSON object")
    return text, TokenizerJson(data, str(file))


def _state_words(config: FolderConfig) -> dict[str, object]:
    """BERT's WordPiece over the words of vocab.txt, in the form of a tokenizer.json."""
    file = config.folder / WORDS_FILE
    try:
        words = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: cannot be read as UTF-8: {error}") from error
    words = [word.rstrip("\r") for word in (words[:-1] if words[-1] == "" else words)]
    vocab = {word: index for index, word in enumerate(words)}
    if len(vocab) > MAX_VOCABULARY_TOKENS:
        raise TokenizerError(f"{file}: has {len(vocab)} tokens; {MAX_VOCABULARY_TOKENS} are allowed")
    usual = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    roles = {role: config.read_role(f"{role}_token") or text for role, text in usual.items()}
    for role in ("unk", "cls", "sep"):
        if roles[role] not in vocab:
            raise TokenizerError(f"{file}: {role}_token {roles[role]!r} is not in it")
    first, last = ({"SpecialToken": {"id": roles[role], "type_id": 0}} for role in ("cls", "sep"))
    parts = [{"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB")]
    behind = {"SpecialToken": {"id": roles["sep"], "type_id": 1}}
    ends = {text: {"id": text, "ids": [vocab[text]], "tokens": [text]} for text in (roles["cls"], roles["sep"])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = sorted(vocab[text] for text in set(roles.values()) if text in vocab)
    lowercase, accents = config.read_flag("do_lower_case"), config.read_flag("strip_accents")
    chinese = config.read_flag("tokenize_chinese_chars")
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": words[index], **flags} for index in special],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese is not False,
            "strip_accents": accents,
            "lowercase": lowercase is not False,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, parts[0], last],
            "pair": [first, parts[0], last, parts[1], behind],
            "special_tokens": ends,
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": roles["unk"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def make_json_vocabulary(parts: TokenizerJson, config: FolderConfig) -> Vocabulary:
    """The vocabulary of a tokenizer.json, with the configuration's added tokens, filled up to the model's size."""
    texts, types = parts.list_tokens()
    roles = [config.read_role(role) for role in ("bos_token", "eos_token")]
    unknown_text = parts.unknown_text
    if unknown_text in texts and unknown_text not in roles:
        types[texts.index(unknown_text)] = TokenType.UNKNOWN
    added = {token.token_id: token for token in (*config.list_added(), *parts.added)}
    add_spellings(texts, types, [added[index] for index in sorted(added)], config.read_vocab_size())
    mark_control_tokens(texts, types, [texts.index(role) if role in texts else None for role in roles])
    return Vocabulary(texts, types, parts.find_spelling())


def _from_tokenizer_json(config: FolderConfig) -> Tokenizer:
    text, parts = read_tokenizer_json(config)
    vocabulary = make_json_vocabulary(parts, config)
    with explain_failures(parts.name):
        library = Library.from_str(text)
        library.no_truncation()
        library.no_padding()
        _add_missing_specials(library, vocabulary, parts, config)
        prefix_ids, suffix_ids = _probe_post_processor(library)
        between_ids, second_type = _probe_pair(library)
    rules = make_rules(vocabulary, config, prefix_ids, suffix_ids)
    rules = replace(rules, between_ids=between_ids, second_type=second_type)
    return LibraryTokenizer(library, vocabulary, rules, strips_leading_space=parts.strips_leading_space())


def _add_missing_specials(library: Library, vocabulary: Vocabulary, parts: TokenizerJson, config: FolderConfig) -> None:
    """Add the special tokens to the library that only the configuration marks as special."""
    known = {token.text for token in parts.added}
    for index in vocabulary.list_ids(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
        text, kind = vocabulary.texts[index], vocabulary.types[index]
        if text in known or (kind is TokenType.UNKNOWN and config.read_role("unk_token") != text):
            continue
        token = AddedToken(text, special=kind is not TokenType.USER_DEFINED, normalized=False)
        library.add_special_tokens([token]) if token.special else library.add_tokens([token])
        if library.token_to_id(text) != vocabulary.ids[text]:
            raise TokenizerError(
                f"{parts.name}: the configuration numbers {text!r} {index}, the file {library.token_to_id(text)}"
            )


def _probe_post_processor(library: Library) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the post-processor puts before and after a text."""
    encoding = library.encode("a", add_special_tokens=True)
    mask, ids = list(encoding.special_tokens_mask), tuple(encoding.ids)
    if 0 not in mask:
        return (), ()
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    return ids[:first], ids[last:]


def _probe_pair(library: Library) -> tuple[tuple[int, ...], int]:
    """The tokens that the post-processor puts between two texts, and the type of the second one's tokens."""
    encoding = library.encode("a", "a", add_special_tokens=True)
    first, second = ([index for index, one in enumerate(encoding.sequence_ids) if one == number] for number in (0, 1))
    if not first or not second:
        return (), 0
    return tuple(encoding.ids[first[-1] + 1 : second[0]]), int(encoding.type_ids[second[0]] != 0)


def make_rules(
    vocabulary: Vocabulary, config: FolderConfig, prefix_ids: tuple[int, ...], suffix_ids: tuple[int, ...]
) -> SpecialRules:
    """The tokens with a role; `prefix_ids` and `suffix_ids` are those that the vocabulary file puts around a text."""
    bos_id, eos_id, pad_id = (_find_role(vocabulary, config, role) for role in ("bos_token", "eos_token", "pad_token"))
    if bos_id is None and len(prefix_ids) == 1:
        bos_id = prefix_ids[0]  # the only hint in a folder without configuration
    add_bos, add_eos = config.read_flag("add_bos_token"), config.read_flag("add_eos_token")
    wants_bos = add_bos and bos_id not in prefix_ids
    wants_eos = add_eos and eos_id not in suffix_ids
    before, after = surround_ids(bos_id, eos_id, bool(wants_bos), bool(wants_eos), str(config.folder))
    if add_bos is False:
        prefix_ids = tuple(token_id for token_id in prefix_ids if token_id != bos_id)
    if add_eos is False:
        suffix_ids = tuple(token_id for token_id in suffix_ids if token_id != eos_id)
    return SpecialRules(
        bos_id=bos_id,
        eos_ids=find_end_ids(vocabulary, [eos_id, *config.list_end_ids()]),
        pad_id=pad_id,
        prefix_ids=before + prefix_ids,
        suffix_ids=suffix_ids + after,
    )


def _find_role(vocabulary: Vocabulary, config: FolderConfig, role: str) -> int | None:
    text = config.read_role(role)
    if text is None:
        return None
    token_id = vocabulary.ids.get(text)
    if token_id is None and role != "pad_token":  # nothing here ever writes padding
        raise TokenizerError(f"{config.folder}: {role} {text!r} is not in the vocabulary")
    return token_id


def _from_sentencepiece(config: FolderConfig) -> Tokenizer:
    file = config.folder / MODEL_FILE
    data = file.read_bytes()
    model = parse_sentencepiece_model(data, str(file))
    check_whitespace_rules(model, str(file))
    vocabulary = make_model_vocabulary(model, config.list_added(), config.read_vocab_size())
    rules = make_model_rules(vocabulary, config, model.bos_id, model.eos_id, model.pad_id)
    return SentencePieceTokenizer(
        data, model, vocabulary, rules, prefix_every_part=config.read_flag("legacy") is not False
    )


def make_model_rules(
    vocabulary: Vocabulary, config: FolderConfig, bos_id: int, eos_id: int, pad_id: int
) -> SpecialRules:
    """The tokens with a role of a SentencePiece model; its own ids count if the configuration names none.

    BOS goes before a text unless the configuration forbids it, EOS after it only if it asks for that (as for Llama).
    """
    model_ids = {"bos_token": bos_id, "eos_token": eos_id, "pad_token": pad_id}
    found: dict[str, int | None] = {}
    for role, model_id in model_ids.items():
        named = _find_role(vocabulary, config, role)
        found[role] = named if named is not None else model_id if 0 <= model_id < len(vocabulary) else None
    add_bos = config.read_flag("add_bos_token")
    prefix_ids, suffix_ids = surround_ids(
        found["bos_token"],
        found["eos_token"],
        found["bos_token"] is not None if add_bos is None else add_bos,
        bool(config.read_flag("add_eos_token")),
        str(config.folder),
    )
    return SpecialRules(
        bos_id=found["bos_token"],
        eos_ids=find_end_ids(vocabulary, [found["eos_token"], *config.list_end_ids()]),
        pad_id=found["pad_token"],
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )
