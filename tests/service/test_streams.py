"""Streams over a scripted engine: events, stop strings, cancelling, failures, several answers at once."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from threading import Event as Signal
from threading import Thread

import pytest
from fake_engine import (
    BOS,
    EOS,
    FIRST_PIECE,
    STOP_MARK,
    USER,
    FakeEngine,
    FakeSession,
    PieceTokenizer,
    UserTemplate,
    make_session,
    script_text,
)
from hypothesis import given
from hypothesis import strategies as st
from service_models import open_demo

from mlxr.core.errors import InvalidRequest, QueueFull, TemplateError
from mlxr.core.types import Event, Finish, FinishReason, SamplingParams, TextDelta, Usage
from mlxr.service.requests import find_message_ends
from mlxr.service.streams import Completion, fold_events

UNLIMITED = SamplingParams(max_tokens=None)
ENDLESS = [FIRST_PIECE + 97] * 10**5


def answer(pieces: list[bytes | int], params: SamplingParams = UNLIMITED) -> tuple[Completion, list[Event], FakeEngine]:
    """Stream an answer that the engine gives in these pieces; return it whole, its events, and the engine."""
    tokenizer = PieceTokenizer()
    tokens = script_text(tokenizer, pieces)
    engine = FakeEngine(lambda prompt: tokens)
    session = make_session(engine, tokenizer)
    events = list(session.stream(session.encode_prompt("hi"), params))
    return fold_events(events), events, engine


def test_text_streams_and_ends_at_the_end_token() -> None:
    completion, events, _ = answer([b"Hel", b"lo", EOS])
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["Hel", "lo", ""]
    assert isinstance(events[-1], Finish)
    assert completion.text == "Hello"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop is None
    assert completion.usage == Usage(3, 3, cached_tokens=1)
    assert len(completion.token_ids) == 3
    assert completion.token_ids[-1] == EOS


def test_length_ends_an_answer() -> None:
    completion, _, _ = answer([b"a", b"b", b"c"], SamplingParams(max_tokens=2))
    assert (completion.text, completion.finish_reason) == ("ab", FinishReason.LENGTH)


def test_half_a_character_waits_and_a_broken_one_is_marked() -> None:
    _, events, _ = answer(["é".encode()[:1], "é".encode()[1:], b"\xf0\x9f", EOS])
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["é", "\ufffd"]


def test_a_stop_string_over_three_tokens_cancels_the_sequence() -> None:
    completion, events, engine = answer([b"one E", b"N", b"D two", b" three", EOS], SamplingParams(stop=("END",)))
    assert (completion.text, completion.finish_reason, completion.stop) == ("one ", FinishReason.STOP, "END")
    assert engine.cancelled == [1]
    assert completion.usage.completion_tokens == len(completion.token_ids) == 3
    assert isinstance(events[0], TextDelta)
    assert events[0].text == "one "


def test_text_held_back_comes_when_it_was_no_stop_string() -> None:
    completion, events, _ = answer([b"EN", b"TER", b" E", EOS], SamplingParams(stop=("END",)))
    assert completion.text == "ENTER E"
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["ENTER", " ", "E"]


def test_a_stop_string_in_the_flushed_rest_counts() -> None:
    completion, _, _ = answer([b"a\xf0", EOS], SamplingParams(stop=("\ufffd",)))
    assert (completion.text, completion.stop) == ("a", "\ufffd")


def test_a_stop_string_that_is_a_special_token_stops_the_engine() -> None:
    completion, _, engine = answer([b"a", STOP_MARK, b"b", EOS], SamplingParams(stop=("<|stop|>",)))
    assert engine.submitted[0].params.stop_token_ids == {STOP_MARK}
    assert (completion.text, completion.finish_reason, completion.stop) == ("a", FinishReason.STOP, "<|stop|>")


def test_a_stop_token_of_plain_text_is_not_shown() -> None:
    tokenizer = PieceTokenizer()
    token_id = tokenizer.token_of(b"!")
    completion, _, _ = answer([b"a", token_id, b"b"], SamplingParams(stop_token_ids=frozenset({token_id})))
    assert (completion.text, completion.token_ids) == ("a", (tokenizer.token_of(b"a"), token_id))


def test_end_tokens_are_hidden_when_ignored() -> None:
    completion, _, _ = answer([b"a", EOS, b"b"], SamplingParams(ignore_eos=True, max_tokens=None))
    assert (completion.text, completion.finish_reason) == ("ab", FinishReason.LENGTH)


def test_logprobs_belong_to_their_tokens() -> None:
    completion, _, _ = answer([b"E", b"N", b"x", EOS], SamplingParams(stop=("END",), logprobs=2))
    assert [info.chosen.token_id for info in completion.tokens] == list(completion.token_ids)
    assert [info.chosen.logprob for info in completion.tokens] == [-float(token) for token in completion.token_ids]
    assert all(len(info.top) == 2 for info in completion.tokens)
    assert answer([b"a", EOS])[0].tokens == ()


TEXTS = st.text("abé😀", max_size=20)


@given(TEXTS, st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=2), st.lists(st.integers(0, 80), max_size=9))
def test_any_split_into_tokens_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    pieces: list[bytes | int] = [data[a:b] for a, b in itertools.pairwise(places)]
    params = SamplingParams(stop=tuple(stops), max_tokens=None)
    split, events, _ = answer([*pieces, EOS], params)
    whole, _, _ = answer([data, EOS], params)
    assert (split.text, split.stop, split.finish_reason) == (whole.text, whole.stop, whole.finish_reason)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == split.text
    assert all(isinstance(event, TextDelta) for event in events[:-1])


def make_echo_session(on_step: Callable[[int], None] | None = None) -> tuple[FakeEngine, FakeSession]:
    """The engine answers with the prompt's own tokens, without BOS."""
    engine = FakeEngine(lambda prompt: [*prompt[1:], EOS], on_step)
    return engine, make_session(engine, template=UserTemplate())


