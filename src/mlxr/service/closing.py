"""Brings an answer under a grammar to an end before its tokens run out: JSON that would be cut is closed instead.

A way to the end is looked for with forks of the grammar's state: closing signs first, then the shortest values. While
there is room to spare nothing changes. When the rest is about as long as that way and the largest thing that could
still be opened, only that way is allowed, but for the inside of texts, which may go on until the room is needed. What
is allowed depends on the answer's tokens and on how many may still come, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from mlxr.engine.constraint import Mask
from mlxr.service.grammar_library import Matcher

MAX_WAY_TOKENS = 600
SPARE_TOKENS = 4  # a token that is cut in the middle of a character takes some more
_LOOK_TOKENS = 256  # left, when the first look is due
_RETRY_TOKENS = 16
_FEW = 16  # tokens: what is so narrow is spelt out, as a name is or a word of an enum
_STRUCTURE = ("}", "]", ",", ":", *"0123456789", '"', "null", "true", "false", "-", "[", "{")
_IN_TEXT = ('"',)
_FILLING = (*"-_@.:/+#,", *"0123456789", *"aA")  # signs first: in patterns they part what may be long


class ClosingTokens:
    """Finds the tokens that can close JSON; `tokens` are the bytes of each, empty for those that are never drawn."""

    def __init__(self, tokens: Sequence[bytes], eos_ids: Collection[int]) -> None:
        self.tokens, self.eos_ids = tokens, sorted(eos_ids)
        ids: dict[bytes, int] = {}
        for index in range(len(tokens) - 1, -1, -1):
            ids[tokens[index]] = index
        self.structure, self.in_text, self.filling = (
            [ids[text.encode()] for text in texts if text.encode() in ids] for texts in (_STRUCTURE, _IN_TEXT, _FILLING)
        )
        plain = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
        plain[: len(tokens)] = [_is_plain(part) for part in tokens]
        self.plain: Mask = np.packbits(plain, bitorder="little").view("<u4").astype(np.uint32)


class Closer:
    """The end of one answer. `heaviest_tokens` is what the largest thing that may be opened takes, about.

    `is_cut` says that tokens were kept out for want of room.
    """

    def __init__(self, tokens: ClosingTokens, heaviest_tokens: int) -> None:
        self._tokens, self._reserve = tokens, heaviest_tokens + SPARE_TOKENS
        self._look_at = _LOOK_TOKENS + 4 * heaviest_tokens
        self._place = _Place()
        self.is_cut = False

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token."""
        self._place.read(self._tokens.tokens[token_id])

    def fork(self) -> Closer:
        """One more of the same state."""
        other = Closer(self._tokens, self._reserve - SPARE_TOKENS)
        other._look_at, other._place, other.is_cut = self._look_at, self._place.copy(), self.is_cut
        return other

    def restrict(self, mask: Mask, matcher: Matcher, tokens_left: int) -> None:
        """Keep in `mask` what leaves room for an end; `tokens_left` may come, the next one included."""
        if tokens_left > self._look_at:
            return
        way = self._find_way(matcher, tokens_left)
        if way is None:
            self._look_at = tokens_left - _RETRY_TOKENS
            return
        spare = tokens_left - len(way)
        if spare > self._reserve:
            self._look_at = tokens_left - max(1, (spare - self._reserve) // 2)
        elif way:
            before = mask.copy()
            if self._place.in_text and spare > SPARE_TOKENS:
                mask &= self._tokens.plain
            else:
                mask.fill(0)
            mask[way[0] // 32] |= np.uint32(1 << way[0] % 32)
            self.is_cut = self.is_cut or not np.array_equal(mask, before)

    def _find_way(self, matcher: Matcher, most: int) -> list[int] | None:
        """Tokens after which the answer may end; None if no way is found that is short enough."""
        probe, place, way = matcher.fork(), self._place.copy(), list[int]()
        mask: Mask = np.zeros(len(self._tokens.plain), np.uint32)
        while probe.write_mask(mask):
            if any(_has(mask, token_id) for token_id in self._tokens.eos_ids):
                return way
            token_id = self._choose(mask, place)
            if token_id is None or len(way) >= min(most, MAX_WAY_TOKENS):
                return None
            probe.accept(token_id)
            place.read(self._tokens.tokens[token_id])
            way.append(token_id)
        return None

    def _choose(self, mask: Mask, place: _Place) -> int | None:
        """The token that leads to the end soonest, as far as can be told from what it is."""
        tokens = self._tokens
        for token_id in tokens.in_text if place.in_text else tokens.structure:
            if _has(mask, token_id):
                return token_id
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if len(allowed) > _FEW:
            for token_id in tokens.filling:
                if _has(mask, token_id):
                    return token_id
        return max(map(int, allowed), key=lambda token_id: (len(tokens.tokens[token_id]), -token_id), default=None)


class _Place:
    """Whether an answer is inside a text of JSON."""

    def __init__(self, *, in_text: bool = False, is_escaped: bool = False) -> None:
        self.in_text, self._is_escaped = in_text, is_escaped

    def copy(self) -> _Place:
        return _Place(in_text=self.in_text, is_escaped=self._is_escaped)

    def read(self, part: bytes) -> None:
        for sign in part:
            if self._is_escaped:
                self._is_escaped = False
            elif sign == 0x5C:  # a backslash
                self._is_escaped = self.in_text
            elif sign == 0x22:  # a quotation mark
                self.in_text = not self.in_text


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def _is_plain(part: bytes) -> bool:
    """Whether a token is whole characters of a text, none of which ends it or needs another one."""
    if not part or b'"' in part or b"\\" in part:
        return False
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True
