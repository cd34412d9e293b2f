"""Text as tokens come: never half a character, and in the end the text of all tokens decoded at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxr.tokenizers import Detokenizer, Tokenizer

SPECIAL = 256
WORD = 257
NOTHING = 258


class ByteTokenizer:
    """Tokens 0 to 255 are bytes; then <eot> (special), " word" and one that adds nothing."""

    def __init__(self, *, strips_leading_space: bool = False) -> None:
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int, /) -> bytes:
        return {SPECIAL: b"<eot>", WORD: b" word", NOTHING: b""}.get(token_id) or bytes(
            [token_id] if token_id < 256 else []
        )

    def is_special(self, token_id: int, /) -> bool:
        return token_id == SPECIAL


def push_each(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_a_character_comes_whole() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert push_each(detokenizer, "é🙂".encode()) == ["", "é", "", "", "", "🙂", ""]


def test_broken_bytes_are_replaced_as_soon_as_that_is_certain() -> None:
    assert push_each(Detokenizer(ByteTokenizer()), b"\xf0\x9fa") == ["", "", "\ufffda", ""]
    assert push_each(Detokenizer(ByteTokenizer()), b"\xff\x80a") == ["\ufffd", "\ufffd", "a", ""]
    assert push_each(Detokenizer(ByteTokenizer()), b"a\xe4\xb8") == ["a", "", "", "\ufffd"]
    assert push_each(Detokenizer(ByteTokenizer()), b"\xe4\xb8\xe4\xb8\xad") == ["", "", "\ufffd", "", "中", ""]


def test_special_tokens_are_hidden_or_spelt() -> None:
    ids = [*b"a", SPECIAL, *b"b"]
    assert push_each(Detokenizer(ByteTokenizer()), ids) == ["a", "", "b", ""]
    assert push_each(Detokenizer(ByteTokenizer(), skip_special=False), ids) == ["a", "<eot>", "b", ""]


def test_a_hidden_token_does_not_cut_a_character() -> None:
    first, second = "é".encode()
    assert push_each(Detokenizer(ByteTokenizer()), [first, SPECIAL, second]) == ["", "", "é", ""]


def test_only_the_first_words_space_is_taken_off() -> None:
    tokenizer = ByteTokenizer(strips_leading_space=True)
    assert push_each(Detokenizer(tokenizer), [SPECIAL, NOTHING, WORD, WORD]) == ["", "", "word", " word", ""]
    assert push_each(Detokenizer(tokenizer, skip_special=False), [SPECIAL, WORD]) == ["<eot>", "word", ""]
    assert push_each(Detokenizer(tokenizer), [*b"  x"]) == ["", " ", "x", ""]
    assert push_each(Detokenizer(ByteTokenizer()), [WORD]) == [" word", ""]


def test_after_a_prompt_a_space_is_a_space() -> None:
    tokenizer = ByteTokenizer(strips_leading_space=True)
    assert push_each(Detokenizer(tokenizer, prompt_ids=[SPECIAL, WORD]), [WORD]) == [" word", ""]
    assert push_each(Detokenizer(tokenizer, prompt_ids=[WORD, SPECIAL]), [WORD]) == [" word", ""]
    assert push_each(Detokenizer(tokenizer, prompt_ids=[SPECIAL, NOTHING]), [WORD]) == ["word", ""]


def test_a_character_that_the_prompt_began_is_completed() -> None:
    start, end = "🙂".encode()[:3], "🙂".encode()[3:]
    detokenizer = Detokenizer(ByteTokenizer(), prompt_ids=[*b"hello ", *start])
    assert push_each(detokenizer, [*end, *b"!"]) == ["🙂", "!", ""]
    assert push_each(Detokenizer(ByteTokenizer(), prompt_ids=[*b"\xff\x80"]), b"a") == ["a", ""]


token_ids = st.lists(
    st.integers(0, NOTHING) | st.sampled_from([0x20, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x99, 0x82, SPECIAL])
)


@settings(max_examples=300, deadline=None)
@given(ids=token_ids, split=st.integers(0, 40))
@pytest.mark.slow
def test_pushes_make_the_decoding_of_all_bytes(ids: list[int], split: int) -> None:
    tokenizer = ByteTokenizer()
    visible = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id != SPECIAL)
    assert "".join(push_each(Detokenizer(tokenizer), ids)) == visible.decode("utf-8", "replace")
    # Cut anywhere into prompt and answer, no character is lost: what the prompt leaves open, the answer completes.
    prompt, answer = ids[:split], ids[split:]
    before = Detokenizer(tokenizer)
    text = "".join(before.push(token_id) for token_id in prompt)
    assert text + "".join(push_each(Detokenizer(tokenizer, prompt_ids=prompt), answer)) == visible.decode(
        "utf-8", "replace"
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["spm", "llama3"])
def test_any_ids_of_real_vocabularies(name: str, vocabularies: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = vocabularies[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    for skip_special in (True, False):
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        assert "".join(push_each(detokenizer, ids)) == tokenizer.decode(ids, skip_special=skip_special)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
@pytest.mark.parametrize("name", ["spm", "llama3", "qwen2"])
def test_any_text_comes_back(name: str, vocabularies: dict[str, Tokenizer], text: str) -> None:
    tokenizer = vocabularies[name]
    detokenizer = Detokenizer(tokenizer)
    pieces = push_each(detokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
