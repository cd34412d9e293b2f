"""Drafts from what the caller expects of an answer, such as the file before the change that was asked for.

The answer is compared with that text token by token, from both their beginnings. Where they part, the next place is
sought, further on in the text, that has the answer's last tokens before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from mlxr.engine.speculative.drafters import Drafter, ModelDrafter
from mlxr.engine.speculative.ngram import Lookup

_SETTLED = 4  # tokens that are right one after another, from which on the place is believed
_FIRST_RATES = (0.6, 0.9)  # how often guesses are right before that many, and after, until some are counted
_WEIGHT = 0.1  # of the newest guess
_LOOKED_AT = 8  # places with the same two tokens before them
_LONGEST = 16  # tokens that are compared to choose among them
_MOST_TOKENS = 16_384  # of the text that are looked at, its first ones: each takes some 100 bytes


class Prediction:
    """The place in the expected `text` where an answer is. Of the answer's tokens, `right_tokens` were expected."""

    __slots__ = ("_answer", "_base", "_place", "_places", "_rates", "_run", "_text", "right_tokens")

    def __init__(self, text: Sequence[int], answer: Sequence[int] = ()) -> None:
        self._text = list(text[:_MOST_TOKENS])
        self._places: dict[tuple[int, int], list[int]] = {}  # after each two tokens of the text, in rising order
        for place, pair in enumerate(zip(self._text, self._text[1:], strict=False), 2):
            self._places.setdefault(pair, []).append(place)
        self._answer: deque[int] = deque(maxlen=_LONGEST)
        self._place, self._run = 0, _SETTLED  # its beginning is expected first
        self._base = 0  # where the answer left the text for good
        self._rates = list(_FIRST_RATES)
        self.right_tokens = 0
        for token_id in answer:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The answer has one more token, which is compared with the expected one."""
        self._answer.append(token_id)
        if self.has_guess:
            is_right, number = self._text[self._place] == token_id, self._run >= _SETTLED
            self._rates[number] += _WEIGHT * (is_right - self._rates[number])
            if is_right:
                self._place, self._run, self.right_tokens = self._place + 1, self._run + 1, self.right_tokens + 1
                return
        if self._run >= _SETTLED:
            self._base = self._place
        self._place, self._run = self._find(), 0

    @property
    def has_guess(self) -> bool:
        """Whether a next token is expected."""
        return 0 <= self._place < len(self._text)

    @property
    def rate(self) -> float:
        """How often such guesses were right lately."""
        return self._rates[self._run >= _SETTLED]

    def propose(self, most: int) -> list[int]:
        """Return the next tokens of the text, at most `most`."""
        return self._text[self._place : self._place + most] if self.has_guess else []

    def _find(self) -> int:
        """The place that has most of the answer's last tokens before it, the nearest one further on; -1 for none."""
        answer = list(self._answer)
        places = self._places.get((answer[-2], answer[-1]), []) if len(answer) > 1 else []
        start = bisect_left(places, self._base + 2)
        near = places[start : start + _LOOKED_AT] or places[-_LOOKED_AT:]
        return max(near, key=lambda place: self._match(place, answer), default=-1)

    def _match(self, place: int, answer: Sequence[int]) -> int:
        """How many tokens before a place are the last ones of the answer."""
        length, most = 2, min(place, len(answer))
        while length < most and self._text[place - 1 - length] == answer[-1 - length]:
            length += 1
        return length


class PredictedLookup(Lookup):
    """Guesses what is expected, or what the text itself offers where that is right more often."""

    __slots__ = ("_prediction",)

    def __init__(self, tokens: Sequence[int], prediction: Prediction) -> None:
        super().__init__(tokens)
        self._prediction = prediction

    def add(self, token_id: int) -> None:
        """The text has one more token."""
        self._prediction.add(token_id)
        super().add(token_id)

    def is_due(self) -> bool:
        """Whether anything is expected, or was there before."""
        return self._prediction.has_guess or super().is_due()

    def propose(self, most: int) -> list[int]:
        """Return the tokens of the better source."""
        return self._prediction.propose(most) if self._leads else super().propose(most)

    def estimate(self, tokens: int) -> list[float]:
        """How often guesses of that source were right lately."""
        return [self._prediction.rate] * tokens if self._leads else super().estimate(tokens)

    @property
    def _leads(self) -> bool:
        if not self._prediction.has_guess:
            return False
        return not super().is_due() or self._prediction.rate >= super().estimate(1)[0]


def expect(drafter: Drafter, tokens: Sequence[int], prediction: Prediction) -> Drafter:
    """The drafter of an answer, which from now on guesses what is expected as well. It has the `tokens` so far."""
    if isinstance(drafter, ModelDrafter):
        drafter.lookup = PredictedLookup(tokens, prediction)
        return drafter
    return PredictedLookup(tokens, prediction) if isinstance(drafter, Lookup) else drafter
