"""From requests of the OpenAI and Anthropic dialects to those of the service."""

from __future__ import annotations

import pytest

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import MAX_SEED, Grammar
from mlxr.server.anthropic.request import MessageRequest
from mlxr.server.ollama.answers import ChatMessage, list_messages
from mlxr.server.openai.chat import ChatCompletionRequest
from mlxr.server.openai.completions import CompletionRequest
from mlxr.server.openai.response_request import ResponseRequest
from mlxr.service.messages import check_messages
from mlxr.service.requests import ChatRequest, NamedTool

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
ITEMS = [
    {"role": "user", "content": "Hi"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "2"},
    {"type": "message", "role": "assistant", "content": "Two."},
    {"role": "user", "content": "Thanks"},
]
BLOCKS = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
            {"type": "text", "text": "Thanks"},
        ],
    },
]


def chat(**fields: object) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return ChatCompletionRequest.model_validate(body).to_request()


def respond(**fields: object) -> ChatRequest:
    return ResponseRequest.model_validate({"input": "Hi", **fields}).to_request()


def message(**fields: object) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return MessageRequest.model_validate(body).to_request()


def test_defaults_are_those_of_the_dialects() -> None:
    for wanted in (chat(), respond(), message()):
        assert (wanted.params.temperature, wanted.params.top_p, wanted.params.top_k) == (1.0, 1.0, 0)
        assert (wanted.tool_choice, wanted.parallel_tool_calls, wanted.grammar) == ("auto", True, None)
        assert wanted.cache_prompt
    assert (chat().params.max_tokens, message().params.max_tokens) == (None, 9)
    text = CompletionRequest.model_validate({"prompt": "Hi"})
    assert text.to_request("Hi").params.max_tokens == 16


def test_every_field_of_a_chat_arrives() -> None:
    wanted = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=-2,
        stop="x",
        stop_token_ids=[3],
        logit_bias={"7": -5},
        logprobs=True,
        top_logprobs=2,
        n=3,
        max_completion_tokens=11,
        max_tokens=12,
        ignore_eos=True,
        cache_prompt=False,
        priority=4,
        deadline_s=1.5,
        reasoning_effort="low",
        chat_template_kwargs={"a": 1},
        parallel_tool_calls=False,
    )
    params = wanted.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (MAX_SEED - 2, ("x",), frozenset({3}))
    assert (params.logit_bias, params.logprobs, params.n, params.max_tokens) == ({7: -5.0}, 2, 3, 11)
    assert (params.ignore_eos, wanted.cache_prompt, wanted.priority, wanted.deadline_s) == (True, False, 4, 1.5)
    assert (wanted.think, wanted.template_values, wanted.parallel_tool_calls) == ("low", {"a": 1}, False)


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_object")),
        ({"type": "json_object", "schema": {"type": "object"}}, Grammar("json_schema", '{"type":"object"}')),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, Grammar("json_object")),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}, Grammar("json_schema", "{}")),
        ({"type": "regex", "regex": "a+"}, Grammar("regex", "a+")),
        ({"type": "grammar", "grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
    ],
)
def test_formats_are_grammars(wanted: object, grammar: Grammar | None) -> None:
    assert chat(response_format=wanted).grammar == grammar


def test_a_conversation_of_chat_messages() -> None:
    messages = chat(
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    ).messages
    assert list(messages) == [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"text": "m", "index": 1}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}, {"type": "reasoning.encrypted"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking"}]},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "2"}]},
    ],
)
def test_thoughts_come_back_in_many_spellings(thought: dict[str, object]) -> None:
    sent = {"role": "assistant", "content": "2", "id": "msg_1", "type": "message", "provider_specific_fields": {"a": 1}}
    nulls = dict.fromkeys(("name", "tool_calls", "function_call", "audio", "refusal", "annotations", "reasoning"))
    question = {"role": "user", "content": "Hi", **dict.fromkeys(("name", "tool_calls", "tool_call_id"))}
    (_, answer) = chat(messages=[question, {**sent, **nulls, **thought}]).messages
    assert answer == {"role": "assistant", "content": "2", "reasoning": "hm"}


def test_answers_without_text_come_back() -> None:
    call = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}, "index": 0}
    sent = [
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ]
    read = chat(messages=[{"role": "user", "content": "Hi"}, *sent]).messages[1:]
    assert [message["content"] for message in read] == ["No.", "No.", "", "", ""]
    assert read[3]["tool_calls"] == [{**CALL, "function": {"name": "add", "arguments": '{"a":1}'}}]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("arguments", [None, "", [], "[]", "{'a': 1,}", "Beijing", {"a": 1}])
def test_arguments_of_earlier_calls_may_be_anything(arguments: object, *, missing: bool) -> None:
    """Clients send back what they got, from this server or from another one."""
    given = {} if missing else {"arguments": arguments}
    call = {**CALL, "function": {"name": "f", **given}}
    block = {"type": "tool_use", "id": "c1", "name": "f"} | ({} if missing else {"input": arguments})
    ollama = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    read = (
        chat(messages=[BLOCKS[0], {"role": "assistant", "tool_calls": [call]}]).messages[-1],
        respond(input=[{"type": "function_call", "call_id": "c1", "name": "f", **given}]).messages[-1],
        message(messages=[BLOCKS[0], {"role": "assistant", "content": [block]}, BLOCKS[0]]).messages[1],
        list_messages([ollama])[0],
    )
    wanted = {} if missing or arguments in (None, "", [], "[]") else {"a": 1}
    if arguments == "Beijing" and not missing:
        wanted = {"input": "Beijing"}
    for earlier in read:
        (called,) = check_messages([{"content": "", **earlier}])[0]["tool_calls"]  # type: ignore[misc]
        assert called["function"] == {"name": "f", "arguments": wanted}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, "content[0].refusal"),
    ],
)
def test_what_a_role_cannot_have(bad: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=[{"role": "user", "content": "Hi"}, bad])
    assert refused.value.field == f"messages[1].{field}"


