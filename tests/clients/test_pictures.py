"""Clients show pictures as they show them to their own services; a model of text refuses and names what is missing."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from served import Served

MISSING = r"reads text only: there is no file mmproj\*\.gguf beside"


def make_png(shade: int = 90) -> bytes:
    """A picture of 64 x 48 whose red grows to the right."""

    def pack(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + bytes(value for x in range(64) for value in (4 * x, shade, y)) for y in range(48))
    header = pack(b"IHDR", struct.pack(">IIBBBBB", 64, 48, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + pack(b"IDAT", zlib.compress(rows)) + pack(b"IEND", b"")


DATA = base64.b64encode(make_png()).decode()
URL = f"data:image/png;base64,{DATA}"
ASKED: list[Any] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "the quick"}, {"type": "image_url", "image_url": {"url": URL}}],
    }
]


def test_openai(seeing: Served, served: Served) -> None:
    api = openai.OpenAI(base_url=seeing.v1, api_key="none", max_retries=0)
    chat = api.chat.completions.create(model=seeing.model, messages=ASKED, max_tokens=4, temperature=0)
    content = [{"type": "input_text", "text": "the quick"}, {"type": "input_image", "image_url": URL, "detail": "auto"}]
    asked: Any = [{"role": "user", "content": content}]
    response = api.responses.create(model=seeing.model, input=asked, max_output_tokens=4, temperature=0)
    assert chat.usage is not None
    assert response.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens > 16
    assert response.output_text == chat.choices[0].message.content
    blind = openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=MISSING):
        blind.chat.completions.create(model=served.model, messages=ASKED, max_tokens=4)


def test_anthropic(seeing: Served, served: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "the quick"}]
    asked: Any = [{"role": "user", "content": content}]
    api = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    reply = api.messages.create(model=seeing.model, messages=asked, max_tokens=4)
    counted = api.messages.count_tokens(model=seeing.model, messages=asked)
    assert counted.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) > 16
    blind = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=MISSING):
        blind.messages.create(model=served.model, messages=asked, max_tokens=4)


def test_ollama(seeing: Served, served: Served, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(make_png())
    options = {"temperature": 0, "num_predict": 4}
    found = [
        ollama.Client(seeing.url).chat(
            seeing.model, [{"role": "user", "content": "the quick", "images": [image]}], options=options
        )
        for image in (str(path), make_png(), DATA)
    ]
    assert len({reply.message.content for reply in found}) == 1
    assert (found[0].prompt_eval_count or 0) > 16
    assert "vision" in (ollama.Client(seeing.url).show(seeing.model).capabilities or [])
    with pytest.raises(ollama.ResponseError, match=MISSING):
        ollama.Client(served.url).generate(served.model, "?", images=[DATA])


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(seeing: Served, responses: bool) -> None:
    messages, chat = pytest.importorskip("langchain_core.messages"), pytest.importorskip("langchain_openai")
    model = chat.ChatOpenAI(
        model=seeing.model, base_url=seeing.v1, api_key="none", max_retries=0, use_responses_api=responses
    )
    image = {"type": "image", "base64": DATA, "mime_type": "image/png"}
    asked = messages.HumanMessage(content=[{"type": "text", "text": "the quick"}, image])
    assert model.invoke([asked]).usage_metadata["input_tokens"] > 16


@pytest.mark.parametrize("kind", ["openai", "anthropic", "ollama_chat"])
def test_litellm(seeing: Served, kind: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = seeing.v1 if kind == "openai" else seeing.url
    common = {"model": f"{kind}/{seeing.model}", "api_base": base, "api_key": "none", "num_retries": 0}
    reply = litellm.completion(**common, messages=ASKED, max_tokens=4)
    assert reply.usage.prompt_tokens > 16
