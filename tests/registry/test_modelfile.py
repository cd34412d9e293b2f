"""Modelfiles and generation options: what is read or refused, and that written ones read back."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_models import make_model, paper_registry

from mlxr.core.errors import InvalidRequest
from mlxr.registry import Changes, Registry
from mlxr.registry.modelfile import (
    OPTIONS,
    Modelfile,
    check_options,
    decode_modelfile,
    find_idle,
    parse_modelfile,
    read_parameter,
    write_modelfile,
)

TEXT = '''
# a comment
FROM demo
parameter temperature 0.2
PARAMETER top_k 5
PARAMETER stop "<|im_end|>"
PARAMETER stop User:
SYSTEM """You are brief.
Always."""

TEMPLATE """{{ bos_token }}{% for m in messages %}
{{ m.content }}{% endfor %}"""
MESSAGE user What is "a list"?
MESSAGE assistant """A sequence.
It grows."""
LICENSE MIT
LICENSE "and more"
'''


def test_a_modelfile() -> None:
    modelfile = parse_modelfile(TEXT)
    assert modelfile == Modelfile(
        source="demo",
        template="{{ bos_token }}{% for m in messages %}\n{{ m.content }}{% endfor %}",
        system="You are brief.\nAlways.",
        license="MIT\n\nand more",
        parameters={"temperature": 0.2, "top_k": 5, "stop": ["<|im_end|>", "User:"]},
        messages=[
            {"role": "user", "content": 'What is "a list"?'},
            {"role": "assistant", "content": "A sequence.\nIt grows."},
        ],
    )
    assert parse_modelfile(TEXT.replace("\n", "\r\n").replace("sequence.\r", "sequence.")).parameters["top_k"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no FROM"),
        ("SYSTEM x", "has no FROM"),
        ("FROM a\nFROM b", "line 2: FROM: may stand there once"),
        ("FROM a\nADAPTER x\nADAPTER y", "line 3: ADAPTER: may stand there once"),
        ("FROM a\nDRAFT x", "DRAFT: is not supported"),
        ("FROM a\nPARAMETER warmth 1", "line 2: PARAMETER warmth: is not an option"),
        ("FROM a\nPARAMETER top_k many", "PARAMETER top_k: must be a number"),
        ("FROM a\nPARAMETER top_k 1.5", "top_k: must be a number, got"),
        ("FROM a\nPARAMETER temperature nan", "must be a number"),
        ("FROM a\nPARAMETER typical_p 1.5", "PARAMETER typical_p: must be at least 0.0 and at most 1.0, got 1.5"),
        ("FROM a\nMESSAGE robot hi", "one of system, user, assistant"),
        ('FROM a\n\nSYSTEM """never\nends', "line 3: no line ends with"),
        ('FROM a\nSYSTEM """x""" y', "no line ends with"),
        ('FROM a\nSYSTEM "never ends', "line 2: no line ends with"),
        ("FROM a\n{{ x }}", "line 2: '{{ x }}' is no instruction"),
        ("FROM a\n" + "#" * (1 << 22), "more than"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^Modelfile: ") as caught:
        parse_modelfile(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode(),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    ],
)
def test_editors_of_windows_write_modelfiles_too(encode: Callable[[str], bytes]) -> None:
    text = "FROM demo\r\nSYSTEM Größer als 5 €?\r\n"
    read = parse_modelfile(decode_modelfile(encode(text)))
    assert (read.source, read.system) == ("demo", "Größer als 5 €?")
    assert parse_modelfile("\ufeff" + text) == read


@pytest.mark.parametrize("data", [b"FROM \xff", codecs.BOM_UTF16_LE + b"F\x00\xd8"])
def test_other_bytes_are_no_modelfile(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is not UTF-"):
        decode_modelfile(data)


QUOTED = r'''FROM demo
SYSTEM "Use \nabla and \textbf, "quoted" or not"
PARAMETER stop "\n\n"
PARAMETER stop "a \d"
PARAMETER stop \n
MESSAGE user "one
 two"
MESSAGE assistant "He said:
"no" and then
went away.
"
TEMPLATE """{{ bos_token }}
say "hi""""
LICENSE "x"
'''


def test_quotes_are_those_of_ollama() -> None:
    read = parse_modelfile(QUOTED)
    assert read.system == 'Use \\nabla and \\textbf, "quoted" or not'
    assert read.parameters == {"stop": ["\n\n", "a \\d", "\\n"]}
    assert [message["content"] for message in read.messages] == ["one\n two", 'He said:\n"no" and then\nwent away.\n']
    assert (read.template, read.license) == ('{{ bos_token }}\nsay "hi"', "x")


def test_what_speaks_of_ollama_itself_is_kept_apart() -> None:
    text = "FROM a\nRENDERER qwen3-coder\nPARSER qwen3-coder\nREQUIRES 0.14.0\nTEMPLATE {{ .Prompt }}\n"
    read = parse_modelfile(text)
    hints = {"RENDERER": "qwen3-coder", "PARSER": "qwen3-coder", "REQUIRES": "0.14.0", "TEMPLATE": "{{ .Prompt }}"}
    assert (read.hints, read.changes) == (hints, Changes())
    assert parse_modelfile("FROM a\nTEMPLATE {{ .Prompt }}").template == "{{ .Prompt }}"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ['"', '"""', 'a"""b\n"', "\n\n"]
)


@given(system=texts, template=texts, content=texts, stops=st.lists(texts.filter(bool), max_size=3))
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, system: str, template: str, content: str, stops: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "modelfile"
    folder.mkdir(exist_ok=True)
    path = folder / "m.gguf"
    path.write_bytes(make_model())
    record = replace(
        paper_registry(folder).find(path),
        system=system,
        template=template,
        messages=({"role": "user", "content": content},),
        parameters={"stop": stops, "temperature": 0.5} if stops else {},
    )
    written = write_modelfile(record)
    if any(re.search(r'"""\s*\n', text) for text in (system, template, content)):
        assert re.search("# (SYSTEM|TEMPLATE|MESSAGE user) cannot be written", written)
        return
    read = parse_modelfile(written)
    assert (read.system, read.template, read.messages) == (system, template, list(record.messages))
    assert (read.parameters, read.source) == (dict(record.parameters), str(path))


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_modelfile(f"FROM a\n{text}")


def test_options() -> None:
    given_options = {"temperature": 1, "stop": "x", "num_ctx": 4096, "seed": None, "top_k": 3.0, "typical_p": 1}
    assert check_options(given_options) == {
        "temperature": 1,
        "stop": ["x"],
        "num_ctx": 4096,
        "top_k": 3,
        "typical_p": 1,
    }
    assert check_options({"warmth": 1}) == {}
    assert find_idle({"warmth": 1, "num_gpu": 3, "top_k": 2, "numa": None}) == ["warmth", "num_gpu"]
    assert read_parameter("use_mmap", "True") is True
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    for name, value in (
        ("top_k", "3"),
        ("top_k", True),
        ("top_k", 10**400),
        ("temperature", float("inf")),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop", ["x"] * 65),
        ("numa", 1),
        ("typical_p", 1.9),
        ("mirostat", 3),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_options({name: value})
        assert caught.value.field == f"options.{name}"


def test_a_models_own_modelfile(registry: Registry, model_file: Path) -> None:
    record = registry.import_file(model_file, "m", Changes(parameters={"stop": ["a", "b"], "top_k": 3}, system="Hi"))
    text = write_modelfile(record)
    assert f"FROM {model_file}\n" in text
    assert 'PARAMETER stop "a"\nPARAMETER stop "b"\nPARAMETER top_k 3\n' in text
