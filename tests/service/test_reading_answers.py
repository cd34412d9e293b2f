"""One answer from tokens to events: thoughts, text and calls, stop strings in them, and the place of every token."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from cuts import cut_text, merge
from fake_engine import EOS, STOP_MARK, PieceTokenizer, script_text
from hypothesis import given
from hypothesis import strategies as st

from mlxr.core.types import Event, Finish, FinishReason, ReasoningDelta, SamplingParams, TextDelta, ToolCallDelta, Usage
from mlxr.engine.sequence import TokenEvent
from mlxr.service.answer import WRAPPERS, Answer, AnswerFormat, OutputParser
from mlxr.service.reasoning import ReasoningSplitter, Tags
from mlxr.service.requests import Tool
from mlxr.service.streams import Completion, ToolCall, fold_events
from mlxr.service.tools.marked_json import HermesFormat
from mlxr.tokenizers import Detokenizer

TAGS = Tags("<think>", "</think>")
CALL = '<tool_call>{"name": "now", "arguments": {"a": "b"}}</tool_call>'


def make_answer(
    tokenizer: PieceTokenizer,
    params: SamplingParams,
    *,
    max_calls: int | None = None,
    shown: dict[int, str] | None = None,
) -> Answer:
    def open_parser() -> OutputParser:
        calls = HermesFormat().open_parser([Tool("now")], is_enforced=False)
        calls.max_calls = max_calls
        return OutputParser(ReasoningSplitter(TAGS, is_open=False), calls)

    answer_format = AnswerFormat(open_parser, shown or {}, lambda: "call_x")
    return Answer(Detokenizer(tokenizer), params, 3, {}, 2, answer_format)  # type: ignore[arg-type]


def feed(
    pieces: Sequence[str | int],
    params: SamplingParams | None = None,
    *,
    max_calls: int | None = None,
    shown: dict[int, str] | None = None,
    reason: FinishReason = FinishReason.STOP,
) -> tuple[Completion, list[Event]]:
    """Return the events of an answer in these pieces; the engine hears one step late that the answer is over."""
    tokenizer = PieceTokenizer()
    answer = make_answer(tokenizer, params or SamplingParams(logprobs=0), max_calls=max_calls, shown=shown)
    ids = script_text(tokenizer, [piece if isinstance(piece, int) else piece.encode() for piece in pieces])
    events: list[Event] = []
    late = 0
    for count, token_id in enumerate(ids, 1):
        late += answer.is_over
        end = reason if count == len(ids) else FinishReason.CANCELLED if late == 2 else None
        event = TokenEvent(
            1, None if late == 2 else token_id, Usage(3, count), logprob=-1.0, finish_reason=end, index=2
        )
        events += answer.push(event)
        if answer.finished:
            break
    assert answer.finished
    return fold_events(events), events


@given(
    st.lists(st.sampled_from([*WRAPPERS, "<|START", "_RESPONSE|>", "<|", "text", " ", CALL, "<tool"]), max_size=8),
    st.booleans(),
    st.data(),
)
def test_what_stands_around_an_answer_is_no_text(parts: list[str], has_tools: bool, data: st.DataObject) -> None:
    def read(pieces: Sequence[str]) -> list[object]:
        calls = HermesFormat().open_parser([Tool("now")], is_enforced=False) if has_tools else None
        parser = OutputParser(ReasoningSplitter(TAGS, is_open=False), calls, WRAPPERS)
        return merge([*(part for piece in pieces for part in parser.push(piece)), *parser.flush()])

    text = "".join(parts)
    assert read(data.draw(cut_text(text))) == read([text])
    if not has_tools:
        plain = "".join(re.split("|".join(map(re.escape, WRAPPERS)), text))
        assert "".join(map(str, read([text]))) == plain


def test_an_answer_with_everything() -> None:
    completion, events = feed(
        ["<think>", "a ", "b", "</think>", "\n\n", "Let me", " see", ".\n", CALL, "\n", CALL, EOS]
    )
    assert (completion.reasoning, completion.text) == ("a b", "Let me see.")
    assert completion.tool_calls == (ToolCall("call_x", "now", '{"a": "b"}'),) * 2
    assert completion.finish_reason is FinishReason.TOOL_CALLS
    assert len(completion.token_ids) == len(completion.tokens) == completion.usage.completion_tokens == 12
    assert all(event.index == 2 for event in events)
    kinds = [type(event) for event in events if not isinstance(event, Finish)]
    assert kinds == sorted(kinds, key=[ReasoningDelta, TextDelta, ToolCallDelta].index)


def test_tokens_count_with_what_they_say() -> None:
    _, events = feed(["<think>", "a", "</think>", "b", EOS])
    sizes = [(type(event).__name__, len(event.token_ids)) for event in events if not isinstance(event, Finish)]
    assert sizes == [("ReasoningDelta", 2), ("ReasoningDelta", 1), ("TextDelta", 1), ("TextDelta", 1)]


def test_stop_strings_hold_for_the_text_alone() -> None:
    params = SamplingParams(stop=("b",), logprobs=0)
    completion, _ = feed(["<think>", "a b", "</think>", CALL, "a", "b", "c", "d", EOS], params)
    assert (completion.reasoning, completion.text, completion.stop) == ("a b", "a", "b")
    assert completion.tool_calls[0].arguments == '{"a": "b"}'
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage.completion_tokens == 6


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    completion, _ = feed(["x1", CALL, "2y", EOS], SamplingParams(stop=("12",)))
    assert (completion.text, completion.stop) == ("x12y", None)


@given(st.data())
def test_stop_strings_and_the_cut(data: st.DataObject) -> None:
    text = f"<think>hm</think>one two {CALL} three four"
    places = sorted(data.draw(st.lists(st.integers(1, len(text) - 1), unique=True, max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    params = SamplingParams(stop=(data.draw(st.sampled_from(["two", "ee f", "hm", "now", "e t", "zzz"])),))
    whole, cut = feed([text, EOS], params)[0], feed([*pieces, EOS], params)[0]
    assert (whole.text, whole.reasoning, whole.stop) == (cut.text, cut.reasoning, cut.stop)
    assert whole.finish_reason is cut.finish_reason
    if whole.stop is None:
        assert whole.tool_calls == cut.tool_calls


def test_the_first_call_ends_the_answer_where_one_is_allowed() -> None:
    completion, _ = feed(["a", CALL, "b", "c", "d", EOS], max_calls=1)
    assert (completion.text, len(completion.tool_calls)) == ("a", 1)
    assert completion.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_an_answer_that_is_cut_short_says_so(reason: FinishReason) -> None:
    completion, _ = feed([CALL, "x"], reason=reason)
    assert completion.finish_reason is reason
    assert len(completion.tool_calls) == 1
    begun, _ = feed(["a <tool_call>", '{"name": "now", '], reason=reason)
    assert begun.text == 'a <tool_call>{"name": "now", '
    assert begun.tool_calls == ()


def test_markers_that_are_control_tokens_are_seen() -> None:
    shown = {STOP_MARK: "<tool_call>"}
    completion, _ = feed(["a é ", STOP_MARK, '{"name": "now", "arguments": {}}', "</tool_call>", EOS], shown=shown)
    assert completion.text == "a é"
    assert completion.tool_calls[0].name == "now"
    hidden, _ = feed(["a", STOP_MARK, "b", EOS])
    assert hidden.text == "ab"


def test_aborting_gives_out_what_was_held_back() -> None:
    tokenizer = PieceTokenizer()
    answer = make_answer(tokenizer, SamplingParams(stop=("zz",)))
    [token_id] = script_text(tokenizer, [b"abc <tool"])
    events = answer.push(TokenEvent(1, token_id, Usage(3, 1), index=2))
    events += answer.abort(FinishReason.ERROR, "broken")
    completion = fold_events(events)
    assert (completion.text, completion.finish_reason, completion.error) == ("abc <tool", FinishReason.ERROR, "broken")