def test_a_conversation_of_items() -> None:
    messages = respond(input=ITEMS, instructions="Be short.").messages
    assert list(messages) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait.", "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Thanks"},
    ]


def test_a_conversation_of_blocks() -> None:
    messages = message(messages=BLOCKS, system=[{"type": "text", "text": "Be short."}]).messages
    assert list(messages) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait.", "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2", "name": "f"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
        {"role": "user", "content": "Thanks"},
    ]


HIDDEN_ITEMS: list[dict[str, object]] = [
    {"summary": []},
    {"summary": None},
    {"summary": [], "content": []},
    {"summary": [], "content": None, "encrypted_content": "eA=="},
    {"summary": [{"type": "summary_text", "text": ""}]},
    {"summary": [{"type": "summary_text", "text": " \n"}], "content": [{"type": "reasoning_text", "text": "\n\n"}]},
]


@pytest.mark.parametrize("item", HIDDEN_ITEMS)
@pytest.mark.parametrize("place", range(len(ITEMS) + 1))
def test_thoughts_that_are_hidden_are_no_turn(item: dict[str, object], place: int) -> None:
    hidden = {"type": "reasoning", "id": "rs_2", **item}
    assert respond(input=[*ITEMS[:place], hidden, *ITEMS[place:]]).messages == respond(input=ITEMS).messages


def test_a_summary_counts_where_the_thought_is_hidden() -> None:
    hidden = {"type": "reasoning", "id": "rs_2", "content": [{"type": "reasoning_text", "text": ""}]}
    (thought,) = respond(input=[{**hidden, "summary": [{"type": "summary_text", "text": "hm"}]}]).messages
    assert thought == {"role": "assistant", "content": "", "reasoning": "hm"}


@pytest.mark.parametrize(
    "blocks",
    [
        [{"type": "redacted_thinking", "data": "x"}],
        [{"type": "thinking", "thinking": "", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}],
    ],
)
def test_blocks_that_are_hidden_are_no_turn(blocks: object) -> None:
    hidden = {"role": "assistant", "content": blocks}
    assert message(messages=[hidden, *BLOCKS, hidden]).messages == message(messages=BLOCKS).messages
    asked, details = {"role": "user", "content": "Hi"}, [{"type": "reasoning.encrypted", "data": "x"}]
    in_chat = {"role": "assistant", "content": None, "reasoning_details": details}
    assert chat(messages=[asked, in_chat, asked]).messages == [asked, asked]


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("assistant", {"type": "tool_result", "tool_use_id": "c", "content": "x"}),
        ("user", {"type": "tool_use", "id": "c", "name": "f", "input": {}}),
        ("user", {"type": "thinking", "thinking": "hm"}),
        ("system", {"type": "tool_result", "tool_use_id": "c", "content": "x"}),
    ],
)
def test_blocks_stand_where_they_belong(role: str, block: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        message(messages=[{"role": role, "content": [block]}])
    assert refused.value.field == "messages[0].content[0]"


def test_choices_of_tools() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert message(tools=[tool], tool_choice={"type": "any"}).tool_choice == "required"
    assert message(tools=[tool], tool_choice={"type": "none"}).tool_choice == "none"
    assert message(tools=[tool], tool_choice={"type": "tool", "name": "f"}).tool_choice == NamedTool("f")
    assert not message(
        tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    ).parallel_tool_calls
    assert chat(tools=[function], tool_choice="required").tool_choice == "required"
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[function], tool_choice=named).tool_choice == NamedTool("f")
    flat = {"type": "function", "name": "f"}
    assert respond(tools=[flat], tool_choice={"type": "function", "name": "f"}).tool_choice == NamedTool("f")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [flat]}
    other = {"type": "function", "name": "g"}
    assert [one.name for one in respond(tools=[flat, other], tool_choice=allowed).tools] == ["f"]


@pytest.mark.parametrize(
    ("thinking", "effort", "think"),
    [
        (None, None, False),
        ({"type": "disabled"}, None, False),
        ({"type": "enabled", "budget_tokens": 5}, None, True),
        ({"type": "enabled", "budget_tokens": 5}, "high", "high"),
        ({"type": "adaptive"}, None, None),
        ({"type": "adaptive"}, "low", "low"),
    ],
)
def test_thinking_in_messages(thinking: object, effort: str | None, think: object) -> None:
    assert message(thinking=thinking, output_config={"effort": effort}).think == think


def test_prompts_one_by_one() -> None:
    def split(prompt: object) -> list[object]:
        return list(CompletionRequest.model_validate({"prompt": prompt}).prompts)

    assert split("a") == ["a"]
    assert split(None) == [""]
    assert split(["a", "b"]) == ["a", "b"]
    assert split([1, 2]) == [[1, 2]]
    assert split([[1], [2, 3]]) == [[1], [2, 3]]
