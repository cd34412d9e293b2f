"""The fold of events: sections, counts and times, of one answer and of several."""

from __future__ import annotations

from mlxr.core.types import (
    Event,
    Finish,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenInfo,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from mlxr.service.streams import AnswerFold, Change, ReplyFold, ToolCall, fold_events

A, B = TokenInfo(TokenLogprob(1, -0.5)), TokenInfo(TokenLogprob(2, -0.25))
END = Finish(FinishReason.TOOL_CALLS, Usage(10, 5, 4, 1), timings=Timings(0.5, 1.0, 2.0, 3, 2))
EVENTS: list[Event] = [
    PromptProgress(10, 4, 10),
    ReasoningDelta("Hm.", (7,), (A,)),
    TextDelta("I ", (1,), (A,)),
    TextDelta("look.", (2,), (B,)),
    ToolCallDelta(0, "", "call_a", "find"),
    ToolCallDelta(0, '{"x": 1}', token_ids=(3,)),
    ToolCallDelta(1, "{}", "call_b", "stop", token_ids=(4,)),
    END,
]


def describe(change: Change) -> tuple[int | None, int | None, bool, str]:
    closed, grown = change.closed, change.grown
    return (closed and closed.place, grown and grown.place, change.opens, change.text)


def test_events_open_grow_and_close_blocks() -> None:
    fold = AnswerFold(10)
    assert [describe(fold.add(event)) for event in EVENTS] == [
        (None, None, False, ""),
        (None, 0, True, "Hm."),
        (0, 1, True, "I "),
        (None, 1, False, "look."),
        (1, 2, True, ""),
        (None, 2, False, '{"x": 1}'),
        (2, 3, True, "{}"),
        (3, None, False, ""),
    ]
    kinds = [(section.kind, section.call, section.id, section.name, section.text) for section in fold.sections]
    assert kinds == [
        ("thought", None, "", "", "Hm."),
        ("text", None, "", "", "I look."),
        ("call", 0, "call_a", "find", '{"x": 1}'),
        ("call", 1, "call_b", "stop", "{}"),
    ]


def test_what_an_answer_adds_up_to() -> None:
    fold = AnswerFold(10)
    for event in EVENTS:
        fold.add(event)
    assert (fold.text, fold.thought, fold.token_ids) == ("I look.", "Hm.", [7, 1, 2, 3, 4])
    assert (fold.tokens, fold.text_tokens, fold.thought_tokens) == ([A, A, B], [A, B], 1)
    whole = fold_events(EVENTS)
    assert whole == fold.complete()
    assert whole.tool_calls == (ToolCall("call_a", "find", '{"x": 1}'), ToolCall("call_b", "stop", "{}"))
    assert (whole.usage, whole.finish_reason) == (END.usage, FinishReason.TOOL_CALLS)


def test_an_answer_that_grows_counts_itself() -> None:
    fold = AnswerFold(10)
    assert fold.usage == Usage(10, 0)
    for event in EVENTS[:-1]:
        fold.add(event)
    assert fold.usage == Usage(10, 5, 4, 1)
    clock = fold.read_clock()
    assert (clock.queue_s, clock.drafted_tokens) == (0.0, 0)
    assert clock.prompt_s >= 0
    assert clock.generate_s >= 0


def test_answers_to_several_prompts() -> None:
    """A prompt counts once; its cached tokens are those of the answer that found the most."""
    fold = ReplyFold([10, 20], 2)
    assert fold.timings is None
    for index, cached in enumerate((4, 8, 0, 16)):
        fold.add(TextDelta("a", (1,), index=index))
        timings = Timings(index, 1.0, 3.0 - index, 2, 1, 5, 1)
        fold.add(Finish(FinishReason.STOP, Usage(10, 1, cached), index=index, timings=timings))
        assert (fold.ended_tokens, fold.generated_tokens) == (index + 1, index + 1)
    assert (fold.prompt_tokens, fold.cached_tokens) == (30, 8 + 16)
    assert fold.timings == Timings(3.0, 1.0, 3.0, 8, 4, 20, 4)
