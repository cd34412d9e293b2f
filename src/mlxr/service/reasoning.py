"""Finds the reasoning of a model in a stream of text, and the variables that switch it.

The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.engine.request import Mask, TokenConstraint
from mlxr.tokenizers import Tokenizer

# Template variables that switch reasoning on and off, and the one that sets how much there is of it.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"  # the variable of templates of models that were trained to keep to a budget
# All efforts that dialects know, ascending, with the most tokens of thought that each means to a model that knows no
# efforts itself; -1: any number.
EFFORTS: Mapping[str, int] = MappingProxyType(
    {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": -1, "max": -1}
)


@frozen
class Tags:
    """The tags around the reasoning of one model.

    `label` follows the opening tag and is no part of the thought. If thoughts are messages of their own, `follow`
    begins the next message, which may be one more thought. `levels` are, in ascending order, the only efforts that the
    model's template takes; empty if it takes none or any.
    """

    open: str
    close: str
    label: str = ""
    follow: str = ""
    levels: tuple[str, ...] = ()


# gpt-oss; Qwen 3, DeepSeek R1, GLM 4.5, Nemotron 3 and most others; Magistral; Command A; Seed-OSS; Gemma 4.
TAGS = (
    Tags("<|channel|>analysis<|message|>", "<|end|>", "", "<|start|>assistant", ("low", "medium", "high")),
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|channel>", "<channel|>", "thought\n"),
)


@frozen
class Thought:
    """A piece of reasoning; an empty one marks the end."""

    text: str


def find_tags(template_source: str) -> Tags | None:
    """Return the tags that occur in a chat template; None without any."""
    return next((tags for tags in TAGS if (tags.open if tags.follow else tags.close) in template_source), None)


def find_level(effort: str, levels: Sequence[str]) -> str:
    """Return the one of `levels` that is nearest to `effort`; an effort that is not in `EFFORTS` stays."""
    if effort in levels or effort not in EFFORTS:
        return effort
    names = list(EFFORTS)
    return min(levels, key=lambda level: abs(names.index(level) - names.index(effort)))


def hold_back(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is the beginning of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


class _Place(Enum):
    START = auto()  # nothing but space so far
    INSIDE_START = auto()  # inside, since the prompt opened the tag; nothing but space so far
    OPENED = auto()  # behind the opening tag, nothing but space so far
    INSIDE = auto()
    AFTER = auto()  # behind the closing tag, nothing but space so far
    ANSWER = auto()


class ReasoningSplitter:
    """Cuts an answer into thoughts and text. The space around the tags belongs to neither.

    `is_open` says that the prompt has opened the tag; the model may then open it once more.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._tags = tags
        self._place = _Place.INSIDE_START if is_open else _Place.START
        self._held = ""

    def push(self, text: str) -> list[Thought | str]:
        """Add a piece of text; returns the pieces that are now certain."""
        if self._place is _Place.ANSWER:
            return [text]
        self._held += text
        pieces: list[Thought | str] = []
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Thought | str]:
        """Return the pieces still held back; called once, when no more text comes."""
        held, self._held = self._held, ""
        if self._place is _Place.INSIDE:
            return [Thought(held.rstrip())] if held.strip() else []
        if self._place is _Place.START or self._place is _Place.ANSWER:
            return [held] if held else []
        return [Thought(held.strip())] if self._place is _Place.INSIDE_START and held.strip() else []

    def _advance(self, pieces: list[Thought | str]) -> bool:
        """Do one step over the held text; returns True if another step may follow."""
        if self._place is _Place.INSIDE:
            return self._read_thought(pieces)
        bare = self._held.lstrip()
        if self._place is _Place.OPENED and self._tags.label:
            if self._tags.label.startswith(bare) and bare != self._tags.label:
                return False
            self._held, self._place = bare.removeprefix(self._tags.label), _Place.INSIDE_START
            return True
        if self._place is _Place.OPENED:
            self._held, self._place = bare, _Place.INSIDE if bare else _Place.OPENED
            return bool(bare)
        if self._place in (_Place.START, _Place.INSIDE_START):
            if self._tags.open.startswith(bare) and bare != self._tags.open:
                return False  # also when there is nothing but space
            if bare.startswith(self._tags.open):
                self._held, self._place = bare.removeprefix(self._tags.open), _Place.OPENED
                return True
            if self._place is _Place.INSIDE_START:
                self._held, self._place = bare, _Place.INSIDE
                return True
        elif not bare:
            self._held = ""
            return False
        pieces.append(self._held if self._place is _Place.START else bare)
        self._held, self._place = "", _Place.ANSWER
        return False

    def _read_thought(self, pieces: list[Thought | str]) -> bool:
        thought, close, rest = self._held.partition(self._tags.close)
        if close:
            if thought.rstrip():
                pieces.append(Thought(thought.rstrip()))
            pieces.append(Thought(""))
            self._held, self._place = rest, _Place.AFTER
            return True
        keep = hold_back(thought, self._tags.close)
        sure = thought[: len(thought) - keep].rstrip()
        if sure:
            pieces.append(Thought(sure))
            self._held = thought[len(sure) :]
        return False


