"""The ends of answers that reach their last token under a grammar: what would be cut is closed instead.

An answer grows freely. Where it has not ended by itself when its tokens are used up, the newest ones are taken back, as
few as leave room for a way to the end, which comes in their place. So nobody may be shown a token before it is known
that some place behind it has such a way. A way is looked for with forks of the grammar's state: closing signs first,
then the shortest values; marks that the grammar names lead out of a text that may have any sign. As long as there is
much room this is done rarely, and nothing is held back. All this depends on the answer's tokens and on how many may
still come, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from mlxr.engine.constraint import Mask
from mlxr.service.grammar_library import Matcher
from mlxr.service.grammar_vocabulary import GrammarVocabulary

MAX_WAY_TOKENS = 600
_SPARE_TOKENS = 4  # a token that is cut in the middle of a character takes some more
_LOOK_TOKENS = 256  # left, when the first look is due
_GROWTH = 4  # tokens that a way may get longer with each token, besides what the largest thing takes that can be opened
_PATIENCE = 8  # where no way is found, that part of what is left goes by before the next look
_LONGER = 2  # times as many tokens a way may have before it is written with longer ones
_WIDE = 8  # of so many tokens one is allowed where there is a text; behind its mark so much fewer are
_FEW = 16  # tokens: what is so narrow is spelt out, as a name is or a word of an enum
_STRUCTURE = ("}", "]", ",", ":", *"0123456789", '"', "null", "true", "false", "-", "[", "{")
_IN_TEXT = ('"',)
_CLOSING_SIGNS = (b"]", b"}", b")", b">")
_FILLING = (*"-_@.:/+#,", *"0123456789", *"aA")  # signs first: in patterns they part what may be long


class ClosingTokens:
    """Finds the tokens that can close an answer, in a vocabulary whose answers end with `eos_ids`."""

    def __init__(self, vocabulary: GrammarVocabulary, eos_ids: Collection[int]) -> None:
        tokens = vocabulary.tokens
        self.tokens, self.eos_ids, self._vocabulary = tokens, sorted(eos_ids), vocabulary
        self._special = frozenset(vocabulary.special_token_ids)
        ids: dict[bytes, int] = {}
        for index in range(len(tokens) - 1, -1, -1):
            ids[tokens[index]] = index
        self.structure, self.in_text, self.filling = (
            [ids[text.encode()] for text in texts if text.encode() in ids] for texts in (_STRUCTURE, _IN_TEXT, _FILLING)
        )
        self.mask_words = -(-len(tokens) // 32)

    def spell(self, mark: bytes | int) -> tuple[int, ...]:
        """Return the tokens of a mark, which may be one by its id."""
        return (mark,) if isinstance(mark, int) else tuple(self._vocabulary.take_longest(mark))

    def shorten(self, way: Sequence[int], matcher: Matcher) -> list[int]:
        """Write the text of `way` with fewer tokens, if the grammar takes them as well."""
        if self._special.isdisjoint(way):
            shorter = self._vocabulary.take_longest(b"".join(self.tokens[token_id] for token_id in way))
            if len(shorter) < len(way) and self.ends(shorter, matcher):
                return shorter
        return list(way)

    def ends(self, way: Sequence[int], matcher: Matcher) -> bool:
        """Whether an answer may go on with these tokens, and end after them."""
        return any(matcher.count_allowed([*way, token_id]) > len(way) for token_id in self.eos_ids)


class Closer:
    """The end of one answer. `heaviest_tokens` is what the largest thing that may be opened takes, about.

    `marks` are tokens that may lead out of a text, those that are tried first at the front.

    `_way` was found last. If it `_is_certain`, the newest `_held` tokens may be taken back for it. Else nothing is
    held, either because there is room to spare or because no way is known.
    """

    def __init__(self, tokens: ClosingTokens, heaviest_tokens: int, marks: Sequence[tuple[int, ...]] = ()) -> None:
        self._tokens, self._reserve, self._marks = tokens, heaviest_tokens + _SPARE_TOKENS, marks
        self._look_at = _LOOK_TOKENS + 4 * heaviest_tokens
        self._place = _Place()
        self._way: list[int] | None = None
        self._is_certain, self._held = False, 0

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token."""
        self._place.read(self._tokens.tokens[token_id])
        self._held += 1

    def fork(self) -> Closer:
        """One more of the same state."""
        other = Closer(self._tokens, self._reserve - _SPARE_TOKENS, self._marks)
        other._look_at, other._place = self._look_at, self._place.copy()
        other._way, other._is_certain, other._held = self._way, self._is_certain, self._held
        return other

    def look(self, matcher: Matcher, tokens_left: int) -> int:
        """How many of the newest tokens may be taken back, when at most `tokens_left` may still come."""
        if tokens_left > self._look_at:
            self._is_certain, self._held = False, 0
            return 0
        way = self._find_known(matcher, tokens_left)
        if way is None:
            way = self._find_way(matcher, tokens_left)
        if way is not None:
            spare = tokens_left - len(way) - self._reserve
            self._way, self._is_certain, self._held = way, True, 0
            self._look_at = tokens_left - max(1, spare // _GROWTH)
        elif not (self._is_certain and self._held):  # what was shown cannot be taken back
            self._is_certain, self._held = False, 0
            self._look_at = tokens_left - max(1, tokens_left // _PATIENCE)
        self._look_at = max(self._look_at, 0)
        return self._held

    def close(self) -> Sequence[int]:
        """Return the way to the end from before the tokens that are held."""
        return self._way if self._way and self._held else ()

    def _find_known(self, matcher: Matcher, most: int) -> list[int] | None:
        """The way that was found last, or what is left of it, if that leads to the end from here. Takes no search."""
        ways = [] if self._way is None else [self._way[1:], self._way]
        return next((way for way in ways if len(way) <= most and self._tokens.ends(way, matcher)), None)

    def _find_way(self, matcher: Matcher, most: int) -> list[int] | None:
        """Tokens after which the answer may end; None if no way is found that is short enough."""
        probe, place, way = matcher, self._place.copy(), list[int]()
        mask: Mask = np.zeros(self._tokens.mask_words, np.uint32)
        while probe.write_mask(mask):
            if any(_has(mask, token_id) for token_id in self._tokens.eos_ids):
                way = self._tokens.shorten(way, matcher)
                return way if len(way) <= most else None
            chosen = self._find_last(probe, mask) or self._find_mark(probe, mask, place) or self._choose(mask, place)
            if not chosen or len(way) >= min(_LONGER * most, MAX_WAY_TOKENS):
                return None
            probe = matcher.fork() if probe is matcher else probe
            for token_id in chosen:
                probe.accept(token_id)
                place.read(self._tokens.tokens[token_id])
            way += chosen
        return None

    def _find_last(self, matcher: Matcher, mask: Mask) -> tuple[int, ...]:
        """Of few tokens the one after which the answer may end."""
        allowed = _list_allowed(mask) if 1 < _count(mask) <= _FEW else []
        return next(((token_id,) for token_id in allowed if self._tokens.ends([token_id], matcher)), ())

    def _find_mark(self, matcher: Matcher, mask: Mask, place: _Place) -> tuple[int, ...]:
        """The tokens of a mark that closes what is open, or leads out of a text with all kinds of signs."""
        allowed = _count(mask)
        if place.in_text or allowed == 1:
            return ()
        if allowed * _WIDE < len(self._tokens.tokens):
            fitting = (mark for mark in self._marks if matcher.count_allowed(mark) == len(mark))
            return next((mark for mark in fitting if self._tokens.tokens[mark[-1]].endswith(_CLOSING_SIGNS)), ())
        behind = np.zeros_like(mask)
        for mark in self._marks:
            if matcher.count_allowed(mark) == len(mark):
                probe = matcher.fork()
                probe.replay(mark)
                if probe.write_mask(behind) and _count(behind) * _WIDE < allowed:
                    return mark
        return ()

    def _choose(self, mask: Mask, place: _Place) -> tuple[int, ...]:
        """The token that leads to the end soonest, as far as can be told from what it is."""
        tokens = self._tokens
        for token_id in tokens.in_text if place.in_text else tokens.structure:
            if _has(mask, token_id):
                return (token_id,)
        allowed = _list_allowed(mask)
        if len(allowed) > _FEW:
            for token_id in tokens.filling:
                if _has(mask, token_id):
                    return (token_id,)
        longest = sorted(allowed, key=lambda token_id: (-len(tokens.tokens[token_id]), token_id))
        return tuple(longest[:1])


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


def _list_allowed(mask: Mask) -> list[int]:
    allowed: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return allowed


def _count(mask: Mask) -> int:
    return int.from_bytes(mask.tobytes(), "little").bit_count()
