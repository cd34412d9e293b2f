"""The same ids as llama.cpp (golden), the `tokenizers` library and `sentencepiece` (live), and back to the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sentencepiece
import tokenizers

from mlxr.tokenizers import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from conftest import Goldens

NAMES = ("spm", "spm-merges", "llama3", "qwen2")
BYTE_LEVEL = ("llama3", "qwen2")


def push_all(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])


def test_there_is_enough_to_compare(goldens: Goldens) -> None:
    assert len(set(goldens.strings)) >= 1_000
    text = "".join(goldens.strings)
    for sample in ("👩‍💻", "中", "\u0301", "def ", "    ", "<|eot_id|>", "\u3000", "\r\n", "한", "ا"):
        assert sample in text


@pytest.mark.parametrize("mode", ["plain", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_llama_cpps(name: str, mode: str, goldens: Goldens, vocabularies: dict[str, Tokenizer]) -> None:
    expected = goldens.ids[mode][name.removesuffix("-merges")]
    got = [vocabularies[name].encode(text, parse_special=mode == "special") for text in goldens.strings]
    assert got == expected


@pytest.mark.parametrize("name", ["spm-merges", "llama3", "qwen2"])
def test_ids_are_those_of_the_tokenizers_library(
    name: str, goldens: Goldens, vocabularies: dict[str, Tokenizer], golden_folder: Path
) -> None:
    library = tokenizers.Tokenizer.from_file(str(golden_folder / name / "tokenizer.json"))
    for parse_special in (False, True):
        library.encode_special_tokens = not parse_special
        for text in goldens.strings:
            expected = library.encode(text, add_special_tokens=False).ids
            assert vocabularies[name].encode(text, add_special=False, parse_special=parse_special) == expected, text


def test_ids_are_sentencepieces(goldens: Goldens, vocabularies: dict[str, Tokenizer], golden_folder: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(golden_folder / "spm" / "tokenizer.model"))
    # SentencePiece starts no new word after a user-defined piece, llama.cpp does: each is right for its own files.
    strings = [text for text in goldens.strings if "<tool_call>" not in text]
    assert len(strings) > 1_000
    for text in strings:
        assert vocabularies["spm"].encode(text, add_special=False) == library.EncodeAsIds(text), text


@pytest.mark.parametrize("mode", ["plain", "special"])
@pytest.mark.parametrize("name", ["spm-merges", "llama3", "qwen2"])
def test_a_folder_and_its_conversion_agree(
    name: str, mode: str, goldens: Goldens, vocabularies: dict[str, Tokenizer], folders: dict[str, Tokenizer]
) -> None:
    for text in goldens.strings:
        special = mode == "special"
        assert folders[name].encode(text, parse_special=special) == vocabularies[name].encode(
            text, parse_special=special
        )


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_token_by_token(name: str, goldens: Goldens, vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    for text in goldens.strings:
        ids = tokenizer.encode(text)
        if name not in BYTE_LEVEL:
            if "<tool_call>" in text:  # the word after it starts with a space of the vocabulary's
                continue
            text = text.replace("▁", " ")  # the vocabulary's own spelling of a space
        assert push_all(tokenizer, ids, skip_special=True) == text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_round_trip_with_special_tokens(name: str, goldens: Goldens, vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    for text in goldens.strings:
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert push_all(tokenizer, ids, skip_special=False) == text


def test_round_trip_with_special_tokens_spells_the_vocabularys_spaces(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["spm"]
    ids = tokenizer.encode("<s>one<tool_call>two</s>three", parse_special=True)
    assert tokenizer.decode(ids, skip_special=False) == "<s><s>one<tool_call> two</s> three"
    assert push_all(tokenizer, ids, skip_special=False) == "<s><s>one<tool_call> two</s> three"
    assert push_all(tokenizer, ids, skip_special=True) == "one<tool_call> two three"


@pytest.mark.parametrize("name", ["spm-merges", "llama3", "qwen2"])
def test_decoding_is_the_tokenizers_librarys(
    name: str, goldens: Goldens, folders: dict[str, Tokenizer], golden_folder: Path
) -> None:
    library = tokenizers.Tokenizer.from_file(str(golden_folder / name / "tokenizer.json"))
    for ids in goldens.ids["special"][name.removesuffix("-merges")]:
        assert folders[name].decode(ids) == library.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_all_tokens_make_the_text(name: str, goldens: Goldens, vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    for text in goldens.strings:
        if name in BYTE_LEVEL:
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
            expected = text
        elif text and "<tool_call>" not in text:
            ids = tokenizer.encode(text, add_special=False)
            expected = " " + text.replace("▁", " ")
        else:
            continue
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()
