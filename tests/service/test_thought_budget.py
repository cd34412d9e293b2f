"""Budgets of thoughts: a budget's limit, its closing of a thought, and no other effect."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from cuts import merge
from hypothesis import given
from hypothesis import strategies as st
from service_models import open_demo
from stepped_session import SteppedSession, SteppedStream
from test_harmony import open_tokenizer

from mlxr.core.settings import resolve
from mlxr.core.types import DraftOptions, SamplingParams
from mlxr.engine.request import FREE_TOKENS, MaskSource
from mlxr.service.opening import build_engine
from mlxr.service.reasoning import TAGS, ReasoningSplitter, Tags, Thought
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.streams import fold_events
from mlxr.service.thought_budget import (
    ThoughtBudget,
    ThoughtEnd,
    ThoughtTokens,
    collect_thought_tokens,
)
from mlxr.tokenizers import ChatTemplate

THINK = TAGS[1]
MESSAGE = "So be it."
SAID = f"\n\n{MESSAGE}\n"
ENDS = 0
PLAIN = ("</s>", "a", "b", " ", "\n", ".", "So", " be", " it", "<", "/", "th", "ink>", "é", "thought\n")
HALVES = (b"\xf0\x9f", b"\x98", b"\x80")  # an emoji in three tokens


class Signs:
    """A tokenizer of a few tokens and the tags of one model, each of which is one token unless `in_parts`."""

    def __init__(self, tags: Tags, *, in_parts: bool = False) -> None:
        own = () if in_parts else (tags.open, tags.close)
        letters = dict.fromkeys([*PLAIN, *tags.open, *tags.close, *tags.follow, "n", "g", "w"])
        self.tokens = [*(text.encode() for text in (*letters, *own)), *HALVES]
        self.vocab_size = len(self.tokens)
        self.eos_ids = frozenset({ENDS})

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def token_id(self, text: str) -> int | None:
        return self.tokens.index(text.encode()) if text.encode() in self.tokens else None

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        data, ids = text.encode(), list[int]()
        while data:
            found = max((one for one in self.tokens if data.startswith(one)), key=len, default=b"")
            if not found:
                data = data[1:]
                continue
            ids.append(self.tokens.index(found))
            data = data[len(found) :]
        return ids


@cache
def make_tokens(tags: Tags = THINK, message: str = MESSAGE, *, in_parts: bool = False) -> ThoughtTokens:
    signs = Signs(tags, in_parts=in_parts)
    return collect_thought_tokens(signs, tags, message, signs.vocab_size)  # type: ignore[arg-type]


def spell(tokens: ThoughtTokens, text: str) -> list[int]:
    return tokens.tokenizer.encode(text)


def grow(constraint: ThoughtBudget, wanted: Sequence[int], most: int | None = None) -> list[int]:
    """Return the answer of a model that wants these tokens; an allowed token takes the place of a forbidden one."""
    source, ids = MaskSource(constraint, constraint._tokens.tokenizer.vocab_size, most), list[int]()
    for token_id in wanted[:most]:
        source.fill()
        assert source.error is None
        if not source.free_tokens:
            bits = np.flatnonzero(np.unpackbits(source.mask.view(np.uint8), bitorder="little"))
            token_id = token_id if token_id in bits else int(bits[0])
        ids.append(token_id)
        source.accept(token_id)
    return ids


def read(tokens: ThoughtTokens, ids: Sequence[int], *, is_open: bool) -> tuple[str, str]:
    """Return the thought and the text of an answer, as clients get them."""
    text = b"".join(map(tokens.tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    splitter = ReasoningSplitter(tokens.tags, is_open=is_open)
    parts = merge(splitter.push(text) + splitter.flush())
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str))


def bound(tokens: ThoughtTokens, budget: int | None, *, is_open: bool, end: ThoughtEnd | None = None) -> ThoughtBudget:
    return ThoughtBudget(tokens, budget, end or ThoughtEnd(), is_thinking=is_open)


@pytest.mark.parametrize("in_parts", [False, True], ids=["one token", "several tokens"])
@pytest.mark.parametrize("tags", TAGS[1:], ids=lambda tags: tags.open)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_thought_is_closed_and_the_answer_goes_on(tags: Tags, is_open: bool, in_parts: bool) -> None:
    tokens = make_tokens(tags, in_parts=in_parts)
    begin = [] if is_open else spell(tokens, tags.open + tags.label)
    forced = spell(tokens, SAID + tags.close)
    thoughts = spell(tokens, "ababab" + "a" * (len(forced) - 1))
    ids = grow(bound(tokens, 5, is_open=is_open), [*begin, *thoughts, *spell(tokens, "b.")])
    assert ids[len(begin) : -2] == [*thoughts[:5], *forced]
    assert read(tokens, ids, is_open=is_open) == (f"ababa\n\n{MESSAGE}", "b.")


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_within_its_budget_is_never_masked(budget: int) -> None:
    tokens = make_tokens()
    source = MaskSource(bound(tokens, budget, is_open=True), tokens.tokenizer.vocab_size, 100)
    for token_id in spell(tokens, "a" * budget)[: max(0, budget - 1)]:
        source.fill()
        assert source.free_tokens > 0
        source.accept(token_id)
    source.fill()
    assert source.free_tokens == min(1, budget)
    source.accept(tokens.close_ids[0])
    source.fill()
    assert source.free_tokens >= FREE_TOKENS, "there is nothing more to bound"


def test_nothing_is_said_where_nothing_was_thought() -> None:
    tokens = make_tokens()
    assert grow(bound(tokens, 0, is_open=True), spell(tokens, "ab")) == [*tokens.close_ids, *spell(tokens, "b")]
    opened = [*spell(tokens, THINK.open), *spell(tokens, "ab")]
    ids = grow(bound(tokens, 0, is_open=False), opened)
    assert ids == [opened[0], *tokens.close_ids, opened[2]]


def test_an_answer_without_a_thought_is_free() -> None:
    tokens = make_tokens()
    wanted = spell(tokens, " \nb<think>aaaaa")
    assert grow(bound(tokens, 1, is_open=False), wanted) == wanted


DRAWS = st.lists(st.integers(1, make_tokens(in_parts=True).tokenizer.vocab_size - 1), max_size=60)


@given(DRAWS, st.integers(0, 12), st.booleans(), st.booleans(), st.sampled_from([None, *range(1, 60)]))
def test_whatever_a_model_wants_its_thought_is_bounded(
    wanted: list[int], budget: int, is_open: bool, in_parts: bool, most: int | None
) -> None:
    tokens = make_tokens(in_parts=in_parts)
    wanted = [token_id % tokens.tokenizer.vocab_size or 1 for token_id in wanted]
    ids = grow(bound(tokens, budget, is_open=is_open), wanted, most)
    ending = len(tokens.message_ids) + len(tokens.close_ids)
    # what of the answer stands before the closing tag, less the opening tag and space before it
    text = [tokens.tokenizer.token_bytes(token_id) for token_id in ids]
    whole, inside = b"", 0
    for part in text:
        before, whole = whole, whole + part
        opened = is_open or before.lstrip().startswith(b"<think>")
        inside += opened and b"</think>" not in before
    assert inside <= budget + 3 + ending
    if most is not None and most >= 16 and is_open and len(ids) == most:
        answered = whole.partition(b"</think>")[1]
        assert answered, "there is room for an answer"


@given(DRAWS, st.integers(0, 6), st.booleans(), st.integers(0, 40), st.integers(1, 15))
def test_drafts_are_cut_where_a_token_would_not_be_drawn(
    wanted: list[int], budget: int, is_open: bool, begun: int, draft: int
) -> None:
    tokens = make_tokens()
    wanted = [token_id % tokens.tokenizer.vocab_size or 1 for token_id in wanted]
    ids = grow(bound(tokens, budget, is_open=is_open), wanted, 50)
    constraint = bound(tokens, budget, is_open=is_open)
    assert grow(constraint, wanted[:begun], 50) == ids[:begun]
    for guess in (ids[begun : begun + draft], wanted[begun : begun + draft]):
        right = next(
            (place for place, pair in enumerate(zip(guess, ids[begun:], strict=False)) if pair[0] != pair[1]),
            len(guess),
        )
        assert constraint.count_allowed(guess) == right
    assert grow(constraint.fork(), [], 50) == []


def test_a_character_is_not_cut() -> None:
    tokens = make_tokens()
    emoji = [tokens.tokenizer.vocab_size - 3 + place for place in range(3)]
    ids = grow(bound(tokens, 2, is_open=True), [*spell(tokens, "a"), *emoji, *spell(tokens, "b" * 30)])
    assert read(tokens, ids, is_open=True)[0] == f"a😀\n\n{MESSAGE}"
    halves = grow(bound(tokens, 2, is_open=True), [*spell(tokens, "a"), *[emoji[0]] * 9])
    assert halves[:5] == [*spell(tokens, "a"), *[emoji[0]] * 4], "a character that never ends is waited for so long"


def test_a_tag_that_the_model_has_begun_is_finished() -> None:
    tokens = make_tokens(in_parts=True)
    begun = spell(tokens, "ab</th")
    ids = grow(bound(tokens, len(begun), is_open=True), [*begun, *spell(tokens, "b" * 12)])
    thought, text = read(tokens, ids, is_open=True)
    assert (thought, set(text)) == ("ab", {"b"})


def test_a_message_that_spells_the_tag_is_said_up_to_there() -> None:
    tokens = make_tokens(message="So</think> be it")
    assert tokens.message_ids == tuple(spell(tokens, "\n\nSo\n"))
    assert make_tokens(message="").message_ids == ()


def test_thoughts_leave_a_quarter_of_all_tokens() -> None:
    tokens = make_tokens()
    for most in (16, 40, 100):
        ids = grow(bound(tokens, 1000, is_open=True), spell(tokens, "a" * 200), most)
        assert len(ids) - ids.index(tokens.close_ids[0]) - 1 == most // 4
        assert (tokens.message_ids[0] in ids) == (len(tokens.message_ids) <= most // 4)
    assert grow(bound(tokens, 1000, is_open=True), spell(tokens, "a" * 20), 15) == spell(tokens, "a" * 15)
    assert grow(bound(tokens, None, is_open=True), spell(tokens, "a" * 200), 100) == spell(tokens, "a" * 100)


def test_a_thought_can_be_ended_from_outside() -> None:
    tokens = make_tokens()
    end = ThoughtEnd()
    one, other = (bound(tokens, None, is_open=True, end=end).fork() for _ in range(2))
    thought = spell(tokens, "abab")
    assert grow(one, thought) == thought
    end.end()
    closing = [*tokens.message_ids, *tokens.close_ids]
    assert grow(one, spell(tokens, "a" * len(closing))) == closing
    assert grow(other, spell(tokens, "b")) == [*tokens.close_ids], (
        "an answer that has not begun to think does not begin"
    )


class OnlyB:
    """A grammar of one letter."""

    needs_end = True

    def __init__(self, letter: int) -> None:
        self.letter, self.accepted = letter, list[int]()

    def count_free(self) -> int:
        return 0

    def look_ahead(self, tokens_left: int) -> int:
        return 0

    def close(self) -> Sequence[int]:
        return ()

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[self.letter // 32] |= np.uint32(1 << self.letter % 32)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def fork(self) -> OnlyB:
        return OnlyB(self.letter)


def test_what_holds_behind_a_thought_hears_of_every_token() -> None:
    tokens = make_tokens()
    (letter,) = spell(tokens, "b")
    inner = OnlyB(letter)
    constraint = ThoughtBudget(tokens, 2, ThoughtEnd(), inner, is_thinking=True)
    assert constraint.needs_end
    ids = grow(constraint, spell(tokens, "b" * 40))
    assert ids[2 : 2 + len(tokens.message_ids)] == list(tokens.message_ids)
    assert inner.accepted == ids


HARMONY = TAGS[0]


@cache
def make_channels() -> ThoughtTokens:
    tokenizer = open_tokenizer()
    return collect_thought_tokens(tokenizer, HARMONY, MESSAGE, tokenizer.vocab_size)


def channels(text: str) -> list[int]:
    return open_tokenizer().encode(text, add_special=False, parse_special=True)


def test_channels_close_with_the_message_and_think_no_more() -> None:
    tokens = make_channels()
    begin, thought = channels(HARMONY.open), channels("one two three four")
    constraint = bound(tokens, 3, is_open=False)
    ids = grow(constraint, [*begin, *thought[:3], *[thought[0]] * (len(tokens.message_ids) + len(tokens.close_ids))])
    text = open_tokenizer().decode(ids, skip_special=False)
    assert text.endswith(f"{SAID}<|end|><|start|>assistant")
    header, analysis, *_ = channels(HARMONY.open)
    final = channels("<|channel|>final<|message|>4")
    assert constraint.count_allowed([header, analysis]) == 1
    assert constraint.count_allowed(final) == len(final)
    again = grow(constraint, [header, analysis])
    assert again[0] == header
    assert again[1] != analysis


def test_channels_without_a_budget_to_spend_begin_no_thought() -> None:
    tokens = make_channels()
    header, analysis, *_ = channels(HARMONY.open)
    assert bound(tokens, 0, is_open=False).count_allowed([header, analysis]) == 1
    assert bound(tokens, 1, is_open=False).count_allowed([header, analysis]) == 2


def test_a_budget_counts_all_messages_of_a_thought() -> None:
    tokens = make_channels()
    first = channels(f"{HARMONY.open}one two<|end|><|start|>assistant")
    used = len(channels("one two"))
    constraint = bound(tokens, used + 1, is_open=False)
    assert grow(constraint, first) == first
    more = [*channels(HARMONY.open), *channels("three four")]
    assert grow(constraint, more)[:4] == more[:4]
    assert constraint.count_allowed(channels(" five")) == 0


THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}</think>"
).replace("</think>", "{# </think> #}")
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("What does os.path.join do?", {"thinking_budget": 6}),
    ("What does json.dumps do?", {"thinking_budget": 9, "temperature": 1.0, "seed": 3, "n": 2}),
    ("What does zlib.compress do?", {"thinking_budget": 1000, "max_tokens": 30, "temperature": 1.5, "seed": 5}),
]


def open_session(**options: object) -> SteppedSession:
    loaded = open_demo()
    template = ChatTemplate(THINKING_TEMPLATE, bos_token="<s>", eos_token="</s>", name="test")
    settings = resolve({"threads": 1, "context_tokens": 128, **options}, {})
    return SteppedSession(replace(loaded, chat_template=template), build_engine(loaded, settings))


def start(
    session: SteppedSession, question: str, options: dict[str, Any], prediction: str = "", priority: int = 0
) -> SteppedStream:
    params, talk = SamplingParams(**{"max_tokens": 48, **options}), [{"role": "user", "content": question}]
    return session.start(ChatRequest(talk, params, priority=priority, drafts=DraftOptions(prediction=prediction)))


@pytest.mark.slow
def test_answers_are_the_same_alone_together_drafted_and_preempted() -> None:
    with closing(open_session(draft="off", arena_bytes="64M")) as session:
        alone = [fold_events(start(session, *asked)) for asked in ASKED]
    assert alone[0].text
    texts = [open_demo().tokenizer.decode(one.token_ids) for one in alone]
    crowded = {"draft": "ngram", "arena_bytes": "500K", "max_batch_tokens": 16, "prefill_chunk_tokens": 16}
    with closing(open_session(**crowded)) as session:
        guessed = [(*asked, text) for asked, text in zip(ASKED, texts, strict=True)]
        first = start(session, *guessed[0])
        begun = [next(first), next(first)]
        urgent = [start(session, *asked, priority=1) for asked in guessed[1:]]
        together = [fold_events([*begun, *first]), *map(fold_events, urgent)]
        stats = session.engine.stats()
    for one, other in zip(alone, together, strict=True):
        assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in other.choices]
    assert stats.preemptions > 0, "the arena is too large for this test"
    assert stats.accepted_tokens > 0, "nothing was guessed"


def test_a_prompt_of_tokens_has_a_budget_too() -> None:
    with closing(open_session(arena_bytes="64M")) as session:
        params = SamplingParams(max_tokens=48, thinking_budget=4)
        prompt = session.preparation.encode_chat(ChatRequest([{"role": "user", "content": "What is a list?"}], params))
        completion = fold_events(session.start(TextRequest(prompt, params)))
        chat = fold_events(start(session, "What is a list?", {"thinking_budget": 4}))
        stream = start(session, "What is a list?", {"max_tokens": 20})
        assert stream.thought_end is not None
        stream.thought_end.end()
        ended = fold_events(stream)
    assert completion.token_ids == chat.token_ids
    assert chat.usage.reasoning_tokens > 4
    assert ended.reasoning == ""
