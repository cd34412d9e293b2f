"""/v1/chat/completions through the real `openai` client, against the running server with the demo model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import openai
import pytest
from questions import ANSWER, MESSAGES, WEATHER

TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(ai: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    wanted = {"model": "demo", "messages": MESSAGES, "temperature": 0, **options}
    return ai.chat.completions.create(**wanted)  # type: ignore[call-overload, no-any-return]


def stream(ai: openai.OpenAI, **options: object) -> list[openai.types.chat.ChatCompletionChunk]:
    return list(ask(ai, stream=True, **options))  # type: ignore[arg-type]


def text_of(chunks: list[openai.types.chat.ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_conversation_is_answered(ai: openai.OpenAI) -> None:
    reply = ask(ai)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "demo"
    assert [choice.index for choice in reply.choices] == [0]
    message = reply.choices[0].message
    assert (message.role, message.content, message.refusal, message.tool_calls) == ("assistant", ANSWER, None, None)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None


def test_usage_adds_up(ai: openai.OpenAI) -> None:
    usage = ask(ai, max_tokens=5).usage
    assert usage is not None
    assert usage.completion_tokens == 5
    assert usage.prompt_tokens > 5
    assert usage.total_tokens == usage.prompt_tokens + 5
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_a_repeated_prompt_comes_from_the_cache(ai: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "What does shutil.copyfile do? " * 20}]
    ask(ai, messages=long, max_tokens=1)
    again = ask(ai, messages=long, max_tokens=1).usage
    assert again is not None
    assert again.prompt_tokens_details is not None
    assert (again.prompt_tokens_details.cached_tokens or 0) > 32
    beside = ask(ai, messages=long, max_tokens=1, extra_body={"cache_prompt": False}).usage
    assert beside is not None
    assert beside.prompt_tokens_details is not None
    assert beside.prompt_tokens_details.cached_tokens == 0


def test_timings_are_told(ai: openai.OpenAI) -> None:
    timings = (ask(ai, max_tokens=5).model_extra or {})["timings"]
    assert timings["predicted_n"] == 5
    assert timings["prompt_n"] + timings["cache_n"] > 5
    assert timings["predicted_ms"] >= 0
    assert timings["prompt_ms"] > 0


def test_a_stream_adds_up_to_the_answer(ai: openai.OpenAI) -> None:
    chunks = stream(ai)
    assert text_of(chunks) == ANSWER
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_the_usage_that_was_asked_for(ai: openai.OpenAI) -> None:
    chunks = stream(ai, max_tokens=4, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_asynchronous_client_gets_the_same(server: str) -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as ai:
            replies = await asyncio.gather(
                *(
                    ai.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)  # type: ignore[call-overload]
                    for _ in range(8)
                )
            )
        return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(talk()) == [ANSWER] * 8


def test_the_stream_accumulator_of_the_client_works(ai: openai.OpenAI) -> None:
    with ai.chat.completions.stream(model="demo", messages=MESSAGES, temperature=0) as events:  # type: ignore[arg-type]
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == ANSWER


def test_several_answers(ai: openai.OpenAI) -> None:
    reply = ask(ai, n=3, temperature=4, seed=7, max_tokens=12)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 36


def test_several_answers_in_a_stream(ai: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 4, "seed": 7, "max_tokens": 12}
    whole = ask(ai, **options)
    chunks = stream(ai, **options)
    assert [text_of(chunks, index) for index in range(3)] == [choice.message.content for choice in whole.choices]
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("seed", [0, 42, -2, 2**63 - 1, -(2**63), 2**64 - 1])
def test_a_seed_gives_the_same_answer_again(ai: openai.OpenAI, seed: int) -> None:
    answers = {ask(ai, temperature=1.8, seed=seed, max_tokens=12).choices[0].message.content for _ in range(2)}
    assert len(answers) == 1


def test_answers_differ_without_a_seed(ai: openai.OpenAI) -> None:
    assert len({ask(ai, temperature=20, max_tokens=12).choices[0].message.content for _ in range(3)}) > 1


@pytest.mark.parametrize("stop", ["components", ["zzz", "components"]])
def test_a_stop_string_ends_the_answer_before_itself(ai: openai.OpenAI, stop: object) -> None:
    choice = ask(ai, stop=stop).choices[0]
    assert choice.message.content == ANSWER.split("components")[0]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_answer_is_cut_at_its_longest(ai: openai.OpenAI, name: str) -> None:
    reply = ask(ai, **{name: 3})
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_logit_bias_rules_tokens_in_and_out(ai: openai.OpenAI) -> None:
    free = ask(ai, logprobs=True, max_tokens=1).choices[0]
    tokens = ask_ids(ai, free.message.content or "")
    other = ask(ai, logit_bias={str(tokens[0]): -100}, max_tokens=1).choices[0].message.content
    assert other != free.message.content
    forced = ask(ai, logit_bias={str(tokens[0]): 100}, max_tokens=3).choices[0].message.content
    assert forced == (free.message.content or "") * 3


def ask_ids(ai: openai.OpenAI, text: str) -> list[int]:
    url = str(ai.base_url).replace("/v1/", "/tokenize")
    reply = ai._client.post(url, json={"content": text, "model": "demo"})
    return list(reply.json()["tokens"])


def test_logprobs_describe_every_token(ai: openai.OpenAI) -> None:
    choice = ask(ai, logprobs=True, top_logprobs=3, max_tokens=6).choices[0]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert len(tokens) == 6
    assert "".join(token.token for token in tokens) == choice.message.content
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # the answer is greedy
        assert bytes(token.bytes or ()).decode() == token.token
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001


def test_logprobs_in_a_stream_are_the_same(ai: openai.OpenAI) -> None:
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    whole = ask(ai, **options).choices[0].logprobs
    assert whole is not None
    streamed = [
        token
        for chunk in stream(ai, **options)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in whole.content or []]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_a_penalty_keeps_tokens_from_coming_again(ai: openai.OpenAI, name: str) -> None:
    def repeats(**options: object) -> int:
        body = {"ignore_eos": True, **options}
        logprobs = ask(ai, logprobs=True, max_tokens=60, extra_body=body).choices[0].logprobs
        assert logprobs is not None
        tokens = [token.token for token in logprobs.content or []]
        return len(tokens) - len(set(tokens))

    assert repeats() > 5
    assert repeats(**{name: 90}) == 0


def test_top_k_one_is_greedy(ai: openai.OpenAI) -> None:
    assert ask(ai, temperature=2.0, extra_body={"top_k": 1}).choices[0].message.content == ANSWER
    assert ask(ai, temperature=2.0, extra_body={"min_p": 1.0}).choices[0].message.content == ANSWER
    assert ask(ai, temperature=2.0, top_p=1e-9).choices[0].message.content == ANSWER


def test_content_in_parts_is_joined(ai: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What does "}, {"type": "text", "text": "os.path.join do?"}]
    assert ask(ai, messages=[{"role": "user", "content": parts}]).choices[0].message.content == ANSWER


def test_a_long_conversation(ai: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!", "refusal": None, "annotations": [], "audio": None},
        *MESSAGES,
    ]
    reply = ask(ai, messages=messages, max_tokens=4)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4


def test_labels_of_the_caller_change_nothing(ai: openai.OpenAI) -> None:
    labels = {"user": "u1", "safety_identifier": "s", "metadata": {"a": "b"}, "service_tier": "auto", "store": False}
    assert ask(ai, **labels).choices[0].message.content == ANSWER


def test_a_json_object_can_be_demanded(ai: openai.OpenAI) -> None:
    reply = ask(ai, response_format={"type": "json_object"}, max_tokens=200, temperature=1, seed=3)
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
    else:
        assert (reply.choices[0].message.content or "").lstrip().startswith("{")


def test_json_keeps_to_its_schema(ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "big": {"type": "boolean"}},
        "required": ["name", "big"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    for seed in range(3):
        choice = ask(ai, response_format=wanted, temperature=1, seed=seed, max_tokens=200).choices[0]
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert set(value) == {"name", "big"}
        assert isinstance(value["big"], bool)


def test_the_parse_method_of_the_client_works(ai: openai.OpenAI) -> None:
    import pydantic

    class Verdict(pydantic.BaseModel):
        good: bool
        grade: int = pydantic.Field(ge=1, le=5)

    reply = ai.chat.completions.parse(
        model="demo",
        messages=MESSAGES,
        temperature=1,
        seed=1,
        response_format=Verdict,  # type: ignore[arg-type]
    )
    assert isinstance(reply.choices[0].message.parsed, Verdict)


def test_text_of_a_regular_expression(ai: openai.OpenAI) -> None:
    wanted = {"type": "regex", "regex": "(yes|no), [0-9]{3}"}
    text = ask(ai, extra_body={"response_format": wanted}, temperature=1, seed=5).choices[0].message.content or ""
    assert text[:4] in ("yes,", "no, ")
    assert text[-3:].isdigit()


def test_a_required_tool_is_called(ai: openai.OpenAI) -> None:
    choice = ask(ai, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=1, seed=1).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls or []
    assert len(calls) >= 1
    for call in calls:
        assert call.type == "function"
        assert call.id
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city"}


def test_a_named_tool_is_called(ai: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    calls = ask(ai, tools=[WEATHER, TIME], tool_choice=named, max_tokens=200).choices[0].message.tool_calls or []
    assert {call.function.name for call in calls} == {"get_time"}  # type: ignore[union-attr]


def test_tools_can_be_narrowed_down(ai: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    calls = ask(ai, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=200).choices[0].message.tool_calls or []
    assert {call.function.name for call in calls} == {"get_time"}  # type: ignore[union-attr]


def test_no_tool_is_called_where_none_may_be(ai: openai.OpenAI) -> None:
    choice = ask(ai, tools=[WEATHER], tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == ANSWER


def test_a_single_call_where_parallel_ones_are_off(ai: openai.OpenAI) -> None:
    options = {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    for seed in range(3):
        calls = ask(ai, temperature=1, seed=seed, **options).choices[0].message.tool_calls
        assert len(calls or []) == 1


def test_a_call_streams_as_it_is(ai: openai.OpenAI) -> None:
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    whole = ask(ai, **options).choices[0].message.tool_calls or []
    chunks = stream(ai, **options)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].id
    assert parts[0].type == "function"
    assert parts[0].function is not None
    assert parts[0].function.name == "get_weather"
    assert {part.index for part in parts} == {0}
    assert all(part.id is None and part.function and part.function.name is None for part in parts[1:])
    arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    assert json.loads(arguments) == json.loads(whole[0].function.arguments)  # type: ignore[union-attr]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_answer_of_a_tool_goes_back(ai: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "How is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    reply = ask(ai, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=5)
    assert reply.choices[0].message.content


@pytest.mark.parametrize(
    "content", [ANSWER, [{"type": "text", "text": ANSWER[:20]}, {"type": "text", "text": ANSWER[20:]}]]
)
def test_a_prediction_is_compared_with_the_answer(ai: openai.OpenAI, content: object) -> None:
    """It changes nothing, and the usage says how much of it came true, in a stream as well."""
    prediction = {"type": "content", "content": content}
    raw = ai.chat.completions.with_raw_response.create(
        model="demo", messages=MESSAGES, temperature=0, prediction=prediction
    )  # type: ignore[call-overload]
    assert "x-mlxr-ignored" not in raw.headers
    reply = raw.parse()
    assert reply.choices[0].message.content == ANSWER
    *chunks, last = stream(ai, prediction=prediction, stream_options={"include_usage": True})
    assert text_of(chunks) == ANSWER
    for usage in (reply.usage, last.usage):
        assert usage is not None
        details = usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens == usage.completion_tokens - 1  # the end token was not expected
        assert details.rejected_prediction_tokens == 0


def test_a_prediction_that_is_wrong_is_counted_as_such(ai: openai.OpenAI) -> None:
    reply = ask(ai, prediction={"type": "content", "content": "!!!"}, n=2)
    details = reply.usage.completion_tokens_details if reply.usage else None
    assert details is not None
    assert reply.choices[1].message.content == ANSWER
    assert details.accepted_prediction_tokens == 0
    assert (details.rejected_prediction_tokens or 0) >= 2
    with pytest.raises(openai.BadRequestError, match="prediction"):
        ask(ai, prediction={"type": "content", "content": 5})
    stopped = ask(ai, prediction={"type": "content", "content": ANSWER}, stop=["path components"]).usage
    assert stopped is not None
    assert stopped.completion_tokens_details is not None
    assert (stopped.completion_tokens_details.accepted_prediction_tokens or 0) > 5