_SPACES = ("\n", "\n\n", "\n\n\n")  # what models write between the closing tag and the answer


class _GatePlace(Enum):
    START = auto()  # the model may open the tag, or not; both may begin with the same tokens
    INSIDE = auto()
    BEHIND = auto()  # right after the closing tag
    ANSWER = auto()


@frozen
class GateTokens:
    """The parts of a vocabulary that a gate needs: the mask of the tokens that may be part of a thought, and some ids.

    `open_ids` are the tokens of the opening tag. With `repeats` a thought may follow a thought.
    """

    tokenizer: Tokenizer
    close: bytes
    thought_mask: Mask
    open_ids: tuple[int, ...]
    space_ids: frozenset[int]
    repeats: bool = False


def collect_gate_tokens(tokenizer: Tokenizer, tags: Tags, vocab_size: int) -> GateTokens:
    """Collect the tokens, once for a model. An end token is no part of a thought: the answer would be missing."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[: min(vocab_size, tokenizer.vocab_size)] = 1
    allowed[[index for index in tokenizer.eos_ids if index < vocab_size]] = 0
    spaces = set[int]()
    if not tags.follow:
        spaces = {tokenizer.encode(text, add_special=False)[-1] for text in _SPACES}
    return GateTokens(
        tokenizer,
        (tags.close + tags.follow).encode(),
        np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32),
        list_open_ids(tokenizer, tags),
        frozenset(index for index in spaces if not tokenizer.token_bytes(index).strip()),
        bool(tags.follow),
    )


def list_open_ids(tokenizer: Tokenizer, tags: Tags) -> tuple[int, ...]:
    """Return the tokens of the opening tag if it is one token or begins with a control token; else none: no model is
    known to write other ones.
    """
    token_id = tokenizer.token_id(tags.open)
    if token_id is not None or not tags.follow:
        return () if token_id is None else (token_id,)
    token_ids = tokenizer.encode(tags.open, add_special=False, parse_special=True)
    return tuple(token_ids) if tokenizer.is_special(token_ids[0]) else ()


class ReasoningGate:
    """A constraint that holds after the reasoning of one answer; `is_thinking` says that the prompt ends inside it."""

    def __init__(self, tokens: GateTokens, inner: TokenConstraint, *, is_thinking: bool) -> None:
        self._tokens, self._inner = tokens, inner
        self._place = _GatePlace.INSIDE if is_thinking else _GatePlace.START
        self._opened = 0  # the tokens of the opening tag that have come
        self._fresh: TokenConstraint | None = None  # `inner` before these tokens, in case they open a thought
        self._is_split = False  # the grammar does not allow these tokens: only the rest of the tag may come
        self._tail = b""

    needs_end = True

    def count_free(self) -> int:
        """Return 0: no token is free, since even a thought may not end the answer."""
        return 0

    def fill_mask(self, mask: Mask) -> None:
        """Write which tokens may come next: all but the end while the model thinks, then what the grammar allows."""
        if self._place is _GatePlace.INSIDE:
            mask[:] = self._tokens.thought_mask
            return
        if not self._is_split:
            self._inner.fill_mask(mask)
        if self._place is _GatePlace.START and self._tokens.open_ids:
            _set_bit(mask, self._tokens.open_ids[self._opened])
        elif self._place is _GatePlace.BEHIND:
            for token_id in self._tokens.space_ids:
                _set_bit(mask, token_id)

    def accept(self, token_id: int) -> None:
        """Go on after the sampled token; only tokens of the answer reach the grammar."""
        if self._place is _GatePlace.INSIDE:
            self._read_thought(token_id)
        elif self._place is _GatePlace.START and self._tokens.open_ids[self._opened : self._opened + 1] == (token_id,):
            self._read_tag(token_id)
        elif self._place is _GatePlace.BEHIND and token_id in self._tokens.space_ids:
            self._place = _GatePlace.ANSWER
        else:
            self._place, self._fresh, self._is_split = _GatePlace.ANSWER, None, False
            self._inner.accept(token_id)

    def look_ahead(self, tokens_left: int) -> int:
        """Return the number of newest tokens that the grammar may take back: none of a thought."""
        return self._inner.look_ahead(tokens_left) if self._is_answering else 0

    def close(self) -> Sequence[int]:
        """Return the tokens with which the grammar ends the answer; none inside a thought."""
        return self._inner.close() if self._is_answering else ()

    @property
    def _is_answering(self) -> bool:
        """True if all tokens since the last thought have reached the grammar, except a space before them."""
        return self._place is not _GatePlace.INSIDE and not self._is_split

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the number of these tokens that may come; all of them inside a thought, or if they may begin one."""
        before = {_GatePlace.START: self._tokens.open_ids[self._opened :], _GatePlace.BEHIND: self._tokens.space_ids}
        if self._place is _GatePlace.INSIDE or token_ids[0] in before.get(self._place, ()):
            return len(token_ids)
        return 0 if self._is_split else self._inner.count_allowed(token_ids)

    def fork(self) -> ReasoningGate:
        """Return an independent copy in the same state."""
        other = ReasoningGate(self._tokens, self._inner.fork(), is_thinking=False)
        other._place, other._tail = self._place, self._tail
        other._opened, other._is_split = self._opened, self._is_split
        other._fresh = None if self._fresh is None else self._fresh.fork()
        return other

    def _read_tag(self, token_id: int) -> None:
        """Read one more token of the opening tag; the answer may begin with the same tokens."""
        self._opened += 1
        if self._opened == len(self._tokens.open_ids):
            self._inner = self._fresh or self._inner
            self._place, self._opened, self._fresh, self._is_split = _GatePlace.INSIDE, 0, None, False
            return
        if self._fresh is None:
            self._fresh = self._inner.fork()
        mask = np.zeros_like(self._tokens.thought_mask)
        if not self._is_split:
            self._inner.fill_mask(mask)
        self._is_split = not mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1)
        if not self._is_split:
            self._inner.accept(token_id)

    def _read_thought(self, token_id: int) -> None:
        self._tail += self._tokens.tokenizer.token_bytes(token_id)
        if self._tokens.close in self._tail:
            self._place, self._tail = _GatePlace.START if self._tokens.repeats else _GatePlace.BEHIND, b""
        else:
            self._tail = self._tail[-len(self._tokens.close) :]


def _set_bit(mask: Mask, token_id: int) -> None:
    mask[token_id // 32] |= np.uint32(1 << token_id % 32)
