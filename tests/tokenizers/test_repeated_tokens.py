"""Vocabularies that spell two tokens alike: the first one in use is written, and both are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from mlxr.tokenizers import Tokenizer, TokenType, from_folder, from_gguf, to_gguf_metadata

MakeFolder = Callable[[dict[str, Any]], Path]
LoadJson = Callable[[str], dict[str, Any]]
KINDS = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.CONTROL)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_metadata(model: str, tokens: list[str], types: list[TokenType], **keys: object) -> dict[str, object]:
    keys |= {"model": model, "tokens": tokens, "token_type": [int(kind) for kind in types]}
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def make_twins(model: str, kinds: tuple[TokenType, ...], text: str = "c") -> Tokenizer:
    """Make a vocabulary of the letters a, b, and `text` as one token of each of the `kinds`, from 259 + 2 on."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "a", "b", *[text] * len(kinds)]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 2, *kinds]
    if model == "gpt2":
        types[3:259] = [TokenType.NORMAL] * 256
    scores = [0.0] * len(tokens)
    roles = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return from_gguf(
        make_metadata(model, tokens, types, scores=scores, merges=[], add_space_prefix=False, pre="default", **roles)
    )


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma4"])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", [TokenType.NORMAL, TokenType.USER_DEFINED])
def test_the_first_of_two_is_written_and_both_are_read(model: str, first: TokenType, second: TokenType) -> None:
    tokenizer = make_twins(model, (first, second))
    assert tokenizer.encode("acb", add_special=False) == [259, 261, 260]
    assert tokenizer.token_id("c") == 261
    assert [tokenizer.token_text(index) for index in (261, 262)] == ["c", "c"]
    assert tokenizer.decode([259, 261, 262, 260], skip_special=False) == (
        "acb" if second is TokenType.UNUSED else "accb"
    )


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma4"])
def test_a_token_in_use_counts_before_an_unused_one(model: str) -> None:
    tokenizer = make_twins(model, (TokenType.UNUSED, TokenType.NORMAL, TokenType.NORMAL))
    assert tokenizer.encode("c", add_special=False) == [262]
    assert tokenizer.decode([262, 263]) == "cc"


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma4"])
def test_all_end_tokens_of_one_spelling_end_an_answer(model: str) -> None:
    tokenizer = make_twins(model, (TokenType.CONTROL, TokenType.CONTROL), "<|im_end|>")
    assert {2, 261, 262} <= tokenizer.eos_ids
    assert tokenizer.encode("a<|im_end|>", add_special=False, parse_special=True) == [259, 261]
    assert 261 not in tokenizer.encode("a<|im_end|>", add_special=False)


def test_a_byte_that_is_also_spelt_as_text_stays_a_byte() -> None:
    tokenizer = make_twins("llama", (TokenType.NORMAL, TokenType.BYTE), "<0x41>")
    assert tokenizer.decode([261, 262]) == "<0x41>A"
    assert tokenizer.encode("A", add_special=False) == [3 + 0x41]


def test_a_vocabulary_of_one_spelling_is_read() -> None:
    tokens = ["a"] * 50_000
    tokenizer = from_gguf(make_metadata("llama", tokens, [TokenType.NORMAL] * 50_000, scores=[0.0] * 50_000))
    assert tokenizer.encode("aa", add_special=False)[-2:] == [0, 0]
    assert tokenizer.decode([49_999]) == "a"


def test_an_added_token_may_repeat_one_of_the_vocabulary(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("qwen2")
    first, last = data["model"]["vocab"]["c"], max(token["id"] for token in data["added_tokens"]) + 1
    data["added_tokens"].append(
        {"id": last, "content": "c", "special": False, "normalized": False, "lstrip": False, "rstrip": False}
        | {"single_word": False}
    )
    config = {"added_tokens_decoder": {str(last + 1): {"content": "c", "special": False}}}
    folder = make_folder({"tokenizer.json": data, "tokenizer_config.json": config})
    for tokenizer in (from_folder(folder), from_gguf(to_gguf_metadata(folder))):
        assert tokenizer.encode("c", add_special=False) == [first]
        assert tokenizer.decode([first, last, last + 1]) == "ccc"


def test_a_list_of_pieces_may_repeat_one(make_folder: MakeFolder) -> None:
    pieces = [["<unk>", 0.0], ["▁", -1.0], ["a", -1.5], ["c", -2.0], ["c", -2.0]]
    data = {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
    }
    tokenizer = from_folder(make_folder({"tokenizer.json": data}))
    assert tokenizer.encode("ac c", add_special=False) == [2, 3, 1, 3]
    assert tokenizer.decode([3, 4]) == "cc"


def test_a_sentencepiece_model_may_repeat_a_piece(make_folder: MakeFolder, tmp_path: Path) -> None:
    lines = ["the cat sat on the mat", "a rat at the cat"] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "m"), vocab_size=24, model_type="bpe", minloglevel=9
    )
    data = (tmp_path / "m.model").read_bytes()
    plain = sentencepiece.SentencePieceProcessor(model_proto=data)
    cat = plain.PieceToId("c")
    folder = make_folder({"tokenizer.model": data + b"\x0a\x08\x0a\x01c\x15\x00\x00\x00\x00"})
    tokenizer = from_folder(folder)
    assert tokenizer.encode("the cat", add_special=False) == plain.EncodeAsIds("the cat")
    assert cat in tokenizer.encode("cc", add_special=False)
    assert tokenizer.decode([plain.vocab_size()]) == "c"
