"""A constraint that waits until a model has thought: before the closing tag anything may come, then the grammar.

Knows tokens and tags. The engine asks it for masks as it would ask the grammar itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from mlxr.engine.constraint import Mask, TokenConstraint
from mlxr.service.reasoning import Tags
from mlxr.tokenizers import Tokenizer

_SPACES = ("\n", "\n\n", "\n\n\n")  # what models write between the closing tag and the answer


class _Place(Enum):
    START = auto()  # the model may open the tag, or not; both may begin with the same tokens
    INSIDE = auto()
    BEHIND = auto()  # right after the closing tag
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class GateTokens:
    """What a gate needs of one vocabulary: the mask of the tokens that may be part of a thought, and some ids.

    `open_ids` are the tokens of the opening tag. With `repeats` a thought may follow a thought.
    """

    tokenizer: Tokenizer
    close: bytes
    thought_mask: Mask
    open_ids: tuple[int, ...]
    space_ids: frozenset[int]
    repeats: bool = False


def collect_gate_tokens(tokenizer: Tokenizer, tags: Tags, vocab_size: int) -> GateTokens:
    """Made once for a model. An end token is no part of a thought: the answer that was asked for would be missing."""
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
    """The opening tag, if it is one token or begins with a control token; else no model is known to write it."""
    token_id = tokenizer.token_id(tags.open)
    if token_id is not None or not tags.follow:
        return () if token_id is None else (token_id,)
    token_ids = tokenizer.encode(tags.open, add_special=False, parse_special=True)
    return tuple(token_ids) if tokenizer.is_special(token_ids[0]) else ()


class ReasoningGate:
    """`inner` behind the reasoning of one answer; `is_thinking` says that the prompt ends inside it."""

    def __init__(self, tokens: GateTokens, inner: TokenConstraint, *, is_thinking: bool) -> None:
        self._tokens, self._inner = tokens, inner
        self._place = _Place.INSIDE if is_thinking else _Place.START
        self._opened = 0  # how many tokens of the opening tag have come
        self._fresh: TokenConstraint | None = None  # `inner` as it was before these, should they open a thought
        self._is_split = False  # the grammar does not allow them: nothing but the rest of the tag may come
        self._tail = b""

    needs_end = True

    def count_free(self) -> int:
        """No token is free: even a thought may not end the answer."""
        return 0

    def fill_mask(self, mask: Mask) -> None:
        """Write which tokens may come next: all but the end while the model thinks, then what the grammar allows."""
        if self._place is _Place.INSIDE:
            mask[:] = self._tokens.thought_mask
            return
        if not self._is_split:
            self._inner.fill_mask(mask)
        if self._place is _Place.START and self._tokens.open_ids:
            _set_bit(mask, self._tokens.open_ids[self._opened])
        elif self._place is _Place.BEHIND:
            for token_id in self._tokens.space_ids:
                _set_bit(mask, token_id)

    def accept(self, token_id: int) -> None:
        """Take the token that was drawn; only tokens of the answer reach the grammar."""
        if self._place is _Place.INSIDE:
            self._read_thought(token_id)
        elif self._place is _Place.START and self._tokens.open_ids[self._opened : self._opened + 1] == (token_id,):
            self._read_tag(token_id)
        elif self._place is _Place.BEHIND and token_id in self._tokens.space_ids:
            self._place = _Place.ANSWER
        else:
            self._place, self._fresh, self._is_split = _Place.ANSWER, None, False
            self._inner.accept(token_id)

    def look_ahead(self, tokens_left: int) -> int:
        """How many of the newest tokens the grammar may take back: none of a thought."""
        return self._inner.look_ahead(tokens_left) if self._is_answering else 0

    def close(self) -> Sequence[int]:
        """Return what the grammar ends the answer with; nothing ends a thought."""
        return self._inner.close() if self._is_answering else ()

    @property
    def _is_answering(self) -> bool:
        """Whether all tokens since the last thought have reached the grammar, but for a space before them."""
        return self._place is not _Place.INSIDE and not self._is_split

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come: anything may in a thought, and what begins with one is not looked into."""
        before = {_Place.START: self._tokens.open_ids[self._opened :], _Place.BEHIND: self._tokens.space_ids}
        if self._place is _Place.INSIDE or token_ids[0] in before.get(self._place, ()):
            return len(token_ids)
        return 0 if self._is_split else self._inner.count_allowed(token_ids)

    def fork(self) -> ReasoningGate:
        """Return a copy that goes on by itself from the same state."""
        other = ReasoningGate(self._tokens, self._inner.fork(), is_thinking=False)
        other._place, other._tail = self._place, self._tail
        other._opened, other._is_split = self._opened, self._is_split
        other._fresh = None if self._fresh is None else self._fresh.fork()
        return other

    def _read_tag(self, token_id: int) -> None:
        """One more token of the opening tag, which the answer may begin with as well."""
        self._opened += 1
        if self._opened == len(self._tokens.open_ids):
            self._inner = self._fresh or self._inner
            self._place, self._opened, self._fresh, self._is_split = _Place.INSIDE, 0, None, False
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
            self._place, self._tail = _Place.START if self._tokens.repeats else _Place.BEHIND, b""
        else:
            self._tail = self._tail[-len(self._tokens.close) :]


def _set_bit(mask: Mask, token_id: int) -> None:
    mask[token_id // 32] |= np.uint32(1 << token_id % 32)
