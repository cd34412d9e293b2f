"""Names: the allowed ones, the models that they mean, and that none of them is a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxr.core.errors import InvalidRequest
from mlxr.registry import ModelName
from mlxr.registry.blobs import parse_digest
from mlxr.registry.record import name_for


@pytest.mark.parametrize(
    ("text", "canonical", "short"),
    [
        ("llama3.2", "llama3.2:latest", "llama3.2"),
        ("llama3.2:1b", "llama3.2:1b", "llama3.2:1b"),
        ("me/mine:v1", "me/mine:v1", "me/mine:v1"),
        ("hf.co/Owner/Repo-GGUF:Q4_K_M", "hf.co/Owner/Repo-GGUF:Q4_K_M", "hf.co/Owner/Repo-GGUF:Q4_K_M"),
        ("localhost:5000/a/b", "localhost:5000/a/b:latest", "localhost:5000/a/b"),
        ("registry.ollama.ai/library/llama3.2:latest", "llama3.2:latest", "llama3.2"),
        ("library/llama3.2", "llama3.2:latest", "llama3.2"),
    ],
)
def test_names(text: str, canonical: str, short: str) -> None:
    name = ModelName.parse(text)
    assert (str(name), name.short) == (canonical, short)
    assert ModelName.parse(canonical) == name


BAD = [
    *("", ":", "a:", ":a", "/", "a/", "/a", "//", "a//b", "a/b/c/d", "a:b:c", "a b", "a\n", "a\0b", "é", "a" * 600),
    *("..", "../a", "a/..", "a/../b", "../../etc/passwd", "a:..", "a:../b", ".hidden", "a/.b", "-a", "a:-b"),
    *("a\\b", "..\\a", "%2e%2e/a", "a?b", "a#b", "~root/x", "C:/x", "hf.co/../x", "http://hf.co/a/b", "a:b/c"),
]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the name of a model") as caught:
        ModelName.parse(text, "source")
    assert caught.value.field == "source"
    assert len(str(caught.value)) < 400


@given(st.text(max_size=40) | st.from_regex(r"[a-zA-Z0-9._:/\\~-]{0,30}", fullmatch=True))
def test_no_name_is_a_way_out(text: str) -> None:
    try:
        name = str(ModelName.parse(text))
    except InvalidRequest:
        return
    parts = Path(name).parts
    assert not Path(name).is_absolute()
    assert not any(part.startswith((".", "~", "-")) for part in parts)
    assert "\\" not in name
    assert "\0" not in name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Tiny-1B.Q4_0.gguf", "Tiny-1B.Q4_0:latest"),
        ("my model (2).gguf", "my-model--2-:latest"),
        ("...", "model:latest"),
    ],
)
def test_names_of_files(file: str, name: str) -> None:
    assert str(name_for(Path("/x") / file)) == name


def test_digests() -> None:
    digits = "ab" * 32
    assert (
        parse_digest(f"sha256:{digits}") == parse_digest(f"sha256-{digits.upper()}") == parse_digest(digits) == digits
    )
    for text in (
        "",
        "sha256:",
        digits[:-1],
        digits + "0",
        f"md5:{digits}",
        "sha256:../../../etc/passwd",
        f"../{digits}",
    ):
        with pytest.raises(InvalidRequest, match="sha256"):
            parse_digest(text)
