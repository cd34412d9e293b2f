"""Byte-level BPE from GGUF metadata: the families of pre-tokenizers, special tokens, rules for BOS, and refusals."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers import Tokenizer, TokenType, from_gguf
from mlxr.tokenizers.library import PRE_TYPES, find_pre_type, list_names, recognise_pre_type
from mlxr.tokenizers.vocabulary import list_byte_characters

ALPHABET = list_byte_characters()


def make_metadata(merges: list[str], markers: dict[str, TokenType] | None = None, **keys: object) -> dict[str, Any]:
    """Make a vocabulary of the 256 bytes, the results of `merges`, and `markers`."""
    made = list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    markers = markers or {}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*ALPHABET, *made, *markers],
        "tokenizer.ggml.token_type": [1] * (256 + len(made)) + [int(kind) for kind in markers.values()],
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def spell(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]


def cut(pre: str, text: str) -> list[str]:
    """Cut `text` into words as `pre` does, with a vocabulary in which every word of this test is one token."""
    merges: list[str] = []
    known = set(ALPHABET)
    for start in range(len(text)):
        # Left to right merges for every substring: a word becomes one token whatever its length.
        for stop in range(start + 2, len(text) + 1):
            piece = "".join(ALPHABET[byte] for byte in text[start:stop].encode())
            left = "".join(ALPHABET[byte] for byte in text[start : stop - 1].encode())
            if piece not in known:
                known.add(piece)
                merges.append(f"{left} {piece[len(left) :]}")
    return spell(from_gguf(make_metadata(merges, pre=pre)), text)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm  12345!\n\nx", ["I", "'m", " ", " 12345", "!", "\n", "\n", "x"]),
        ("llama-bpe", "I'M  12345!\n\nx", ["I", "'M", " ", " ", "123", "45", "!\n\n", "x"]),
        ("dbrx", "1234", ["123", "4"]),
        ("qwen2", "it's 123\n  x", ["it", "'s", " ", "1", "2", "3", "\n", " ", " x"]),
        ("smollm", " 123 a", [" ", "1", "2", "3", " a"]),
        ("tekken", "fooBar/\n12", ["foo", "Bar", "/\n", "1", "2"]),
        ("gpt-4o", "FooBar's 1234", ["Foo", "Bar's", " ", "123", "4"]),
        ("deepseek-llm", "a b12\n!", ["a", " b", "12", "\n", "!"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("deepseek-v3", "a 1234.b", ["a", " ", "123", "4", ".b"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("poro-chat", "a, b", ["a", ",", " b"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("spark2_5", "a 1234.b\n\n", ["a", " ", "1", "2", "3", "4", ".b", "\n", "\n"]),
        ("superbpe", "so it is 1234567", ["so it is ", "1", "234", "567"]),
        ("chameleon", "a  12,b", ["a", "  ", "1", "2", ",", "b"]),
        ("default", "a+1234", ["a", "+", "123", "4"]),
    ],
)
def test_each_family_cuts_its_own_words(pre: str, text: str, words: list[str]) -> None:
    assert cut(pre, text) == words


def test_pieces_may_stand_where_bytes_are_usual() -> None:
    """Spaces are marked, letters outside ASCII stand for themselves, and no BOS goes first unless the file says so."""
    tokens = [*"a▁é", "▁a", "é▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 5 + [6] * 256,
        "tokenizer.ggml.merges": ["▁ a", "é ▁a"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    for pre in ("gemma4", "granite-embed-multi-311m", "sarvam-moe"):
        tokenizer = from_gguf(metadata | {"tokenizer.ggml.pre": pre})
        assert [tokenizer.token_text(index) for index in tokenizer.encode("é aa!")] == ["é▁a", "a", "<0x21>"]
        assert tokenizer.decode(tokenizer.encode("é aa!")) == "é aa!"


def test_white_space_may_part_words_and_be_lost() -> None:
    tokens = ["你", "好", "你好", "a", "A"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "whitespace",
        "tokenizer.ggml.pre": "whitespace",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["你 好"],
    }
    spelt = [tokens[index] for index in from_gguf(metadata).encode(" 你好\n你 好 xA")]
    assert spelt == ["你好", "你", "好", "A"]
    small = from_gguf(metadata | {"tokenizer.ggml.normalizer.lowercase": True})
    assert [tokens[index] for index in small.encode("A")] == ["a"]


def test_every_name_is_in_one_row_and_loads() -> None:
    names = [name for row in PRE_TYPES for name in row.names]
    assert len(names) == len(set(names))
    for row in PRE_TYPES:
        assert find_pre_type(row.names[-1]) is row
        tokenizer = from_gguf(make_metadata(["h e"], pre=row.names[0]))
        assert tokenizer.decode(tokenizer.encode("hé  12\n 中!")) == "hé  12\n 中!"


def test_every_first_row_is_recognised_by_its_patterns() -> None:
    first = {(row.patterns, row.ignore_merges): row for row in reversed(PRE_TYPES)}
    for (patterns, ignore_merges), row in first.items():
        assert recognise_pre_type(patterns, ignore_merges) is row


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.ggml.pre 'new-kind' is .* not known; known are .*llama-bpe.*"):
        from_gguf(make_metadata([], pre="new-kind"))
    assert {"llama-bpe", "llama3", "qwen2", "gpt-2", "smollm", "default", "tekken", "starcoder"} <= set(list_names())


def test_a_file_without_a_family_uses_the_default() -> None:
    metadata = make_metadata(["1 2", "12 3", "123 4"])
    del metadata["tokenizer.ggml.pre"]
    assert spell(from_gguf(metadata), "1234") == ["123", "4"]


def test_merges_go_by_rank_unless_words_are_taken_whole() -> None:
    merges = ["b c", "a b", "ab c"]
    assert spell(from_gguf(make_metadata(merges, pre="gpt-2")), "abc") == ["a", "bc"]
    assert spell(from_gguf(make_metadata(merges, pre="llama-bpe")), "abc") == ["abc"]


def test_control_tokens_count_only_where_asked_and_user_defined_always() -> None:
    markers = {"<|eot|>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED, "<unk>": TokenType.UNKNOWN}
    tokenizer = from_gguf(make_metadata([], markers))
    assert spell(tokenizer, "a<|eot|><think>", parse_special=True) == ["a", "<|eot|>", "<think>"]
    assert spell(tokenizer, "<|eot|><think>") == [*"<|eot|>", "<think>"]
    assert spell(tokenizer, "<unk>") == list("<unk>")
    ids = tokenizer.encode("a<|eot|>b<think>", parse_special=True)
    assert tokenizer.decode(ids) == "ab<think>"
    assert tokenizer.decode(ids, skip_special=False) == "a<|eot|>b<think>"
    assert [tokenizer.is_special(token_id) for token_id in ids] == [False, True, False, False]


def test_the_longest_special_token_wins() -> None:
    markers = {"<a>": TokenType.CONTROL, "<a><b>": TokenType.CONTROL, "<b>": TokenType.CONTROL}
    tokenizer = from_gguf(make_metadata([], markers))
    assert spell(tokenizer, "<b><a><b><a>", parse_special=True) == ["<b>", "<a><b>", "<a>"]


def test_bos_and_eos_go_round_a_text_as_the_file_says() -> None:
    markers = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    both = from_gguf(
        make_metadata([], markers, bos_token_id=256, eos_token_id=257, add_bos_token=True, add_eos_token=True)
    )
    assert both.encode("") == [256, 257]
    assert (both.add_bos, both.add_eos, both.bos_id, both.eos_ids) == (True, True, 256, {257})
    assert both.encode("", add_special=False) == []
    silent = from_gguf(make_metadata([], markers, bos_token_id=256, eos_token_id=257))
    assert silent.encode("") == []
    llama = from_gguf(make_metadata([], markers, pre="llama-bpe", bos_token_id=256, eos_token_id=257))
    assert llama.encode("") == [256]
    unnamed = from_gguf(make_metadata([], markers, pre="llama-bpe"))
    assert (unnamed.encode(""), unnamed.add_bos) == ([], False)
    with pytest.raises(TokenizerError, match="wants an EOS token after every text but names none"):
        from_gguf(make_metadata([], markers, add_eos_token=True))


def test_every_token_that_ends_an_answer_is_known() -> None:
    names = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>", "<|x|>", "<|end|>", "<plain>"]
    metadata = make_metadata([], dict.fromkeys(names, TokenType.CONTROL), eos_token_id=256, eot_token_id=260)
    tokenizer = from_gguf(metadata)
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.eos_ids} == set(names) - {"<plain>"}
    # Vocabularies with a marker for the end of a message, which is not the end of the answer.
    harmony = ["<|end|>", "<|return|>", "<|call|>"]
    tokenizer = from_gguf(make_metadata([], dict.fromkeys(harmony, TokenType.CONTROL), eos_token_id=257))
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.eos_ids} == {"<|return|>", "<|call|>"}


def test_a_marker_that_the_file_calls_normal_is_still_one() -> None:
    normal = {"<|im_end|>": TokenType.NORMAL, "</s>": TokenType.NORMAL, "[END]": TokenType.NORMAL}
    tokenizer = from_gguf(make_metadata([], normal, eos_token_id=258))
    assert tokenizer.eos_ids == {256, 258}
    assert tokenizer.is_special(256)
    assert tokenizer.is_special(258)
    assert not tokenizer.is_special(257)  # neither named by the file nor of the form that only markers have
    assert spell(tokenizer, "<|im_end|>", parse_special=True) == ["<|im_end|>"]


def test_an_end_token_that_is_text_stays_text() -> None:
    tokenizer = from_gguf(make_metadata([], eos_token_id=ALPHABET.index("Ċ")))
    assert tokenizer.eos_ids == {10}
    assert tokenizer.decode(tokenizer.encode("a\nb")) == "a\nb"


def test_padding_outside_the_vocabulary_is_none() -> None:
    assert from_gguf(make_metadata([], padding_token_id=300)).pad_id is None
    assert from_gguf(make_metadata([], padding_token_id=3)).pad_id == 3


def test_numeric_lists_may_be_arrays() -> None:
    np = pytest.importorskip("numpy")
    metadata = make_metadata(["a b"])
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    assert spell(from_gguf(metadata), "ab") == ["ab"]


def test_bytes_of_tokens_that_are_not_bytes() -> None:
    tokenizer = from_gguf(make_metadata([], {"中": TokenType.NORMAL, "[PAD257]": TokenType.UNUSED}))
    assert tokenizer.token_bytes(256) == "中".encode()
    assert tokenizer.token_bytes(257) == b""
    assert tokenizer.token_id("中") == 256
    assert tokenizer.token_id("nothing") is None


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["a"], r"merge 0 \('a'\) is not two tokens with a space between"),
        (["a b", "ab "], r"merge 1 \('ab '\) is not two tokens"),
        (["a zz"], r"merge 0 \('a zz'\) needs the token 'zz', which the vocabulary lacks"),
    ],
)
def test_broken_merges_are_refused(merges: list[str], message: str) -> None:
    metadata = make_metadata(["a b"])
    metadata["tokenizer.ggml.merges"] = merges
    with pytest.raises(TokenizerError, match=message):
        from_gguf(metadata)


def test_missing_merges_are_refused() -> None:
    metadata = make_metadata([])
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(TokenizerError, match=r"tokenizer.ggml.merges is missing"):
        from_gguf(metadata)


def test_an_empty_spelling_gets_a_name() -> None:
    metadata = make_metadata([], {"": TokenType.CONTROL})
    assert from_gguf(metadata).token_text(256) == "[EMPTY_256]"


def test_threads_may_ask_for_different_things(vocabularies: dict[str, Tokenizer]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tokenizer = vocabularies["llama3"]
    text = "<|eot_id|>" * 50
    with ThreadPoolExecutor(8) as pool:
        modes = [index % 2 == 0 for index in range(400)]
        results = list(
            pool.map(lambda special: tokenizer.encode(text, add_special=False, parse_special=special), modes)
        )
    plain, special = (
        tokenizer.encode(text, add_special=False),
        tokenizer.encode(text, add_special=False, parse_special=True),
    )
    assert len(special) == 50 < len(plain)
    assert results == [special if mode else plain for mode in modes]


def test_a_long_text_holds_up_no_other_thread(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer, text = vocabularies["qwen2"], "hello world, this is a text. " * 20_000
    gaps: list[float] = []
    is_over = threading.Event()

    def beat() -> None:
        last_s = time.perf_counter()
        while not is_over.wait(0.002):
            gaps.append(time.perf_counter() - last_s)
            last_s = time.perf_counter()

    for parse_special in (True, False):
        tokenizer.encode("warm", parse_special=parse_special)
        gaps.clear()
        is_over.clear()
        watching = threading.Thread(target=beat)
        watching.start()
        start_s = time.perf_counter()
        tokenizer.encode(text, parse_special=parse_special)
        seconds = time.perf_counter() - start_s
        is_over.set()
        watching.join()
        assert max(gaps) < seconds / 2
