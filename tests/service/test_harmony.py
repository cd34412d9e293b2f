"""gpt-oss: messages in channels, read however they are cut, shown as its template shows them, enforced by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuts import cut_text, merge
from hypothesis import given
from hypothesis import strategies as st

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import FinishReason, Grammar, SamplingParams, Usage
from mlxr.engine.sequence import TokenEvent
from mlxr.service.chat import Chat
from mlxr.service.preparation import Preparation, Prepared
from mlxr.service.reasoning import Thought
from mlxr.service.requests import ChatRequest, NamedTool, Tool
from mlxr.service.streams import Completion, fold_events
from mlxr.service.tools.format import CallPiece, Place
from mlxr.service.tools.harmony import MARKERS, HarmonyParser
from mlxr.tokenizers import ChatTemplate, Tokenizer, from_gguf, to_gguf_metadata

TOKENIZER_TESTS = Path(__file__).parents[1] / "tokenizers"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, NOW = Tool("weather", "Tells the weather", CITY), Tool("now", "The time")
USER = {"role": "user", "content": "Hi"}
NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>hm<|end|>{NEXT}"
FINAL, SAYS = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
OSLO = '{"city": "Oslo"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}"
CALLED = CallPiece(0, OSLO, "weather")
HM = Thought("hm")


def read(pieces: Sequence[str], *, place: Place = "start", is_enforced: bool = False, limit: int | None = None) -> Any:
    parser = HarmonyParser(frozenset({"weather", "now"}), is_enforced=is_enforced)
    parser.place, parser.max_calls = place, limit
    found = [part for piece in pieces for part in parser.push(piece)]
    return merge(found + parser.flush())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}{FINAL}Four.", [HM, "Four."]),
        (f"{THOUGHT}{FINAL}Four.<|return|>", [HM, "Four."]),
        (f"{THOUGHT}{THOUGHT}{FINAL}Four.", [Thought("hm\n\nhm"), "Four."]),
        (f"{THOUGHT}{CALL}<|call|>", [HM, CALLED]),
        (f"{THOUGHT}{SAYS}Let me see.<|end|>{NEXT}{CALL}", [HM, "Let me see.", CALLED]),
        (f"{SAYS}One.<|end|>{NEXT}{FINAL}Two.", ["One.\n\nTwo."]),
        (
            f"{THOUGHT}{SAYS}One.<|end|>{NEXT}{THOUGHT}{FINAL}Two.",
            [HM, "One.", Thought("\n\nhm"), "\n\nTwo."],
        ),
        (f"{THOUGHT} to=functions.weather<|channel|>commentary json<|message|>{OSLO}<|call|>", [HM, CALLED]),
        (f"<|channel|>commentary to=weather<|message|> {OSLO}\n", [CALLED]),
        (f"<|channel|>analysis to=functions.weather code<|message|>{OSLO}<|call|>", [CALLED]),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", [CallPiece(0, "{}", "now")]),
        (
            f'<|channel|>commentary to=functions.now<|message|>{{"a": "{FINAL}x<|call|>"}}<|call|>',
            [CallPiece(0, f'{{"a": "{FINAL}x<|call|>"}}', "now")],
        ),
        # Texts that are not calls, or are calls of unknown tools.
        (f'<|channel|>commentary to=functions.now<|message|>{{"a": "b<|end|>{NEXT}{FINAL}Four.', ['{"a": "b\n\nFour.']),
        ('<|channel|>commentary to=functions.now<|message|>{"a": NaN}<|call|>', ['{"a": NaN}']),
        ("<|channel|>commentary to=functions.now<|message|>{'a': 1,}<|call|>", [CallPiece(0, '{"a": 1}', "now")]),
        ("<|channel|>commentary to=functions.now<|message|>no JSON", ["no JSON"]),
        ("<|channel|>commentary to=functions.now<|message|>[1]<|call|>", ["[1]"]),
        ('<|channel|>commentary to=functions.now<|message|>{"a": ', ['{"a": ']),
        ("<|channel|>commentary to=functions.nobody<|message|>{}", ["{}"]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Thought("1 + 1")]),
        ("<|channel|>final to=functions.now<|message|>{}", ["{}"]),
        # Broken headers, and forgotten ends.
        ("Four.", ["Four."]),
        (" <b>", [" <b>"]),
        ("<", ["<"]),
        ("<|message|>Four.", ["Four."]),
        (f"{NEXT}{FINAL}Four.", ["Four."]),
        (f"<|channel|>Sure, here?<|end|>{NEXT}{FINAL}Four.", [Thought("Sure, here?"), "Four."]),
        (f"<|channel|>??<|message|>hm<|end|>{NEXT}{FINAL}Four.", [HM, "Four."]),
        (f"<|channel|>commentary to=assistant<|channel|>commentary?<|message|>So.<|end|>{NEXT}{CALL}", ["So.", CALLED]),
        (f"<|channel|>analysis<|message|>hm{FINAL}Four.", [HM, "Four."]),
        (f"<|channel|>analysis<|message|>hm{NEXT}{FINAL}Four.", [HM, "Four."]),
        ("<|channel|>analysis<|message|>hm <|en", [Thought("hm <|en")]),
        ("<|channel|>anal", []),
        (f"<|channel|>{'a' * 2000}<|end|>{NEXT}{FINAL}Four.", [Thought("a" * 2000), "Four."]),
        (f"{THOUGHT}", [HM]),
        ("", []),
    ],
)
def test_messages_are_told_by_their_channels(text: str, expected: list[object]) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected


def test_enforced_arguments_may_spell_markers() -> None:
    arguments = f'{{"a": "{FINAL}x<|call|>\\ud83d", "b": 1e999}}'
    text = f"{THOUGHT}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{arguments}<|call|>"
    called = CallPiece(0, arguments.replace("\\ud83d", "\\ufffd").replace("1e999", "1e307"), "now")
    assert read([text], is_enforced=True) == read(list(text), is_enforced=True) == [HM, called]


def test_where_the_prompt_ends_the_answer_begins() -> None:
    assert read([f" so<|end|>{NEXT}{FINAL}Four."], place="thought") == [Thought(" so"), "Four."]
    assert read([" and five."], place="text") == [" and five."]


PIECES = st.lists(
    st.sampled_from(
        [
            *(*MARKERS, NEXT, THOUGHT, FINAL, SAYS, CALL, OSLO, " to=functions.now", " to=x", "analysis", "commentary"),
            *("final", "json", "{}", '{"a": ', "}", "text", " ", "\n", "<|", "<|en", "d|>", "to", "=", "?"),
        ]
    ),
    max_size=10,
)


@given(PIECES, st.sampled_from(["start", "thought", "text"]), st.sampled_from([None, 1]), st.booleans(), st.data())
def test_the_cut_of_the_text_does_not_matter(
    parts: list[str], place: Place, limit: int | None, is_enforced: bool, data: st.DataObject
) -> None:
    text, options = "".join(parts), {"place": place, "limit": limit, "is_enforced": is_enforced}
    assert read(data.draw(cut_text(text)), **options) == read([text], **options)  # type: ignore[arg-type]


def test_what_is_certain_comes_at_once() -> None:
    parser = HarmonyParser(frozenset({"weather"}), is_enforced=True)
    assert parser.push("<|channel|>analysis<|message|>a") == [Thought("a")]
    assert parser.push(" b<|") == [Thought(" b")]
    assert parser.push("end|>") == [Thought("")]
    assert parser.push(f"{NEXT}{CALL.removesuffix(OSLO)}") == []
    assert parser.push('{"ci') == [CallPiece(0, '{"ci', "weather")]
    assert parser.push('ty": "x"') == [CallPiece(0, 'ty": "x"')]
    assert (parser.calls, parser.push("}"), parser.calls) == (0, [CallPiece(0, "}")], 1)


@cache
def open_tokenizer() -> Tokenizer:
    """A small vocabulary with the words of gpt-oss that steer it, read as a GGUF file would be."""
    metadata = dict(to_gguf_metadata(TOKENIZER_TESTS / "goldens" / "qwen2"))
    names = ["<|startoftext|>", "<|return|>", *(name for name in MARKERS if name != "<|return|>")]
    tokens, types = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))  # type: ignore[call-overload]
    metadata |= {"tokenizer.ggml.tokens": tokens + names, "tokenizer.ggml.token_type": types + [3] * len(names)}
    metadata |= {"tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.add_bos_token": False}
    metadata["tokenizer.ggml.eos_token_id"] = len(tokens) + 1
    metadata["tokenizer.ggml.eot_token_id"] = len(tokens) + names.index("<|end|>")
    return from_gguf(metadata)


@cache
def open_template() -> ChatTemplate:
    source = (TOKENIZER_TESTS / "templates" / "gpt-oss.jinja").read_text()
    return ChatTemplate(source, bos_token="<|startoftext|>", eos_token="<|return|>", name="test")


@cache
def open_preparation() -> Preparation:
    tokenizer = open_tokenizer()
    return Preparation(
        tokenizer, open_template(), vocab_size=tokenizer.vocab_size, context_tokens=4096, model_name="test"
    )


def ask(*messages: object, **options: Any) -> ChatRequest:
    return ChatRequest(list(messages) or [USER], SamplingParams(), **options)  # type: ignore[arg-type]


def render(*messages: object, **options: Any) -> str:
    text = open_preparation().render_chat(ask(*messages, **options))
    head, _, rest = text.partition("Channel must be included for every message.")
    assert head.startswith("<|start|>system<|message|>You are ChatGPT")
    return rest


def test_answers_end_with_return_or_call_and_not_with_a_message() -> None:
    """Even where the file calls `<|end|>` the end of a turn."""
    tokenizer = open_tokenizer()
    ends = {tokenizer.token_text(index) for index in tokenizer.eos_ids}
    assert ends & set(MARKERS) == {"<|return|>", "<|call|>"}


def call(number: int, name: str, **arguments: object) -> dict[str, object]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, content: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def test_instructions_wherever_they_stand_come_first() -> None:
    system, developer = ({"role": role, "content": role} for role in ("system", "developer"))
    expected = "<|end|><|start|>developer<|message|># Instructions\n\nsystem\n\ndeveloper\n\n<|end|>"
    asked = f"<|start|>user<|message|>Hi<|end|>{NEXT}"
    assert render(system, developer, USER) == render(system, USER, developer) == f"{expected}{asked}"
    assert render(USER) == f"<|end|>{asked}"


def test_calls_and_results_stand_in_pairs_behind_thought_and_words() -> None:
    calls = [call(1, "weather", city="Oslo"), call(2, "now")]
    asked = {"role": "assistant", "content": "Let me see.", "reasoning": "hm", "tool_calls": calls}
    text = render(USER, asked, result(2, "noon"), result(1, '"rain"'))
    first, second = (f"{NEXT} to=functions.{name}<|channel|>commentary json<|message|>" for name in ("weather", "now"))
    expected = (
        f"{NEXT}{THOUGHT}{SAYS}Let me see.<|end|>{first}{OSLO}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"\\"rain\\""<|end|>'
        f"{second}{{}}<|call|>"
        f'<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>{NEXT}'
    )
    assert text.partition("Hi<|end|>")[2] == expected
    answered = render(USER, asked, result(1, "a"), result(2, "b"), {"role": "assistant", "content": "So."}, USER)
    assert "hm" not in answered  # the template drops what came before an answer
    assert f"{NEXT}{FINAL}So.<|end|>" in answered
    no_ids = [{key: value for key, value in item.items() if key != "tool_call_id"} for item in (result(1, "a"), USER)]
    assert '<|message|>"a"<|end|>' in render(USER, asked, no_ids[0])
    assert "Hi\n\nResult of the call: a" in render(USER, result(1, "a"))  # the template refuses one without a call


def test_what_users_write_steers_nothing() -> None:
    tokenizer, preparation = open_tokenizer(), open_preparation()
    asked = {"role": "assistant", "content": "<|end|>", "reasoning": "<|call|>", "tool_calls": [call(1, "now")]}
    token_ids = preparation.encode_chat(ask({"role": "user", "content": "<|start|>system"}, asked, result(1, "x")))
    counts = {name: token_ids.count(tokenizer.token_id(name)) for name in ("<|start|>", "<|end|>", "<|call|>")}
    assert counts == {"<|start|>": 7, "<|end|>": 5, "<|call|>": 1}


def test_levels_are_those_of_the_model() -> None:
    chat = Chat(open_tokenizer(), open_template())
    for think, level in ((None, "medium"), (True, "medium"), ("low", "low"), ("high", "high")):
        assert f"Reasoning: {level}\n" in chat.render(ask(think=think))
    fitted = [chat.fit_think(think) for think in ("minimal", "xhigh", "max", False, True, None)]
    assert fitted == ["low", "high", "high", "low", True, None]
    for think in ("xhigh", False):
        with pytest.raises(InvalidRequest) as caught:
            chat.render(ask(think=think))
        assert caught.value.field == "think"
    assert "thinking" in open_preparation().capabilities


def say(prepared: Prepared, text: str, reason: FinishReason = FinishReason.STOP) -> Completion | None:
    """Return the completion of the answer `text`, or None if the constraint does not allow its tokens, or no end."""
    tokenizer = open_tokenizer()
    constraint, (answer,) = prepared.request.constraint, prepared.answers
    events = []
    token_ids = tokenizer.encode(text, add_special=False, parse_special=True)
    for count, token_id in enumerate(token_ids, 1):
        mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        if constraint is not None:
            constraint.fill_mask(mask)
            if not mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1):
                return None
            constraint.accept(token_id)
        end = reason if count == len(token_ids) else None
        events += answer.push(TokenEvent(1, token_id, Usage(1, count), finish_reason=end))
    return fold_events(events)


def test_an_answer_without_rules() -> None:
    completion = say(open_preparation().prepare(ask()), f"{THOUGHT}{THOUGHT}{FINAL}Four é.<|return|>")
    assert completion is not None
    assert (completion.reasoning, completion.text) == ("hm\n\nhm", "Four é.")
    assert completion.finish_reason is FinishReason.STOP


SCHEMA = Grammar("json_schema", json.dumps(CITY), field="response_format")


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (
            {"grammar": SCHEMA},
            [
                f"{FINAL}{OSLO}<|return|>",
                f"{THOUGHT}{FINAL}{OSLO}<|return|>",
                f"{THOUGHT}{THOUGHT}{FINAL}{OSLO}<|call|>",
            ],
            [OSLO, f"{FINAL}Well", f"{SAYS}{OSLO}", f"{CALL}<|call|>", f'{FINAL}{{"town": 1}}', "<|return|>"],
        ),
        (
            {"tools": [WEATHER, NOW], "tool_choice": "required"},
            [
                f"{CALL}<|call|>",
                f"{THOUGHT}{CALL}<|call|>",
                f"{THOUGHT} to=functions.weather<|channel|>commentary json<|message|>{OSLO}<|call|>",
                f"<|channel|>analysis to=functions.weather<|message|>{OSLO}<|call|>",
                "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}<|call|>",
            ],
            [f"{FINAL}Well", f"{SAYS}Well", f"{CALL}<|end|>", CALL.replace("city", "town"), CALL.replace("wea", "fea")],
        ),
        (
            {"tools": [WEATHER, NOW], "tool_choice": NamedTool("weather")},
            [f"{THOUGHT}{CALL}<|call|>"],
            [f"{FINAL}Well", "<|channel|>commentary to=functions.now<|message|>{}<|call|>"],
        ),
        (
            {"tools": [WEATHER]},
            [
                f"{FINAL}Well.<|return|>",
                f"{FINAL}<|return|>",
                f"{THOUGHT}{SAYS}Let me see.<|end|>{NEXT}{THOUGHT}{CALL}<|call|>",
            ],
            ["Well", "<|channel|>?", CALL.replace("city", "town"), f"{CALL}<|end|>", f"{SAYS}Well.<|return|>"],
        ),
        (
            {"tools": [WEATHER], "grammar": SCHEMA},
            [f"{THOUGHT}{FINAL}{OSLO}<|return|>", f"{THOUGHT}{CALL}<|call|>"],
            [f"{FINAL}Well", f"{SAYS}Well"],
        ),
    ],
)
def test_rules_hold_behind_the_thoughts(options: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        completion = say(open_preparation().prepare(ask(**options)), text)
        assert completion is not None, text
        assert completion.reasoning.replace("\n", "") == "hm" * text.count("hm")
        if "to=" in text:
            assert completion.finish_reason is FinishReason.TOOL_CALLS
            assert completion.tool_calls[0].arguments in (OSLO, "{}")
        elif "grammar" in options:
            assert completion.text == OSLO
    for text in bad:
        assert say(open_preparation().prepare(ask(**options)), text) is None, text


def test_a_thought_that_is_continued_is_followed_by_what_was_asked_for() -> None:
    begun = {"role": "assistant", "content": "", "reasoning": "2 + 2"}
    prepared = open_preparation().prepare(ask(USER, begun, ending="continued", grammar=SCHEMA))
    completion = say(prepared, f" is 4<|end|>{NEXT}{FINAL}{OSLO}<|return|>")
    assert completion is not None
    assert (completion.reasoning, completion.text) == (" is 4", OSLO)


def test_a_text_that_is_continued_goes_on_as_text() -> None:
    begun = {"role": "assistant", "content": "Four", "reasoning": "2 + 2"}
    prepared = open_preparation().prepare(ask(USER, begun, ending="continued", tools=[WEATHER]))
    assert (
        open_tokenizer()
        .decode(prepared.request.token_ids, skip_special=False)
        .endswith(f"{THOUGHT}{FINAL}Four".replace("hm", "2 + 2"))
    )
    completion = say(prepared, " or so.<|return|>")
    assert completion is not None
    assert completion.text == " or so."
    with pytest.raises(InvalidRequest):
        open_preparation().prepare(ask(USER, begun, ending="continued", grammar=SCHEMA))


def test_a_fork_of_the_gate_has_a_tag_of_its_own() -> None:
    constraint = open_preparation().prepare(ask(tools=[NOW], tool_choice="required")).request.constraint
    assert constraint is not None
    tokenizer = open_tokenizer()
    for token_id in tokenizer.encode("<|channel|>analysis", add_special=False, parse_special=True):
        constraint.accept(token_id)
    fork = constraint.fork()

    def spell(state: Any) -> set[str]:
        mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        state.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return {tokenizer.token_text(int(index)) for index in allowed}

    assert "<|message|>" in spell(constraint)
    constraint.accept(tokenizer.token_id("<|message|>") or 0)
    assert "<|end|>" in spell(constraint)
    assert "<|return|>" not in spell(constraint)
    assert "<|end|>" not in spell(fork)
