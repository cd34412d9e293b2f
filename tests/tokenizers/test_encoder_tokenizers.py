"""WordPiece and Unigram: a folder's tokenizer, the GGUF file made of it, and the library itself give the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from encoder_folder import write_unigram, write_word_piece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from mlxr.core.errors import InvalidRequest, TokenizerError
from mlxr.tokenizers import Tokenizer, from_folder, from_gguf, to_gguf_metadata

WRITERS = {"word-piece": write_word_piece, "unigram": write_unigram}
TEXTS = [
    "",
    "the cat sat on the mat.",
    "Where  is   PARIS?",
    " Café naïve, berlin ",
    "sitting cats 1987",
    "[SEP] the </s> end",
    "汉字 the",
    "a" * 150,
    "\u0000\u200b tab\tand\nline",
]
Both = tuple[Tokenizer, Tokenizer, Library]


@pytest.fixture(params=WRITERS, scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder)
    metadata = to_gguf_metadata(folder)
    assert metadata["tokenizer.ggml.model"] == {"word-piece": "bert", "unigram": "t5"}[request.param]
    return from_folder(folder), from_gguf(metadata), Library.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_folder_file_and_library_agree(text: str, both: Both) -> None:
    check(text, both)


@given(st.text(alphabet="abc .?The cat1é汉\n", max_size=40))
@settings(max_examples=60, deadline=None)
def test_they_agree_on_any_text(both: Both, text: str) -> None:
    check(text, both)


def check(text: str, both: Both) -> None:
    folder, file, library = both
    library.encode_special_tokens = True
    wanted = library.encode(text, add_special_tokens=True).ids
    assert folder.encode(text) == wanted
    assert file.encode(text) == wanted
    assert file.decode(wanted) == folder.decode(wanted)


def test_pairs_are_those_of_the_library(both: Both) -> None:
    *tokenizers, library = both
    wanted = library.encode("the cat", "where is paris?")
    for tokenizer in tokenizers:
        parts = [tokenizer.encode(text, add_special=False) for text in ("the cat", "where is paris?")]
        joined, second = tokenizer.join_pair(*parts, 64)
        assert joined == wanted.ids
        assert second == (wanted.type_ids.index(1) if 1 in wanted.type_ids else None)
        short, _ = tokenizer.join_pair(*parts, 8)
        assert len(short) == 8
        with pytest.raises(InvalidRequest, match="has no room beside a document"):
            tokenizer.join_pair(*parts, 3)


def test_words_come_back(both: Both) -> None:
    for tokenizer in both[:2]:
        assert tokenizer.decode(tokenizer.encode("the cat sat on mat")) == "the cat sat on mat"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.unknown_token_id": 100_000}, "unknown_token_id is 100000, outside the vocabulary"),
        ({"tokenizer.ggml.precompiled_charsmap": ["x"]}, "precompiled_charsmap must be a list of bytes"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2, 3]}, "the scores do not fit the vocabulary"),
        ({"tokenizer.ggml.scores": None}, "scores is missing"),
    ],
)
def test_a_broken_unigram_is_refused(change: dict[str, object], match: str, tmp_path: Path) -> None:
    write_unigram(tmp_path)
    with pytest.raises(TokenizerError, match=match):
        from_gguf(to_gguf_metadata(tmp_path) | change)


def test_a_folder_with_only_a_list_of_words_reads_as_one_with_a_file_of_the_library(tmp_path: Path) -> None:
    write_word_piece(tmp_path)
    full, stated = from_folder(tmp_path), to_gguf_metadata(tmp_path)
    texts = [full.token_text(index) for index in range(full.vocab_size)]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("".join(f"{text}\n" for text in texts))
    words = from_folder(tmp_path)
    assert to_gguf_metadata(tmp_path) == stated
    for text in TEXTS:
        assert words.encode(text) == full.encode(text)
        assert words.encode(text, parse_special=True) == full.encode(text, parse_special=True)
    parts = words.encode("the cat", add_special=False), words.encode("rain", add_special=False)
    assert words.join_pair(*parts, 64) == full.join_pair(*parts, 64)
    (tmp_path / "vocab.txt").write_text("the\ncat\n")
    with pytest.raises(TokenizerError, match=r"vocab.txt: unk_token '\[UNK\]' is not in it"):
        from_folder(tmp_path)
