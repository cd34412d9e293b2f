"""Closes answers under a grammar that reach their token limit, so that they end as the grammar demands.

An answer grows freely. If it has not ended when its tokens are used up, the newest ones are taken back, about as few as
make room for a way to the end: tokens that complete the answer, which come in their place. So a token may be shown only
once such a way is known from some place behind it. The search for a way uses forks of the grammar's state: it tries
closing signs first, then the shortest values; marks that the grammar names lead out of a text that may have any sign.
While much room is left, searches are rare and nothing is held back. Each token earns the answer credit for searches; a
search that costs more goes on with the tokens that follow, which are held back meanwhile. All this depends only on the
answer's tokens and on how many may still come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

from mlxr.engine.request import Mask
from mlxr.service.grammar_library import GrammarVocabulary, Matcher

MAX_WAY_TOKENS = 600
_SPARE_TOKENS = 4  # more for a token that is cut in the middle of a character
_LOOK_TOKENS = 256  # tokens left when the first look is due
_GROWTH = 4  # tokens that a way may grow with each token of the answer, besides opening the largest part
_PATIENCE = 8  # if no way is found, this fraction of the tokens left goes by before the next look
_LONGER = 2  # a way may have this many times the tokens left before it is rewritten with longer tokens
_CREDIT, _MOST_CREDIT = 6, 128  # for searches: gained with each token, and the most; asking about few tokens costs one
_MASK_TOKENS = 8000  # computing a mask for this much of the vocabulary costs one credit
_SHORTEN_TOKENS, _TRIES = 8, 16  # for one credit: tokens of a way that are rewritten, ends of a way that are tried
_NEAR = 8  # ends of a known way that are tried each time, near the place to which one more token leads
_WIDE = 8  # inside a text more than one in this many tokens is allowed, behind its closing mark fewer
_FEW = 16  # tokens: with so few allowed, the grammar spells a text out, such as a name or a word of an enum
_STRUCTURE = ("}", "]", ",", ":", *"0123456789", '"', "null", "true", "false", "-", "[", "{")
_IN_TEXT = ('"',)
_LETTERS = ("a", "A")  # in texts that may have any sign
_CLOSING_SIGNS = (b"]", b"}", b")", b">")
_FILLING = (*"-_@.:/+#,", *"0123456789", *"aA")  # signs first: in patterns they separate parts that may be long


class ClosingTokens:
    """Finds the tokens that can close an answer, in a vocabulary whose answers end with `eos_ids`."""

    def __init__(self, vocabulary: GrammarVocabulary, eos_ids: Collection[int]) -> None:
        tokens = vocabulary.tokens
        self.tokens, self.eos_ids, self._vocabulary = tokens, sorted(eos_ids), vocabulary
        self._special = frozenset(vocabulary.special_token_ids)
        ids: dict[bytes, int] = {}
        for index in range(len(tokens) - 1, -1, -1):
            ids[tokens[index]] = index
        self.structure, self.in_text, self.filling, self.letters = (
            [ids[text.encode()] for text in texts if text.encode() in ids]
            for texts in (_STRUCTURE, _IN_TEXT, _FILLING, _LETTERS)
        )
        self.mask_words, self.mask_cost = -(-len(tokens) // 32), 1 + len(tokens) // _MASK_TOKENS

    def spell(self, mark: bytes | int) -> tuple[int, ...]:
        """Return the tokens of a mark: of its bytes, or the token of that id."""
        return (mark,) if isinstance(mark, int) else tuple(self._vocabulary.take_longest(mark))

    def shorten(self, way: Sequence[int], matcher: Matcher) -> list[int]:
        """Return the text of `way` in fewer tokens, if the grammar takes them as well."""
        if self._special.isdisjoint(way):
            shorter = self._vocabulary.take_longest(b"".join(self.tokens[token_id] for token_id in way))
            if len(shorter) < len(way) and self.ends(shorter, matcher):
                return shorter
        return list(way)

    def ends(self, way: Sequence[int], matcher: Matcher) -> bool:
        """Return True if an answer may go on with these tokens and end after them."""
        if not way:  # the library's check refuses an end token that comes first
            mask: Mask = np.zeros(self.mask_words, np.uint32)
            return matcher.write_mask(mask) and any(_has(mask, token_id) for token_id in self.eos_ids)
        return any(matcher.count_allowed([*way, token_id]) > len(way) for token_id in self.eos_ids)


class Closer:
    """The end of one answer. `heaviest_tokens` is about what the largest part that may be opened takes.

    `marks` are tokens that may lead out of a text, in the order in which they are tried.

    `_way` was found last. If it `_is_certain`, the newest `_held` tokens may be taken back for it. Otherwise the tokens
    that came since the running `_search` began are held; without a search none is, because there is room to spare or
    because no way is known.
    """

    def __init__(self, tokens: ClosingTokens, heaviest_tokens: int, marks: Sequence[tuple[int, ...]] = ()) -> None:
        self._tokens, self._reserve, self._marks = tokens, heaviest_tokens + _SPARE_TOKENS, marks
        self._look_at = self._search_at = _LOOK_TOKENS + 4 * heaviest_tokens
        self._place, self._credit = _Place(), _MOST_CREDIT
        self._words: _Words = {}
        self._search: _Search | None = None
        self._way: list[int] = []
        self._known: _Way | None = None
        self._first = 0  # of the known way, where `_way` begins
        self._is_certain, self._held = False, 0

    def accept(self, token_id: int) -> None:
        """Go on after this token of the answer."""
        self._place.read(self._tokens.tokens[token_id])
        self._held += 1

    def fork(self) -> Closer:
        """Return a copy in the same state, without the running search."""
        other = Closer(self._tokens, self._reserve - _SPARE_TOKENS, self._marks)
        other._look_at, other._search_at, other._place = self._look_at, self._search_at, self._place.copy()
        other._credit, other._words = self._credit, dict(self._words)
        other._way, other._known, other._first = self._way, self._known, self._first
        other._is_certain, other._held = self._is_certain, self._held
        return other

    def look(self, matcher: Matcher, tokens_left: int) -> int:
        """Return the number of newest tokens that may be taken back, when at most `tokens_left` may still come."""
        self._credit = min(self._credit + _CREDIT, _MOST_CREDIT)
        if tokens_left > self._look_at and self._search is None:
            self._is_certain, self._held = False, 0
            return 0
        way = self._find_known(matcher, tokens_left)
        if way is not None:
            self._settle(way, tokens_left, tokens_left)
        elif self._search is not None or tokens_left <= self._search_at:
            self._go_on(matcher, tokens_left)
        if not self._is_certain and (self._search is None or tokens_left == 0):
            self._search, self._held = None, 0  # tokens that were shown cannot be taken back
        return self._held

    def close(self) -> Sequence[int]:
        """Return the tokens that end the answer in place of those that are held."""
        return self._way if self._is_certain and self._held else ()

    def _settle(self, way: list[int], most: int, tokens_left: int) -> None:
        """Keep a way that begins where `most` tokens could still come; `tokens_left` can come now."""
        spare = most - len(way) - self._reserve
        self._way, self._is_certain, self._held, self._search = way, True, most - tokens_left, None
        self._look_at = self._search_at = max(0, min(most - max(1, spare // _GROWTH), tokens_left))

    def _find_known(self, matcher: Matcher, most: int) -> list[int] | None:
        """Return a way that needs no search: an empty one, or an end of the last way that leads on from here."""
        known, first = self._known, self._first
        if self._tokens.ends((), matcher):
            return []
        if known is None:
            return None
        near = [start for start in (1, 0, *range(2, _NEAR)) if first + start < len(known)]
        far = [start for start in range(len(known)) if not first <= start < first + _NEAR]
        for starts, cost in (([first + start for start in near], 0), (far, 1 + len(far) // _TRIES)):
            if cost <= self._credit:
                self._credit -= cost
                for start in starts:
                    if known.count(start) <= most and self._tokens.ends(way := known.read(start), matcher):
                        self._first = start
                        return way
        return None

    def _go_on(self, matcher: Matcher, tokens_left: int) -> None:
        """Search for a way as far as the credit goes: continue the running search, or begin one here."""
        search = self._search
        if search is None:
            search = self._search = _Search(self._tokens, self._marks, self._words, matcher, self._place, tokens_left)
            self._held *= self._is_certain
        is_last = tokens_left == 0 and not self._is_certain
        self._credit -= search.run(_MOST_CREDIT if is_last else self._credit)
        if not search.is_over:
            return
        self._search = None
        excess = 0
        if search.found is not None:
            self._known, self._first = search.found, 0
            excess = search.found.count(0) - search.most
            if excess <= 0:
                self._settle(search.found.read(0), search.most, tokens_left)
                return
        patience = 1 if self._is_certain else tokens_left // _PATIENCE
        self._search_at = max(0, tokens_left - max(1, patience, excess // _GROWTH))
        if not self._is_certain:
            self._look_at = self._search_at


class _Way:
    """A way to the end as it was found, token by token, and the same text in the fewest tokens."""

    def __init__(self, found: list[int], shortest: list[int], texts: Sequence[bytes]) -> None:
        self._found, self._shortest = found, shortest
        places = {place: index for index, place in enumerate(_add_lengths(shortest, texts))}
        meet = len(found), len(shortest)
        self._meet: list[tuple[int, int]] = []  # for each token found: where both have the same rest
        for index, place in reversed(list(enumerate(_add_lengths(found, texts)[:-1]))):
            meet = (index, index) if found == shortest else (index, places[place]) if place in places else meet
            self._meet.append(meet)
        self._meet.reverse()

    def __len__(self) -> int:
        """Return the number of ends of the way: one begins at each token that was found."""
        return len(self._meet)

    def count(self, start: int) -> int:
        """Return the number of tokens of the end from `start` on."""
        index, shorter = self._meet[start]
        return index - start + len(self._shortest) - shorter

    def read(self, start: int) -> list[int]:
        """Return the tokens of the end from `start` on."""
        index, shorter = self._meet[start]
        return self._found[start:index] + self._shortest[shorter:]


def _add_lengths(token_ids: Sequence[int], texts: Sequence[bytes]) -> list[int]:
    """Return where in the bytes each token begins, and the end."""
    return [0, *accumulate(len(texts[token_id]) for token_id in token_ids)]


_Words = dict[tuple[int, ...], int]  # tokens of names and values that a grammar spells out, by those before them


class _Search:
    """The search for a way to the end from one place of an answer, where at most `most` tokens may still come.

    Most steps only ask about a few tokens that may lead on. If none of them fits, a step computes a mask, which takes
    far more time; `words` keeps what the mask showed for the next time.
    """

    def __init__(
        self,
        tokens: ClosingTokens,
        marks: Sequence[tuple[int, ...]],
        words: _Words,
        matcher: Matcher,
        place: _Place,
        most: int,
    ) -> None:
        self._tokens, self._marks, self._words, self.most = tokens, marks, words, most
        self._start, self._probe, self._place = matcher.fork(), matcher.fork(), place.copy()
        self._way: list[int] = []
        self.is_over = False
        self.found: _Way | None = None

    def run(self, credit: int) -> int:
        """Go on until the search is over or the credit is used up; returns the credit used."""
        spent = 0
        while not self.is_over and spent < credit:
            spent += self._step()
        return spent

    def _step(self) -> int:
        """Take the next tokens of the way; returns the cost."""
        chosen, cost = self._choose_quickly(), 1
        if not chosen:
            chosen, cost = self._choose_by_mask(), 1 + self._tokens.mask_cost
        self.is_over = not chosen or len(self._way) >= min(_LONGER * self.most, MAX_WAY_TOKENS)
        if self.is_over:
            return cost
        self._way += chosen
        if self._tokens.ends(chosen, self._probe):
            self.found = _Way(self._way, self._tokens.shorten(self._way, self._start), self._tokens.tokens)
            self.is_over = True
            return cost + len(self._way) // _SHORTEN_TOKENS
        self._probe.replay(chosen)
        for token_id in chosen:
            self._place.read(self._tokens.tokens[token_id])
        return cost

    def _fits(self, token_id: int) -> bool:
        return self._probe.count_allowed((token_id,)) == 1

    def _choose_quickly(self) -> tuple[int, ...]:
        """Return the tokens that a mask would show, if a few tokens tell; else none."""
        tokens, in_text = self._tokens, self._place.in_text
        if self._marks and not in_text:
            if any(map(self._fits, tokens.letters)):
                return ()
            if mark := self._find_closing_mark():
                return mark
        first = next(filter(self._fits, tokens.in_text if in_text else tokens.structure), None)
        if first is None:
            first = self._words.get(tuple(self._way[-2:]))
            return () if first is None or not self._fits(first) else (first,)
        if tokens.tokens[first].isdigit():
            first = next((digit for digit in tokens.structure if tokens.ends((digit,), self._probe)), first)
        return (first,)

    def _choose_by_mask(self) -> tuple[int, ...]:
        """Return the token or the mark that probably leads to the end soonest, by the mask of allowed tokens."""
        mask: Mask = np.zeros(self._tokens.mask_words, np.uint32)
        if not self._probe.write_mask(mask):
            return ()
        count = _count(mask)
        return self._find_last(mask, count) or self._find_mark(count) or self._choose(mask, count)

    def _find_last(self, mask: Mask, count: int) -> tuple[int, ...]:
        """Return a token after which the answer may end, if only a few tokens are allowed."""
        allowed = _list_allowed(mask) if 1 < count <= _FEW else []
        return next(((token_id,) for token_id in allowed if self._tokens.ends([token_id], self._probe)), ())

    def _find_mark(self, count: int) -> tuple[int, ...]:
        """Return the tokens of a mark that closes an open part, or leads out of a text with all kinds of signs."""
        if self._place.in_text or count == 1:
            return ()
        if count * _WIDE < len(self._tokens.tokens):
            return self._find_closing_mark()
        for mark in self._marks:
            if self._probe.count_allowed(mark) == len(mark):
                probe = self._probe.fork()
                probe.replay(mark)
                if not any(probe.count_allowed((letter,)) for letter in self._tokens.letters):
                    return mark
        return ()

    def _find_closing_mark(self) -> tuple[int, ...]:
        fitting = (mark for mark in self._marks if self._probe.count_allowed(mark) == len(mark))
        return next((mark for mark in fitting if self._tokens.tokens[mark[-1]].endswith(_CLOSING_SIGNS)), ())

    def _choose(self, mask: Mask, count: int) -> tuple[int, ...]:
        """Return the allowed token that probably leads to the end soonest, by its text."""
        tokens = self._tokens
        for token_id in tokens.in_text if self._place.in_text else tokens.structure:
            if _has(mask, token_id):
                return (token_id,)
        if count > _FEW:
            for token_id in tokens.filling:
                if _has(mask, token_id):
                    return (token_id,)
        allowed = _list_allowed(mask)
        sign = -1 if count <= _FEW else 1  # the longest of a spelt-out text, else the shortest
        best = sorted(allowed, key=lambda token_id: (sign * len(tokens.tokens[token_id]), token_id))[:1]
        if best and count <= _FEW and len(tokens.tokens[best[0]]) > 1:  # a single sign may repeat for ever
            self._words[tuple(self._way[-2:])] = best[0]
        return tuple(best)


class _Place:
    """The place in an answer's JSON: inside a string (`in_text`) or not."""

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
