"""SentencePiece by score: the order of merges, byte fallback, spaces, special tokens, and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxr.core.errors import InvalidRequest, TokenizerError
from mlxr.tokenizers import Tokenizer, TokenType, from_gguf

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_metadata(
    pieces: dict[str, float], *, types: dict[str, TokenType] | None = None, **keys: object
) -> dict[str, Any]:
    """A vocabulary of <unk>, <s>, </s>, the 256 bytes and `pieces` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    for text, kind in (types or {}).items():
        kinds[tokens.index(text)] = kind
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def spell(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=False, parse_special=parse_special)]


def test_the_best_score_merges_first() -> None:
    pieces = {"a": 0.0, "b": 0.0, "c": 0.0, "ab": -2.0, "bc": -1.0}
    tokenizer = from_gguf(make_metadata(pieces, add_space_prefix=False))
    assert spell(tokenizer, "abc") == ["a", "bc"]
    tokenizer = from_gguf(make_metadata({**pieces, "ab": -0.5}, add_space_prefix=False))
    assert spell(tokenizer, "abc") == ["ab", "c"]


def test_white_space_after_the_markers_of_phi_is_dropped() -> None:
    """As llama.cpp reads files of Phi-3: `<|user|>` and a line end are one token, and a space goes before the text."""
    pieces = {"▁": 0.0, "a": 0.0, "▁a": -1.0, "<|user|>": 0.0, "<|end|>": 0.0, "<|endoftext|>": 0.0}
    types = {"<|user|>": TokenType.CONTROL, "<|end|>": TokenType.USER_DEFINED, "<|endoftext|>": TokenType.CONTROL}
    metadata = make_metadata(pieces, types=types)
    text = "<|user|>\n a\n<|end|>\n<|user|>\n<s> a<|endoftext|> a"
    marked = ["<|user|>", "▁a", "<0x0A>", "<|end|>", "<|user|>", "<s>", "▁", "▁a", "<|endoftext|>", "▁", "▁a"]
    for name in ("phi3", "phimoe"):
        assert spell(from_gguf(metadata | {"general.architecture": name}), text, parse_special=True) == marked
    kept = spell(from_gguf(metadata | {"general.architecture": "llama"}), text, parse_special=True)
    assert kept[:4] == ["<|user|>", "▁", "<0x0A>", "▁a"]


