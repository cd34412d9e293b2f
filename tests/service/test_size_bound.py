"""Prompts that cannot fit are refused before anything is tokenised, and no others."""

from __future__ import annotations

import pytest
from service_models import open_demo

from mlxr.core.errors import ContextFull
from mlxr.core.types import SamplingParams
from mlxr.service.chat import SLACK, Chat, SizeBound, count_characters
from mlxr.service.requests import ChatRequest, Window
from mlxr.tokenizers import ChatTemplate


def test_only_what_cannot_fit_is_refused() -> None:
    tokenizer = open_demo().tokenizer
    bound = SizeBound(tokenizer, 100)
    longest = max((tokenizer.token_text(index) for index in range(tokenizer.vocab_size)), key=len)
    assert bound.characters == SLACK * 100 * len(longest)
    bound.check("prompt", "x" * bound.characters)
    bound.check("prompt", [1] * 100)
    with pytest.raises(ContextFull, match="must hold the prompt of 101 tokens"):
        bound.check("prompt", [1] * 101)
    with pytest.raises(ContextFull, match="prompt: this model's maximum context length is 100 tokens") as caught:
        bound.check("prompt", "x" * (bound.characters + 1))
    assert caught.value.context_tokens == 100
    assert caught.value.prompt_tokens == SLACK * 100
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * (bound.characters // 2)}]}] * 3
    with pytest.raises(ContextFull, match=r"messages: .*cannot hold a prompt of more than"):
        bound.check("messages", messages)


def test_what_a_template_makes_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = open_demo()
    bound = SizeBound(loaded.tokenizer, 100)
    template = ChatTemplate("{{ messages[-1].content * 10000 }}", bos_token="", eos_token="", name="repeats")
    chat = Chat(loaded.tokenizer, template, size_bound=bound)
    chat.warm_up()
    monkeypatch.setattr(type(loaded.tokenizer), "encode", lambda *_, **__: pytest.fail("was tokenised"))
    for window in (None, Window(100, 10)):
        request = ChatRequest([{"role": "user", "content": "ab"}], SamplingParams(), window=window)
        with pytest.raises(ContextFull, match="messages: this model's maximum context length is 100 tokens"):
            chat.encode(request)


def test_characters_are_counted_until_there_are_enough() -> None:
    assert count_characters({"a": ["bc", {"d": "efg"}], "h": 1}, 100) == 5
    assert count_characters(["abc"] * 10**6, 10) == 12
