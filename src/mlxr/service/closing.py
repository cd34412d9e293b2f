"""The ends of answers that reach their last token under a grammar: what would be cut is closed instead.

An answer grows freely. Where it has not ended by itself when its tokens are used up, the newest ones are taken back,
about as few as leave room for a way to the end, which comes in their place. So nobody may be shown a token before it is
known that some place behind it has such a way. A way is looked for with forks of the grammar's state: closing signs
first, then the shortest values; marks that the grammar names lead out of a text that may have any sign. As long as
there is much room this is done rarely, and nothing is held back. An answer gains credit for searches with each token:
what takes more than it has goes on with the tokens that follow, which wait meanwhile. All this depends on the answer's
tokens and on how many may still come, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

from mlxr.engine.request import Mask
from mlxr.service.grammar_library import GrammarVocabulary, Matcher

MAX_WAY_TOKENS = 600
_SPARE_TOKENS = 4  # a token that is cut in the middle of a character takes some more
_LOOK_TOKENS = 256  # left, when the first look is due
_GROWTH = 4  # tokens that a way may get longer with each token, besides what the largest thing takes that can be opened
_PATIENCE = 8  # where no way is found, that part of what is left goes by before the next look
_LONGER = 2  # times as many tokens a way may have before it is written with longer ones
_CREDIT, _MOST_CREDIT = 6, 128  # for searches, with each token and at once; one is what asking after few tokens takes
_MASK_TOKENS = 8000  # of the vocabulary: so much of a mask takes as much time as that
_SHORTEN_TOKENS, _TRIES = 8, 16  # of a way that are written with longer ones for one; its ends that are tried for one
_NEAR = 8  # ends of a known way that are tried each time, about where it is left with one token more
_WIDE = 8  # of so many tokens one is allowed where there is a text; behind its mark so much fewer are
_FEW = 16  # tokens: what is so narrow is spelt out, as a name is or a word of an enum
_STRUCTURE = ("}", "]", ",", ":", *"0123456789", '"', "null", "true", "false", "-", "[", "{")
_IN_TEXT = ('"',)
_LETTERS = ("a", "A")  # in texts that may have any sign
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
        self.structure, self.in_text, self.filling, self.letters = (
            [ids[text.encode()] for text in texts if text.encode() in ids]
            for texts in (_STRUCTURE, _IN_TEXT, _FILLING, _LETTERS)
        )
        self.mask_words, self.mask_cost = -(-len(tokens) // 32), 1 + len(tokens) // _MASK_TOKENS

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
        if not way:  # of an end alone the library says that it cannot come
            mask: Mask = np.zeros(self.mask_words, np.uint32)
            return matcher.write_mask(mask) and any(_has(mask, token_id) for token_id in self.eos_ids)
        return any(matcher.count_allowed([*way, token_id]) > len(way) for token_id in self.eos_ids)


class Closer:
    """The end of one answer. `heaviest_tokens` is what the largest thing that may be opened takes, about.

    `marks` are tokens that may lead out of a text, those that are tried first at the front.

    `_way` was found last. If it `_is_certain`, the newest `_held` tokens may be taken back for it. Else those are held
    that came since the `_search` began that is under way, and without one nothing is: either because there is room to
    spare or because no way is known.
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
        """The answer goes on with this token."""
        self._place.read(self._tokens.tokens[token_id])
        self._held += 1

    def fork(self) -> Closer:
        """One more of the same state, but for a search that is under way."""
        other = Closer(self._tokens, self._reserve - _SPARE_TOKENS, self._marks)
        other._look_at, other._search_at, other._place = self._look_at, self._search_at, self._place.copy()
        other._credit, other._words = self._credit, dict(self._words)
        other._way, other._known, other._first = self._way, self._known, self._first
        other._is_certain, other._held = self._is_certain, self._held
        return other

    def look(self, matcher: Matcher, tokens_left: int) -> int:
        """How many of the newest tokens may be taken back, when at most `tokens_left` may still come."""
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
            self._search, self._held = None, 0  # what was shown cannot be taken back
        return self._held

    def close(self) -> Sequence[int]:
        """Return the way to the end from before the tokens that are held."""
        return self._way if self._is_certain and self._held else ()

    def _settle(self, way: list[int], most: int, tokens_left: int) -> None:
        """There is a way from the place where `most` tokens could come, of which `tokens_left` are left."""
        spare = most - len(way) - self._reserve
        self._way, self._is_certain, self._held, self._search = way, True, most - tokens_left, None
        self._look_at = self._search_at = max(0, min(most - max(1, spare // _GROWTH), tokens_left))

    def _find_known(self, matcher: Matcher, most: int) -> list[int] | None:
        """A way that needs no search: none is needed, or an end of the way that was found last leads on from here."""
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
        """Search for a way as far as the credit goes, from here unless a search is under way."""
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
    """A way to the end as it was found, token by token, and the same `text` with the fewest tokens."""

    def __init__(self, found: list[int], shortest: list[int], texts: Sequence[bytes]) -> None:
        self._found, self._shortest = found, shortest
        places = {place: index for index, place in enumerate(_add_lengths(shortest, texts))}
        meet = len(found), len(shortest)
        self._meet: list[tuple[int, int]] = []  # where both have the same rest, for each token of the first
        for index, place in reversed(list(enumerate(_add_lengths(found, texts)[:-1]))):
            meet = (index, index) if found == shortest else (index, places[place]) if place in places else meet
            self._meet.append(meet)
        self._meet.reverse()

    def __len__(self) -> int:
        """Return the number of its ends: one begins at each token that was found."""
        return len(self._meet)

    def count(self, start: int) -> int:
        """Return how many tokens the end from `start` on has."""
        index, shorter = self._meet[start]
        return index - start + len(self._shortest) - shorter

    def read(self, start: int) -> list[int]:
        """Return the tokens of that end."""
        index, shorter = self._meet[start]
        return self._found[start:index] + self._shortest[shorter:]


def _add_lengths(token_ids: Sequence[int], texts: Sequence[bytes]) -> list[int]:
    """Return where in the bytes each token begins, and the end."""
    return [0, *accumulate(len(texts[token_id]) for token_id in token_ids)]


_Words = dict[tuple[int, ...], int]  # tokens of names and values that a grammar spells out, by those before them


class _Search:
    """A way to the end from one place of an answer, where at most `most` tokens may still come; found step by step.

    Most steps ask after the few tokens that may lead on. A mask, which takes far more time, is computed where none of
    them fits; `words` keep what it showed, for the next time.
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
        """Go on until the search is over or the credit is used up; returns how much of it was."""
        spent = 0
        while not self.is_over and spent < credit:
            spent += self._step()
        return spent

    def _step(self) -> int:
        """Take the next tokens of the way; returns what that cost."""
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
        """The same that a mask would show, where that can be told from few tokens; else none."""
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
        """The token, or the mark, that leads to the end soonest, as far as can be told from what is allowed."""
        mask: Mask = np.zeros(self._tokens.mask_words, np.uint32)
        if not self._probe.write_mask(mask):
            return ()
        count = _count(mask)
        return self._find_last(mask, count) or self._find_mark(count) or self._choose(mask, count)

    def _find_last(self, mask: Mask, count: int) -> tuple[int, ...]:
        """Of few tokens the one after which the answer may end."""
        allowed = _list_allowed(mask) if 1 < count <= _FEW else []
        return next(((token_id,) for token_id in allowed if self._tokens.ends([token_id], self._probe)), ())

    def _find_mark(self, count: int) -> tuple[int, ...]:
        """The tokens of a mark that closes what is open, or leads out of a text with all kinds of signs."""
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
        """The token that leads to the end soonest, as far as can be told from what it is."""
        tokens = self._tokens
        for token_id in tokens.in_text if self._place.in_text else tokens.structure:
            if _has(mask, token_id):
                return (token_id,)
        if count > _FEW:
            for token_id in tokens.filling:
                if _has(mask, token_id):
                    return (token_id,)
        allowed = _list_allowed(mask)
        sign = -1 if count <= _FEW else 1  # what is not spelt out may go on with anything, so that the shortest does
        best = sorted(allowed, key=lambda token_id: (sign * len(tokens.tokens[token_id]), token_id))[:1]
        if best and count <= _FEW and len(tokens.tokens[best[0]]) > 1:  # single signs may go on for ever
            self._words[tuple(self._way[-2:])] = best[0]
        return tuple(best)


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
