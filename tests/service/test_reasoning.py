"""Reasoning in a stream of text, and the constraint that waits for its end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import pytest
from cuts import cut_text, merge
from hypothesis import given
from hypothesis import strategies as st

from mlxr.service.reasoning import ReasoningGate, ReasoningSplitter, Tags, Thought, collect_gate_tokens, find_tags

TAGS = Tags("<think>", "</think>")
PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</th", "ink>", "<", " ", "\n", "a", "bc", "é", "</"]), max_size=12
)


def split(pieces: list[str], *, is_open: bool, tags: Tags = TAGS) -> list[Thought | str]:
    splitter = ReasoningSplitter(tags, is_open=is_open)
    found = [part for piece in pieces for part in splitter.push(piece)]
    return merge(found + splitter.flush())


@given(PARTS, st.booleans(), st.data())
def test_the_cut_of_the_text_does_not_matter(parts: list[str], is_open: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    assert split(data.draw(cut_text(text)), is_open=is_open) == split([text], is_open=is_open)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nhm, 2 + 2\n</think>\n\nFour.", False, "hm, 2 + 2", "Four."),
        ("hm</think>Four. </think> stays", True, "hm", "Four. </think> stays"),
        ("<think>hm</think>Four.", True, "hm", "Four."),
        ("<think> <think>hm</think>Four.", False, "<think>hm", "Four."),
        ("<think></think>\n\nFour.", False, "", "Four."),
        ("\n <think>hm", False, "hm", ""),
        ("\n\nFour <think>no</think>", False, "", "\n\nFour <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("never closed </thin", True, "never closed </thin", ""),
        ("  ", False, "", "  "),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_text(text: str, is_open: bool, thought: str, answer: str) -> None:
    found = split(list(text), is_open=is_open)
    assert "".join(part.text for part in found if isinstance(part, Thought)) == thought
    assert "".join(part for part in found if isinstance(part, str)) == answer


GEMMA = Tags("<|channel>", "<channel|>", "thought\n")
GEMMA_PARTS = st.lists(
    st.sampled_from(["<|channel>", "<channel|>", "thought\n", "thou", "<|cha", "\n", "a"]), max_size=9
)


@given(GEMMA_PARTS, st.booleans(), st.data())
def test_the_cut_of_a_labelled_thought_does_not_matter(parts: list[str], is_open: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    whole = split([text], is_open=is_open, tags=GEMMA)
    assert split(data.draw(cut_text(text)), is_open=is_open, tags=GEMMA) == whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nhm\n<channel|>Four.", [Thought("hm"), "Four."]),
        ("<|channel>thought\n<channel|>Four.", ["Four."]),
        ("<|channel>thoughts<channel|>Four.", [Thought("thoughts"), "Four."]),
        ("Four.", ["Four."]),
    ],
)
def test_the_label_of_a_thought_is_no_part_of_it(text: str, expected: list[Thought | str]) -> None:
    assert find_tags("{{ '<|channel>thought\\n' }} <channel|>") == GEMMA
    assert split([text], is_open=False, tags=GEMMA) == expected


def test_text_comes_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(TAGS, is_open=False)
    assert splitter.push("<think>a ") == [Thought("a")]
    assert splitter.push("b <") == [Thought(" b")]
    assert splitter.push("/think>") == [Thought("")]
    assert splitter.push("\nc") == ["c"]
    assert splitter.push(" <think>") == [" <think>"]


def test_tags_come_from_the_template() -> None:
    assert find_tags("{{ '<think>' }} {{ '</think>' }}") == TAGS
    assert find_tags("[THINK]x[/THINK]") == Tags("[THINK]", "[/THINK]")
    assert find_tags("{{ messages }}") is None


class Letters:
    """A tokenizer of a few tokens, as far as the gate needs it."""

    texts = ("a", "b", "\n", "\n\n", "<think>", "</think>", "</th", "ink>", "</s>")
    vocab_size = len(texts)
    eos_ids = frozenset({8})

    def token_bytes(self, token_id: int) -> bytes:
        return self.texts[token_id].encode()

    def token_id(self, text: str) -> int | None:
        return self.texts.index(text) if text in self.texts else None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [self.texts.index(text)] if text in self.texts else [0]


class OnlyB:
    """Allows nothing but b."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def look_ahead(self, tokens_left: int) -> int:
        return len(self.accepted)

    def close(self) -> Sequence[int]:
        return (1,)

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[0] |= np.uint32(1 << 1)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return len(list(takewhile(lambda token_id: token_id == 1, token_ids)))

    def fork(self) -> OnlyB:
        return OnlyB()


def allowed(gate: ReasoningGate) -> set[int]:
    mask = np.zeros(2, np.uint32)
    gate.fill_mask(mask)
    return {index for index in range(64) if mask[index // 32] >> np.uint32(index % 32) & np.uint32(1)}


@pytest.mark.parametrize("close", [[5], [6, 7]], ids=["one token", "several tokens"])
def test_the_grammar_holds_after_the_reasoning(close: list[int]) -> None:
    tokens = collect_gate_tokens(Letters(), TAGS, vocab_size=40)  # type: ignore[arg-type]
    inner = OnlyB()
    gate = ReasoningGate(tokens, inner, is_thinking=False)
    assert allowed(gate) == {1, 4}  # the answer, or a thought
    gate.accept(4)
    for token_id in (0, 1, *close):
        assert allowed(gate) == set(range(8))  # anything but the end, and nothing beyond the vocabulary
        gate.accept(token_id)
    assert allowed(gate) == {1, 2, 3}
    assert [gate.count_allowed(draft) for draft in ([2, 5, 5], [1, 1, 5], [5])] == [3, 2, 0]
    fork = gate.fork()
    gate.accept(3)
    assert allowed(gate) == {1}
    gate.accept(1)
    assert inner.accepted == [1]
    fork.accept(1)
    assert allowed(fork) == {1}
    assert inner.accepted == [1]


def test_nothing_of_a_thought_is_taken_back_and_nothing_ends_it() -> None:
    tokens = collect_gate_tokens(Letters(), TAGS, vocab_size=40)  # type: ignore[arg-type]
    gate = ReasoningGate(tokens, OnlyB(), is_thinking=False)
    told = []
    for token_id in (4, 0, 1, 5, 3, 1, 1):
        gate.accept(token_id)
        told.append((gate.look_ahead(9), gate.close()))
    assert told == [(0, ())] * 3 + [(0, (1,))] * 2 + [(1, (1,)), (2, (1,))]


def test_without_a_thought_the_grammar_holds_from_the_start() -> None:
    tokens = collect_gate_tokens(Letters(), TAGS, vocab_size=40)  # type: ignore[arg-type]
    inner = OnlyB()
    gate = ReasoningGate(tokens, inner, is_thinking=False)
    gate.accept(1)
    assert allowed(gate) == {1}
    assert inner.accepted == [1]
    open_gate = ReasoningGate(tokens, OnlyB(), is_thinking=True)
    assert allowed(open_gate) == set(range(8))