def make_escaped(pieces: list[bytes]) -> dict[str, Any]:
    """A vocabulary as RWKV's: <s>, all bytes, and pieces that may end inside a character."""
    tokens = ["<s>", *(repr(piece)[2:-1] for piece in [*(bytes([byte]) for byte in range(256)), *pieces])]
    own = {"model": "rwkv", "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1)}
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def test_rwkv_takes_the_longest_token_that_the_bytes_go_on_with() -> None:
    pieces = [b"ab", b"abcd", "é".encode()[:1], " 中".encode()[:3], b"\\", b"'\n"]
    tokenizer = from_gguf(make_escaped(pieces))
    ids = tokenizer.encode("abcab é 中\\'\n<s>", add_special=False)
    spelt = [tokenizer.token_bytes(index) for index in ids]
    assert spelt[:7] == [b"ab", b"c", b"ab", b" ", "é".encode()[:1], "é".encode()[1:], " 中".encode()[:3]]
    assert spelt[7:] == ["中".encode()[2:], b"\\", b"'\n", b"<", b"s", b">"]
    assert tokenizer.encode("a<s>b", parse_special=True) == [98, 0, 99]
    assert tokenizer.decode(ids) == "abcab é 中\\'\n<s>"
    lacking = make_escaped([])
    lacking["tokenizer.ggml.tokens"].remove("\\x07")
    lacking["tokenizer.ggml.token_type"].pop()
    with pytest.raises(TokenizerError, match="no token for byte 0x07 and no unknown token"):
        from_gguf(lacking)


def test_plamo2_takes_the_pieces_whose_scores_add_up_to_the_most() -> None:
    pieces = {"ab": -1.0, "abc": -3.0, "c": -1.5, "cd": -5.0, "d": -1.0, "▁ x": -2.0, "<e>": 0.0}
    metadata = make_metadata(pieces, types={"<e>": TokenType.CONTROL}) | {"tokenizer.ggml.model": "plamo2"}
    tokenizer = from_gguf(metadata)
    assert spell(tokenizer, "abcd") == ["ab", "c", "d"]  # -3.5, where abc and d are -4
    metadata["tokenizer.ggml.scores"][259] = -1.5  # of ab, so that both ways to cut abc are equal
    assert spell(from_gguf(metadata), "abc") == ["abc"]
    assert spell(tokenizer, "é▁ x") == ["<0xC3>", "<0xA9>", "▁ x"]
    assert tokenizer.decode(tokenizer.encode("é▁ xab")) == "é▁ xab"
    assert spell(tokenizer, "\ufeffd<e>", parse_special=True) == ["d", "<e>"]
    with pytest.raises(TokenizerError, match="no tokens for bytes"):
        from_gguf(metadata | {"tokenizer.ggml.token_type": [2, 3, 3, *[1] * (256 + len(pieces))]})


def test_of_equal_scores_the_leftmost_merges_first() -> None:
    tokenizer = from_gguf(make_metadata({"a": 0.0, "aa": -1.0, "aaa": -1.0}, add_space_prefix=False))
    assert spell(tokenizer, "aaaa") == ["aaa", "a"]
    tokenizer = from_gguf(make_metadata({"a": 0.0, "aa": -1.0}, add_space_prefix=False))
    assert spell(tokenizer, "aaaaa") == ["aa", "aa", "a"]


def test_a_space_goes_before_a_text_and_after_every_special_token() -> None:
    pieces = {"▁": 0.0, "a": 0.0, "▁a": -1.0, "<sep>": 0.0}
    tokenizer = from_gguf(make_metadata(pieces, types={"<sep>": TokenType.USER_DEFINED}))
    assert spell(tokenizer, "a") == ["▁a"]
    assert spell(tokenizer, " a") == ["▁", "▁a"]
    assert spell(tokenizer, "a<sep>aa") == ["▁a", "<sep>", "▁a", "a"]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("", add_special=False) == []
    without = from_gguf(make_metadata(pieces, add_space_prefix=False))
    assert spell(without, "a a") == ["a", "▁a"]
    assert without.decode(without.encode(" a")) == " a"


def test_unknown_characters_are_spelt_in_bytes() -> None:
    tokenizer = from_gguf(make_metadata({"a": 0.0}, add_space_prefix=False))
    assert spell(tokenizer, "aé\n") == ["a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("aé\n")) == "aé\n"
    assert [tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_without_byte_tokens_unknown_characters_are_unknown() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
        "tokenizer.ggml.scores": [0.0] * 4,
        "tokenizer.ggml.token_type": [2, 3, 3, 1],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert from_gguf(metadata).encode("aéa") == [1, 3, 0, 3]


def test_special_tokens_count_only_where_asked() -> None:
    pieces = dict.fromkeys(("<", "s", ">", "/"), 0.0) | {"<s": -1.0, "s>": -2.0}
    tokenizer = from_gguf(make_metadata(pieces, add_space_prefix=False))
    assert spell(tokenizer, "<s></s>", parse_special=True) == ["<s>", "</s>"]
    # Not even through merges: "<s" and ">" would make the control token's spelling.
    assert spell(tokenizer, "<s></s>") == ["<s", ">", "<", "/", "s>"]
    assert tokenizer.is_special(1)
    assert tokenizer.decode([1, 262, 2]) == tokenizer.token_text(262)


def test_an_unused_token_adds_nothing() -> None:
    tokenizer = from_gguf(make_metadata({"a": 0.0, "[PAD260]": 0.0}, types={"[PAD260]": TokenType.UNUSED}))
    assert tokenizer.token_bytes(260) == b""
    assert tokenizer.token_text(260) == "[PAD260]"


def test_types_may_be_missing() -> None:
    metadata = make_metadata({"a": 0.0, "▁a": 0.0})
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"
    assert tokenizer.is_special(1)
    assert tokenizer.is_special(0)


def test_words_from_the_cache_are_words_merged_at_once() -> None:
    """A piece with a space inside switches the cutting into words off; without it both ways must agree."""
    draw = random.Random(5)
    letters = "ab▁"
    pieces = dict.fromkeys(letters, 0.0)
    while len(pieces) < 60:
        left, right = draw.choice(list(pieces)), draw.choice(list(pieces))
        if "▁" not in (left + right).lstrip("▁"):
            pieces.setdefault(left + right, -float(len(pieces)))
    by_words = from_gguf(make_metadata(pieces))
    at_once = from_gguf(make_metadata({**pieces, "zz▁zz": -99.0}))
    for _ in range(500):
        text = "".join(draw.choice("ab  ") for _ in range(draw.randint(0, 30)))
        assert by_words.encode(text) == at_once.encode(text)


def test_a_long_word_does_not_take_long() -> None:
    tokenizer = from_gguf(make_metadata({"a": 0.0, "aa": -1.0, "aaaa": -2.0}, add_space_prefix=False))
    assert len(tokenizer.encode("a" * 100_000, add_special=False)) == 25_000


def test_half_a_surrogate_pair_is_refused() -> None:
    tokenizer = from_gguf(make_metadata({"a": 0.0}))
    with pytest.raises(InvalidRequest, match="character 1 is half of a surrogate pair"):
        tokenizer.encode("a\ud83d")


def test_pieces_merge_in_the_order_of_a_list() -> None:
    """Gemma 4: no words, spaces are marked, BOS goes first even where the file denies it."""
    pieces = dict.fromkeys(["▁", "a", "b", "c", "ab", "bc", "▁ab", "\n", "\n\n", "<|turn>", "<turn|>"], 0.0)
    merges = ["b c", "a b", "▁ ab", "\n \n"]
    types = {"<|turn>": TokenType.CONTROL, "<turn|>": TokenType.CONTROL}
    keys = {"model": "gemma4", "bos_token_id": 1, "unknown_token_id": 0, "add_bos_token": False}
    metadata = make_metadata(pieces, types=types, merges=merges, **keys)
    tokenizer = from_gguf(metadata)
    assert spell(tokenizer, "abc ab\n\n\né") == ["a", "bc", "▁ab", "\n\n", "\n", "<0xC3>", "<0xA9>"]
    assert spell(tokenizer, "<|turn>ab", parse_special=True) == ["<|turn>", "ab"]
    assert spell(tokenizer, "<|turn>")[0] == "<0x3C>"
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode(tokenizer.encode(" abc\n")) == " abc\n"
    assert tokenizer.token_id("<turn|>") in tokenizer.eos_ids
    for broken, message in (
        ({"merges": None}, "merges is missing, and kind gemma4"),
        ({"merges": ["a x"]}, "needs the token"),
    ):
        with pytest.raises(TokenizerError, match=message):
            from_gguf(metadata | {f"tokenizer.ggml.{name}": value for name, value in broken.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 260 tokens"),
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [float("nan")] * 260}, "score is not a finite number"),
        ({"scores": ["x"] * 260}, "tokenizer.ggml.scores entry 0 must be a number"),
        ({"token_type": [9] * 260}, "tokenizer.ggml.token_type entry 0 is 9"),
        ({"token_type": [1] * 3}, "tokenizer.ggml.token_type has 3 entries for 260 tokens"),
        ({"token_type": [6] * 260}, "byte token '<unk>' is not spelt"),
        ({"tokens": [1] * 260}, "tokenizer.ggml.tokens entry 0 must be a string"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing or empty"),
        ({"bos_token_id": 260}, "tokenizer.ggml.bos_token_id is 260, outside the vocabulary of 260 tokens"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id must be a whole number"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false"),
        ({"bos_token_id": 0xFFFFFFFF, "add_bos_token": True}, "wants a BOS token before every text but names none"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces is not supported"),
        ({"model": "replit"}, "model 'replit' is not supported; supported are bert, gemma4, gpt2, llama, plamo2, "),
        (
            {"model": "mine"},
            "tokenizer.ggml.model 'mine' is not known; supported are bert, gemma4, gpt2, llama, ",
        ),
        ({"model": None}, "the file has no tokenizer"),
        ({"model": 7}, "tokenizer.ggml.model must be a string"),
    ],
)
def test_broken_metadata_is_refused_by_key(change: dict[str, object], message: str) -> None:
    metadata = make_metadata({"a": 0.0}) | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(TokenizerError, match=message):
        from_gguf(metadata)


def test_missing_bytes_need_an_unknown_token() -> None:
    metadata = make_metadata({"a": 0.0}, unknown_token_id=0xFFFFFFFF)
    metadata["tokenizer.ggml.tokens"][3 + 0x41] = "A"
    metadata["tokenizer.ggml.token_type"][3 + 0x41] = 1
    with pytest.raises(TokenizerError, match="no token for byte 0x41 and no unknown token"):
        from_gguf(metadata)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = from_gguf(make_metadata({"a": 0.0}))
    for call in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special, lambda i: tokenizer.decode([i])):
        for token_id in (-1, 260):
            with pytest.raises(TokenizerError, match=f"token id {token_id} is outside the vocabulary of 260 tokens"):
                call(token_id)
