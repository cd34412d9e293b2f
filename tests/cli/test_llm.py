"""`LLM` on small models: prompts of every kind, batches, streams, settings, errors."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from mlxr import LLM, Finish, FinishReason, SamplingParams, TextDelta
from mlxr.core.errors import InvalidRequest, OutOfPages, SettingError, TemplateError
from mlxr.core.settings import SETTINGS

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def test_arguments_are_the_settings() -> None:
    parameters = list(inspect.signature(LLM).parameters)
    settings = [row.name for row in SETTINGS if row.scope == "model"]
    assert parameters == ["model", *settings, "needs_chat_template", "progress", "adapter"]


def test_a_keyword_that_is_no_setting_of_a_model_is_refused() -> None:
    for name, hint in (("thread", "did you mean 'threads'"), ("port", "there are device, threads")):
        with pytest.raises(TypeError, match=f"'{name}'; {hint}"):
            LLM("demo", **{name: 1})  # type: ignore[arg-type]


def test_prompts_of_every_kind(gguf: Path) -> None:
    with LLM(gguf) as llm:
        ids = llm.tokenize("the fox")
        (by_text,) = llm.generate("the fox", SHORT)
        (by_ids,) = llm.generate(ids, SHORT)
        both = llm.generate(["the fox", ids], SHORT)
        assert by_text == by_ids == both[0] == both[1]
        assert len(by_text.token_ids) == by_text.usage.completion_tokens == 6
        assert by_text.usage.prompt_tokens == len(ids)
        assert llm.generate([], SHORT) == []
        assert len(llm.generate("the fox")[0].token_ids) <= 256


def test_a_batch_answers_as_each_alone(gguf: Path) -> None:
    prompts = ["the fox", "a", "the dog and the sun " * 8, ""]
    params = [SamplingParams(max_tokens=n, temperature=n / 9, seed=n, ignore_eos=True) for n in (3, 9, 5, 7)]
    with LLM(gguf, max_batch_tokens=16) as llm:
        together = llm.generate(prompts, params)
    with LLM(gguf, kv_cache="simple") as llm:  # nothing is shared, so the usage is the same too
        alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert together == alone


def test_a_stream_adds_up_to_the_reply(folder: Path) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    with LLM(folder) as llm:
        assert llm.can_chat
        events = list(llm.stream_chat(messages, SHORT))
        reply = llm.chat(messages, SHORT)
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == reply.text
        assert events[-1] == Finish(FinishReason.LENGTH, reply.usage)
        with llm.stream("the fox", SamplingParams(max_tokens=None, ignore_eos=True)) as stream:
            next(stream)
        assert llm.stats().engine.running_sequences == 0
        assert llm.stats().engine.used_pages == 0


def test_an_answer_without_a_limit_ends_with_the_context(gguf: Path) -> None:
    with LLM(gguf, context_tokens=40) as llm:
        (completion,) = llm.generate("the fox", SamplingParams(max_tokens=None, ignore_eos=True))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.prompt_tokens + completion.usage.completion_tokens == 40


def test_logprobs_come_with_alternatives(gguf: Path) -> None:
    with LLM(gguf) as llm:
        (completion,) = llm.generate("the fox", SamplingParams(max_tokens=4, logprobs=3, ignore_eos=True))
    assert [info.chosen.token_id for info in completion.tokens] == list(completion.token_ids)
    assert all(len(info.top) == 3 and info.top[0] == info.chosen for info in completion.tokens)


def test_stats_tell_what_ran(gguf: Path) -> None:
    with LLM(gguf, threads=1) as llm:
        llm.generate("the fox", SHORT)
        stats = llm.stats()
    assert (stats.model, stats.device, stats.threads) == (str(gguf), "cpu", 1)
    assert {row.operator for row in stats.dispatches} >= {"attend", "linear", "sample"}
    assert {row.implementation for row in stats.dispatches} == {"cpu"}
    assert stats.copied_bytes == 0
    assert stats.engine.decode_tokens == 5
    assert stats.weight_bytes > 0 < stats.load_s


def test_what_cannot_be_is_refused(gguf: Path) -> None:
    with pytest.raises(SettingError, match="threads"):
        LLM(gguf, threads=0)
    with pytest.raises(SettingError, match="arena_bytes"):
        LLM(gguf, arena_bytes="plenty")
    with LLM(gguf, arena_bytes="64K") as llm:
        with pytest.raises(TemplateError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(OutOfPages, match="arena_bytes"):
            llm.generate(["a", "b"], SamplingParams(max_tokens=300))
        with pytest.raises(InvalidRequest, match="one for each"):
            llm.generate(["a", "b"], [SHORT])
        with pytest.raises(InvalidRequest, match="mixes"):
            llm.generate([1, "b"], SHORT)  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="token id 512"):
            llm.generate([512], SHORT)
        assert llm.stats().engine.waiting_sequences == 0
        assert len(llm.generate("a", SHORT)[0].token_ids) == 6


def test_a_closed_model_says_so(gguf: Path) -> None:
    llm = LLM(gguf)
    llm.close()
    llm.close()
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("a")
