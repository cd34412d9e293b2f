"""Drafts from the text itself: what followed when the last tokens of prompt and answer were there before.

Answers that copy or change a text, or repeat themselves, go on as they went on before; others hardly ever do. So the
drafter takes count of how often it was right, and it does so whether its drafts are computed or not: it compares every
token of the answer with the one that it would have drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEY_BITS = 32  # of the second of two tokens that name a place
_LOOKED_AT = 8  # earlier places with the same two last tokens, the latest first
_LONGEST = 16  # tokens that are compared to find the place that matches best; then longer matches count as one
_MOST_TOKENS = 16_384  # of the text so far that are looked at, the last ones: a pair takes some 100 bytes
_CLASSES = (2, 3, 4, 6, 8, 12, 16)  # lengths of matches from which on the drafts are more often right
_FIRST_GUESSES = (0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9)  # how often, before anything is counted
_WEIGHT = 0.1  # of the newest comparison
_CLASS_OF = [max(0, sum(length >= least for least in _CLASSES) - 1) for length in range(_LONGEST + 1)]


class Lookup:
    """The places of all pairs of tokens in the end of one text, and where the text is likely to go on from."""

    __slots__ = ("_before", "_latest", "_length", "_rates", "_source", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens[-_MOST_TOKENS:])
        self._latest: dict[int, int] = {}  # of two tokens, the place after them
        self._before: list[int] = [-1, -1]  # for each such place, the one before it with the same two tokens
        self._source = -1  # the place whose token is the guess for the next one; below 0: none
        self._length = 0  # how many tokens before that place are those at the end
        self._rates = list(_FIRST_GUESSES)
        self._note_all()
        self._search()

    def add(self, token_id: int) -> None:
        """The text has one more token, which is compared with the guess."""
        tokens, source = self._tokens, self._source
        is_right = False
        if source >= 0:
            is_right = tokens[source] == token_id
            number = _CLASS_OF[min(self._length, _LONGEST)]
            self._rates[number] += _WEIGHT * (is_right - self._rates[number])
        tokens.append(token_id)
        end = len(tokens)
        before = -1
        if end > 1:
            key = tokens[end - 2] << _KEY_BITS | token_id
            before = self._latest.get(key, -1)
            self._before.append(before)
            self._latest[key] = end
        if is_right:
            self._source, self._length = source + 1, self._length + 1
        elif before >= 0:
            self._search()
        else:
            self._source, self._length = -1, 0

    def is_due(self) -> bool:
        """Whether the last tokens were there before."""
        return self._source >= 0

    def propose(self, most: int) -> list[int]:
        """Return what followed the best match; one that reaches the end of the text goes on with itself."""
        if self._source < 0:
            return []
        proposed = self._tokens[self._source : self._source + most]
        period = len(self._tokens) - self._source
        while len(proposed) < most:
            proposed.append(proposed[-period])
        return proposed

    def estimate(self, tokens: int) -> list[float]:
        """How often guesses after matches of such lengths were right lately."""
        lengths = range(self._length, self._length + tokens)
        return [self._rates[_CLASS_OF[min(length, _LONGEST)]] for length in lengths]

    def release(self, *, has_ended: bool) -> None:
        """Nothing is held that others could use."""

    def _note_all(self) -> None:
        """Remember the place after each two tokens, as `add` does for one more."""
        latest, before, last = self._latest, self._before, None
        for end, token_id in enumerate(self._tokens, 1):
            if last is not None:
                key = last << _KEY_BITS | token_id
                before.append(latest.get(key, -1))
                latest[key] = end
            last = token_id

    def _search(self) -> None:
        """Find the earlier place with most of the last tokens before it, the latest of several."""
        self._source, self._length = -1, 0
        end = len(self._tokens)
        place = self._before[end] if end > 1 else -1
        for _ in range(_LOOKED_AT):
            if place < 0 or self._length >= _LONGEST:
                return
            length = self._match(place)
            if length > self._length:
                self._source, self._length = place, length
            place = self._before[place]

    def _match(self, place: int) -> int:
        """How many tokens before `place` are those at the end; two at least."""
        tokens, end, length = self._tokens, len(self._tokens), 2
        while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
