"""A constraint that waits until a model has thought: before the closing tag anything may come, then the grammar.

Knows tokens and tags. The engine asks it for masks as it would ask the grammar itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from mlxr.engine.constraint import Mask, TokenConstraint
from mlxr.service.reasoning import Tags
from mlxr.tokenizers import Tokenizer

_SPACES = ("\n", "\n\n", "\n\n\n")  # what models write between the closing tag and the answer


class _Place(Enum):
    START = auto()  # the model may open the tag, or not
    INSIDE = auto()
    BEHIND = auto()  # right after the closing tag
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class GateTokens:
    """What a gate needs of one vocabulary: the mask of the tokens that may be part of a thought, and some ids."""

    tokenizer: Tokenizer
    close: bytes
    thought_mask: Mask
    open_id: int | None
    space_ids: frozenset[int]


def collect_gate_tokens(tokenizer: Tokenizer, tags: Tags, vocab_size: int) -> GateTokens:
    """Made once for a model. An end token is no part of a thought: the answer that was asked for would be missing."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[: min(vocab_size, tokenizer.vocab_size)] = 1
    allowed[[index for index in tokenizer.eos_ids if index < vocab_size]] = 0
    spaces = {tokenizer.encode(text, add_special=False)[-1] for text in _SPACES}
    return GateTokens(
        tokenizer,
        tags.close.encode(),
        np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32),
        tokenizer.token_id(tags.open),
        frozenset(index for index in spaces if not tokenizer.token_bytes(index).strip()),
    )


class ReasoningGate:
    """`inner` behind the reasoning of one answer; `is_thinking` says that the prompt ends inside it."""

    def __init__(self, tokens: GateTokens, inner: TokenConstraint, *, is_thinking: bool) -> None:
        self._tokens, self._inner = tokens, inner
        self._place = _Place.INSIDE if is_thinking else _Place.START
        self._tail = b""

    @property
    def is_cut(self) -> bool:
        """Whether the grammar behind the gate closes the answer early because tokens run out."""
        return self._inner.is_cut

    def fill_mask(self, mask: Mask, tokens_left: int | None = None) -> None:
        """Write which tokens may come next: all but the end while the model thinks, then what the grammar allows."""
        if self._place is _Place.INSIDE:
            mask[:] = self._tokens.thought_mask
            return
        self._inner.fill_mask(mask, tokens_left)
        if self._place is _Place.START and self._tokens.open_id is not None:
            _set_bit(mask, self._tokens.open_id)
        elif self._place is _Place.BEHIND:
            for token_id in self._tokens.space_ids:
                _set_bit(mask, token_id)

    def accept(self, token_id: int) -> None:
        """Take the token that was drawn; only tokens of the answer reach the grammar."""
        if self._place is _Place.INSIDE:
            self._read_thought(token_id)
        elif self._place is _Place.START and token_id == self._tokens.open_id:
            self._place = _Place.INSIDE
        elif self._place is _Place.BEHIND and token_id in self._tokens.space_ids:
            self._place = _Place.ANSWER
        else:
            self._place = _Place.ANSWER
            self._inner.accept(token_id)

    def fork(self) -> ReasoningGate:
        """Return a copy that goes on by itself from the same state."""
        other = ReasoningGate(self._tokens, self._inner.fork(), is_thinking=False)
        other._place, other._tail = self._place, self._tail
        return other

    def _read_thought(self, token_id: int) -> None:
        self._tail += self._tokens.tokenizer.token_bytes(token_id)
        if self._tokens.close in self._tail:
            self._place, self._tail = _Place.BEHIND, b""
        else:
            self._tail = self._tail[-len(self._tokens.close) :]


def _set_bit(mask: Mask, token_id: int) -> None:
    mask[token_id // 32] |= np.uint32(1 << token_id % 32)