def test_a_batch_runs_side_by_side_and_keeps_its_order() -> None:
    engine, session = make_echo_session()
    texts = ["longest of them", "b", "", "some"]
    prompts = [session.encode_prompt(text) for text in texts]
    completions = session.generate(prompts, SamplingParams(max_tokens=None))
    assert [completion.text for completion in completions] == texts
    assert engine.steps == len(texts[0]) + 1
    assert not engine.has_work


def test_when_one_prompt_is_refused_none_runs() -> None:
    engine, session = make_echo_session()
    with pytest.raises(InvalidRequest, match="too long"):
        session.generate([[BOS, 5], [5] * 2000], UNLIMITED)
    assert engine.steps == 0
    assert not engine.has_work


def test_two_streams_share_steps() -> None:
    engine, session = make_echo_session()
    first, second = session.open([session.encode_prompt(text) for text in ("abc", "xyz")], UNLIMITED)
    assert next(first) == TextDelta("a", (FIRST_PIECE + ord("a"),))
    assert "".join(event.text for event in second if isinstance(event, TextDelta)) == "xyz"
    assert fold_events(first).text == "bc"
    assert engine.steps == 4


def test_threads_share_one_engine() -> None:
    _, session = make_echo_session()
    texts = [f"text of thread {number} " * 3 for number in range(8)]
    answers: dict[int, str] = {}

    def run(number: int) -> None:
        stream = session.stream(session.encode_prompt(texts[number]), UNLIMITED)
        answers[number] = fold_events(stream).text

    threads = [Thread(target=run, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == dict(enumerate(texts))


class Gate:
    """An engine's `on_step` that holds a step back until it is opened, and tells that it does."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.entered, self.opened = Signal(), Signal()

    def __call__(self, number: int) -> None:
        if number == self._number:
            self.entered.set()
            assert self.opened.wait(60)


def test_cancelling_ends_with_a_finish() -> None:
    gate = Gate(2)
    engine, session = make_echo_session(gate)
    stream = session.stream(session.encode_prompt("abcd"), UNLIMITED)
    assert next(stream) == TextDelta("a", (FIRST_PIECE + ord("a"),))
    assert gate.entered.wait(60)
    stream.cancel()
    gate.opened.set()  # the step that is under way ends
    assert [type(event) for event in stream] == [TextDelta, Finish]
    assert engine.cancelled == [1]
    assert list(stream) == []


def test_cancelling_gives_out_the_text_held_back() -> None:
    gate = Gate(2)
    _, session = make_echo_session(gate)
    stream = session.stream(session.encode_prompt("abx"), SamplingParams(stop=("abc",), max_tokens=None))
    assert gate.entered.wait(60)
    stream.cancel()
    gate.opened.set()
    completion = fold_events(stream)
    assert (completion.text, completion.finish_reason) == ("ab", FinishReason.CANCELLED)
    assert completion.usage.completion_tokens == 2


@pytest.mark.slow
def test_closing_and_forgetting_a_stream_stop_it() -> None:
    engine = FakeEngine(lambda prompt: ENDLESS)
    session = make_session(engine)
    with session.stream(session.encode_prompt("abc"), UNLIMITED) as stream:
        next(stream)
    assert session.stats() == "stats"
    assert engine.cancelled == [1]
    lost = session.stream(session.encode_prompt("abc"), UNLIMITED)
    del lost
    gc.collect()
    assert session.stats() == "stats"
    assert engine.cancelled == [1, 2]


def test_a_failing_engine_ends_all_answers(caplog: pytest.LogCaptureFixture) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise ValueError("broken")

    engine, session = make_echo_session(fail)
    streams = session.open([session.encode_prompt(text) for text in ("abc", "xyz")], UNLIMITED)
    for stream, text in zip(streams, "ax", strict=True):
        completion = fold_events(stream)
        assert (completion.text, completion.finish_reason) == (text, FinishReason.ERROR)
        assert completion.error == "the engine failed: ValueError: broken"
    assert "broken" in caplog.text
    assert sorted(engine.cancelled) == [1, 2]
    assert fold_events(session.stream(session.encode_prompt("again"), UNLIMITED)).text == "again"


def test_chat_goes_through_the_template() -> None:
    _, session = make_echo_session()
    ids = session.encode_chat(
        [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    )
    assert ids == [BOS, USER, FIRST_PIECE + ord("a"), USER, FIRST_PIECE + ord("b")]
    assert session.can_chat


def test_bos_is_written_once() -> None:
    session = make_session(FakeEngine(lambda prompt: [EOS]), template=UserTemplate(writes_bos=True))
    assert session.encode_chat([{"role": "user", "content": "a"}]) == [BOS, USER, FIRST_PIECE + ord("a")]


def test_without_a_template_chat_says_so_and_completion_works() -> None:
    session = make_session(FakeEngine(lambda prompt: [EOS]))
    assert not session.can_chat
    with pytest.raises(TemplateError, match=r"fake has no chat template.*completion"):
        session.encode_chat([{"role": "user", "content": "a"}])
    assert session.generate([session.encode_prompt("a")], UNLIMITED)[0].text == ""


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ({"role": "user", "content": "a"}, "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "", "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b", "mood": "x"}], "messages[1].mood"),
    ],
)
def test_messages_are_checked(messages: object, field: str) -> None:
    _, session = make_echo_session()
    with pytest.raises(InvalidRequest) as caught:
        session.encode_chat(messages)
    assert caught.value.field == field


def test_prompts_are_text_or_ids() -> None:
    session = make_session(FakeEngine(lambda prompt: [EOS]))
    assert session.encode_prompt("<|user|>a") == [BOS, USER, FIRST_PIECE + ord("a")]
    assert session.encode_prompt([7, 8]) == [7, 8]
    assert session.encode_prompt("") == [BOS]
    for bad in ([4096], [-1], [True], [1.5], ["a"], []):
        with pytest.raises(InvalidRequest):
            session.encode_prompt(bad)
    without_bos = make_session(FakeEngine(lambda prompt: [EOS]), PieceTokenizer(add_bos=False))
    with pytest.raises(InvalidRequest, match="no BOS"):
        without_bos.encode_prompt("")


def test_several_answers_to_one_prompt_are_choices() -> None:
    completion, events, engine = answer([b"a", b"b", b"c", EOS], SamplingParams(n=3, max_tokens=None))
    assert [choice.text for choice in completion.choices] == ["abc", "bc", "c"]
    assert [choice.usage.completion_tokens for choice in completion.choices] == [4, 3, 2]
    assert completion.text == "abc"
    assert all(choice.others == () for choice in completion.choices)
    assert [event.index for event in events if isinstance(event, Finish)] == [2, 1, 0]
    assert {event.index for event in events if isinstance(event, TextDelta)} == {0, 1, 2}
    assert len(engine.submitted) == 1


def test_a_stop_string_ends_one_of_several_answers() -> None:
    params = SamplingParams(n=2, max_tokens=None, stop=("ab",))
    completion, _, engine = answer([b"a", b"b", b"c", EOS], params)
    assert [(choice.text, choice.stop) for choice in completion.choices] == [("", "ab"), ("bc", None)]
    assert engine.cancelled == [1]


def test_cancelling_ends_all_answers_to_a_prompt() -> None:
    engine = FakeEngine(lambda prompt: ENDLESS)
    session = make_session(engine)
    stream = session.stream([1], SamplingParams(n=3, max_tokens=None))
    assert isinstance(next(stream), TextDelta)
    stream.cancel()
    completion = fold_events(stream)
    assert [choice.finish_reason for choice in completion.choices] == [FinishReason.CANCELLED] * 3
    assert not engine.running


def test_events_without_every_finish_are_no_answer() -> None:
    _, events, _ = answer([b"a", b"b", EOS], SamplingParams(n=2, max_tokens=None))
    with pytest.raises(ValueError, match="without a Finish"):
        fold_events(events[:-1])


def test_prompts_wait_for_room_in_a_batch_and_are_refused_alone() -> None:
    tokenizer = PieceTokenizer()
    engine = FakeEngine(lambda prompt: [FIRST_PIECE + 97, EOS])
    engine.max_running = 2
    session = make_session(engine, tokenizer)
    completions = session.generate([[index] for index in range(7)], UNLIMITED)
    assert [completion.text for completion in completions] == ["a"] * 7
    engine.script = lambda prompt: ENDLESS
    streams = session.open([[1], [1]], UNLIMITED)
    with pytest.raises(QueueFull):
        session.stream([1], UNLIMITED)
    waiting = Thread(target=session.open, args=([[2], [3]], UNLIMITED), kwargs={"waits_for_room": True})
    waiting.start()
    waiting.join()  # they are accepted, and wait
    session.close()
    assert all(fold_events(stream).finish_reason is FinishReason.CANCELLED for stream in streams)
    assert not engine.running


def test_closing_a_session_ends_its_answers_and_the_engine() -> None:
    engine = FakeEngine(lambda prompt: ENDLESS)
    session = make_session(engine)
    stream = session.stream([1], UNLIMITED)
    next(stream)
    session.close()
    assert engine.closed
    assert not engine.running
    assert fold_events(stream).finish_reason is FinishReason.CANCELLED


def test_the_engine_hears_where_messages_end() -> None:
    engine = FakeEngine(lambda prompt: [EOS])
    session = make_session(engine, PieceTokenizer())
    for prompt, ends in (
        ([BOS, USER, 65, 66, EOS, USER, 67, EOS, USER, 68], (5, 8)),
        ([BOS, USER, 65, 66, USER, 67], (1, 4)),  # nothing ends, but something begins
        ([65, 66], ()),
    ):
        list(session.stream(prompt, UNLIMITED))
        assert engine.submitted[-1].boundary_tokens == ends


def test_messages_end_where_a_shorter_conversation_does() -> None:
    loaded = open_demo()
    template, tokenizer = loaded.chat_template, loaded.tokenizer
    assert template is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "Go on."},
    ]

    def encode(count: int) -> list[int]:
        text = template.render(messages[:count], add_generation_prompt=count == len(messages))
        return tokenizer.encode(text, add_special=False, parse_special=True)

    whole = encode(len(messages))
    ends = find_message_ends(tokenizer, whole)
    for count, end in zip((1, 2, 3, 4), ends, strict=True):
        assert whole[:end] == encode(count)[:end]
        assert len(encode(count)) - end <= (1 if count < 4 else 8)  # at most the line break after it
