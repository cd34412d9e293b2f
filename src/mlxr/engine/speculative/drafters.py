"""Drafters of one answer: from its own text, from a text that its caller expects, or from a draft model or a head.

`Lookup` drafts what followed earlier, when the last tokens of prompt and answer occurred before. It counts how often
that was right, whether its drafts are computed or not, as only answers that copy or repeat a text go on so.
`Prediction` compares the answer with a text that the caller expects, such as the file before the change that was asked
for; after a difference it goes on at the next place in the text that has the answer's last tokens before it.

`ModelDrafter` and `HeadDrafter` know no model: `DraftModel` computes for all answers at once and leaves its results
here. A head reads pairs, the model's state of a position and the token after it, and `StateTail` keeps the last states
for it. `Rates` are running means of how often guesses are right, by how sure the guesser was.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.cache.prefix import PageKeys
from mlxr.engine.runner import Floats

_KEY_BITS = 32  # of the second of two tokens that name a place
_LOOKED_AT = 8  # earlier places with the same two last tokens, the latest first
_LONGEST = 16  # tokens that are compared to find the place that matches best; then longer matches count as one
_MOST_TOKENS = 16_384  # of the text so far that are looked at, the last ones: a pair takes some 100 bytes
_CLASSES = (2, 3, 4, 6, 8, 12, 16)  # lengths of matches from which on the drafts are more often right
_FIRST_GUESSES = (0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9)  # how often, before anything is counted
_WEIGHT = 0.1  # of the newest comparison
_CLASS_OF = [max(0, sum(length >= least for least in _CLASSES) - 1) for length in range(_LONGEST + 1)]


class Lookup:
    """The places of all pairs of tokens in the end of one text, and the place where it likely goes on."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens[-_MOST_TOKENS:])
        self._latest: dict[int, int] = {}  # of two tokens, the place after them
        self._before: list[int] = [-1, -1]  # for each such place, the one before it with the same two tokens
        self._source = -1  # the place whose token is the guess for the next one; below 0: none
        self._length = 0  # how many tokens before that place equal those at the end
        self._rates = list(_FIRST_GUESSES)
        self._note_all()
        self._search()

    def add(self, token_id: int) -> None:
        """Add one more token of the text, and compare it with the guess."""
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
        """Return True if the last tokens occurred before."""
        return self._source >= 0

    def propose(self, most: int) -> list[int]:
        """Return what followed the best match; a match that reaches the end of the text goes on with itself."""
        if self._source < 0:
            return []
        proposed = self._tokens[self._source : self._source + most]
        period = len(self._tokens) - self._source
        while len(proposed) < most:
            proposed.append(proposed[-period])
        return proposed

    def estimate(self, tokens: int) -> list[float]:
        """Return for each guess how often guesses after matches of such lengths were right lately."""
        lengths = range(self._length, self._length + tokens)
        return [self._rates[_CLASS_OF[min(length, _LONGEST)]] for length in lengths]

    def release(self, *, has_ended: bool) -> None:
        """Do nothing: nothing is held that others could use."""

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
        """Return how many tokens before `place` equal those at the end; two at least."""
        tokens, end, length = self._tokens, len(self._tokens), 2
        while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


_BOUNDS = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # of the probability that the draft model gives its token
_FIRST_RATE_GUESSES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # before anything is counted
_FIRST_VALUES = (*_FIRST_RATE_GUESSES, 0.7, 0.7)
_FIRST_COUNT, _COMMON_COUNT = 5, 10  # weights of those, and of the counts of all answers, in comparisons
_RESTED_COUNT = 3  # weight of all earlier comparisons after a rest
_RATE_WEIGHT, _COMMON_WEIGHT = 0.05, 0.02  # of the newest comparison, once there were many
_FIRST, _LATER = len(_FIRST_RATE_GUESSES), len(_FIRST_RATE_GUESSES) + 1
KEPT_ROWS = 256  # states that are kept of an answer, and handed over after a step


class Drafter(Protocol):
    """Follows one answer and guesses how it goes on. Guesses may be wrong anywhere; that costs time alone."""

    def add(self, token_id: int) -> None:
        """Add one more token of the answer."""
        ...

    def is_due(self) -> bool:
        """Return True if there may be a guess for the next step; called once in each, and answers at once."""
        ...

    def propose(self, most: int) -> list[int]:
        """Return the next tokens, at most `most`, as far as there is a guess; calling it twice gives the same."""
        ...

    def estimate(self, tokens: int) -> list[float]:
        """Return how likely each of the first `tokens` proposed tokens is right, given that those before it are."""
        ...

    def release(self, *, has_ended: bool) -> None:
        """Give back memory that others could use: the answer has ended, or goes on later."""
        ...


# Takes the tokens of an answer so far, a list that grows with it, and whether others may find what is computed of them.
DrafterMaker = Callable[[list[int], bool], Drafter]


class Rates:
    """Running means of how often guesses are right. They begin with those of `common`, and count there, too."""

    def __init__(self, common: Rates | None = None) -> None:
        self._common = common
        self.values: list[float] = [*(_FIRST_VALUES if common is None else common.values)]
        self._counts = [_FIRST_COUNT if common is None else _COMMON_COUNT] * len(self.values)

    @property
    def first(self) -> float:
        """The probability that the first token of a draft is right, however sure the guesser is."""
        return self.values[_FIRST]

    @property
    def later(self) -> float:
        """The probability that another token is right, if those before it are."""
        return self.values[_LATER]

    def estimate(self, probability: float) -> float:
        """Return how likely a token is right to which the draft model gives this probability."""
        return self.values[bisect_right(_BOUNDS, probability)]

    def rest(self) -> None:
        """Give what was counted before less weight, after a long time without comparisons."""
        self._counts = [min(count, _RESTED_COUNT) for count in self._counts]

    def count(self, probability: float, *, is_right: bool, is_first: bool) -> None:
        """Count a token that was compared with the answer's; those before it were right."""
        for number in (bisect_right(_BOUNDS, probability), _FIRST if is_first else _LATER):
            self._counts[number] += 1
            weight = max(_COMMON_WEIGHT if self._common is None else _RATE_WEIGHT, 1 / self._counts[number])
            self.values[number] += weight * (is_right - self.values[number])
        if self._common is not None:
            self._common.count(probability, is_right=is_right, is_first=is_first)


class StateTail:
    """States of the positions from `start` to before `stop` of one answer, one after another."""

    def __init__(self) -> None:
        self._pieces: deque[Floats] = deque()
        self.stop = 0

    @property
    def start(self) -> int:
        """The first position whose state is kept; `stop` if none is."""
        return self.stop - sum(map(len, self._pieces))

    def add(self, start: int, rows: Floats) -> None:
        """Add the states of positions from `start` on. Known ones are left out; after a gap earlier ones are
        dropped."""
        if start > self.stop:
            self._pieces.clear()
            self.stop = start
        fresh = rows[self.stop - start :]
        if not len(fresh):
            return
        self._pieces.append(fresh)
        self.stop += len(fresh)
        while self.stop - self.start - len(self._pieces[0]) >= KEPT_ROWS:
            self._pieces.popleft()

    def read(self, first: int) -> Floats:
        """Return the states of the positions from `first` on, which is not before `start`."""
        rows = np.concatenate(self._pieces)
        return rows[first - self.start :]

    def forget(self, first: int) -> None:
        """Drop pieces that lie before position `first` altogether."""
        while self._pieces and self.start + len(self._pieces[0]) <= first:
            self._pieces.popleft()

    def clear(self) -> None:
        """Drop all states at once."""
        self._pieces.clear()
        self.stop = 0

    def follow(self, leader: StateTail) -> None:
        """Begin with the states of another answer to the same prompt."""
        self._pieces, self.stop = leader._pieces.copy(), leader.stop


class ModelDrafter:
    """Follows the answer in `tokens`, a list that grows. In the end `release_table` gets its table, and `note_end` the
    number of tokens generated."""

    def __init__(
        self,
        tokens: list[int],
        keys: PageKeys | None,
        common: Rates,
        release_table: Callable[[SequenceTable], None],
        note_end: Callable[[int], None],
    ) -> None:
        self.tokens, self.keys = tokens, keys
        self._release_table, self._note_end = release_table, note_end
        self.opened_tokens = self._added_tokens = len(tokens)
        self.end_tokens = sys.maxsize  # at which the answer ends at the latest
        self.lookup, self.rates = Lookup(tokens), Rates(common)
        self.table: SequenceTable | None = None
        self.drafted: list[int] = []
        self.probabilities: list[float] = []  # that the model gave them
        self.written_tokens = 0  # drafted ones whose keys and values lie in the pages, but do not count as written
        self.reach = 1.0  # how likely all of the drafted tokens are right
        self._highest = max(tokens, default=0)
        self._start = self._right_tokens = 0
        self.rests_until = 0  # the step from which on the model may be asked again

    @property
    def inputs(self) -> list[int]:
        """The tokens at the table's places."""
        return self.tokens

    @property
    def open(self) -> SequenceTable:
        """The table, which must be there."""
        assert self.table is not None, "the table of a draft was not opened"
        return self.table

    @property
    def is_ready(self) -> bool:
        """True if all is known that the guesses rest on."""
        return True

    @property
    def takes_lookup(self) -> bool:
        """True if the text itself is now at least as good a source of guesses as the model."""
        return bool(self.lookup.propose(1)) and self.lookup.estimate(1)[0] >= self.rates.first

    @property
    def was_right(self) -> bool:
        """True if the last draft of the model began with the right token."""
        return self._right_tokens > 0

    def is_foreign(self, vocab_size: int) -> bool:
        """Return True if the answer has a token outside a vocabulary of this size."""
        return self._highest >= vocab_size

    def follow(self, cache: KVCache) -> None:
        """Open the table, or bring it up to date: right drafted tokens that are in the pages count as written."""
        if self.table is None:
            limit = len(self.tokens) - 1
            if self.keys is None:
                self.table = cache.open_private_table()
            else:
                self.table = cache.open_table(self.tokens, self.keys, limit_tokens=limit)
        elif right := self.settle():
            before_last = len(self.tokens) - 1 - self.table.length_tokens  # the last one gives the first guess
            cache.commit(self.table, self.tokens, min(right, before_last))

    def begin(self) -> None:
        """Begin a new draft after the tokens so far, of which all are in the table."""
        self.drafted, self.probabilities, self.reach = [], [], 1.0
        self._start, self._right_tokens, self.written_tokens = len(self.tokens), 0, 0

    def take(self, token_id: int, probability: float) -> None:
        """Add the model's likeliest next token to the draft."""
        self.drafted.append(token_id)
        self.probabilities.append(probability)
        self.reach *= self.rates.estimate(probability)

    def settle(self) -> int:
        """End the last draft; return how many of its tokens are in the pages and were right, to count as written."""
        right = self.settled_tokens
        self._right_tokens = self.written_tokens = 0
        return right

    @property
    def settled_tokens(self) -> int:
        """Tokens of the last draft that are in the pages and were right, and do not count as written yet."""
        return min(self._right_tokens, self.written_tokens)

    def is_due(self) -> bool:
        """Return True if the text itself offers a guess; the planner decides whether to ask the model."""
        return self.lookup.is_due()

    def add(self, token_id: int) -> None:
        """Take in one more token of the answer, which is in the list already, and compare it with the guess."""
        self.lookup.add(token_id)
        self._added_tokens += 1
        if token_id > self._highest:
            self._highest = token_id
        if (place := self._right_tokens) < len(self.drafted) and place == self._added_tokens - 1 - self._start:
            is_right = self.drafted[place] == token_id
            self.rates.count(self.probabilities[place], is_right=is_right, is_first=place == 0)
            self._right_tokens += is_right
            if is_right:
                self.rests_until = 0

    def is_current(self, place: int = 0) -> bool:
        """Return True if the last draft of the model, after its first `place` tokens, follows the tokens so far."""
        return self._start + place == len(self.tokens) and place <= len(self.drafted) and bool(self.drafted)

    def propose(self, most: int) -> list[int]:
        """Return what the model drafted after the last token, or else what the text itself offers."""
        if self.is_current():
            return self.drafted[:most]
        return self.lookup.propose(most)

    def estimate(self, tokens: int) -> list[float]:
        """Return for each guess how often tokens were right when the model, or the text, was as sure."""
        if self.is_current():
            return [self.rates.estimate(probability) for probability in self.probabilities[:tokens]]
        return self.lookup.estimate(tokens)

    def release(self, *, has_ended: bool) -> None:
        """Give the pages back; full ones stay cached for a while, and are found when drafts go on."""
        if has_ended:
            self._note_end(len(self.tokens) - self.opened_tokens)
        if self.table is not None:
            table, self.table = self.table, None
            self._right_tokens = self.written_tokens = 0
            self._release_table(table)


class HeadDrafter(ModelDrafter):
    """A `ModelDrafter` for a head. `shares`: others may find its pages.

    The engine puts the answer's states into `tail`. Place p of the table belongs to position `base` + p of the answer.
    `state` is the head's own, in place of the model's state before the last drafted token.
    """

    def __init__(
        self,
        tokens: list[int],
        shares: bool,
        common: Rates,
        release_table: Callable[[SequenceTable], None],
        note_end: Callable[[int], None],
    ) -> None:
        super().__init__(tokens, None, common, release_table, note_end)
        self._shares_pages = shares
        self._inputs = tokens[1:]
        self.base = 0
        self.tail = StateTail()
        self.state: Floats | None = None

    @property
    def inputs(self) -> list[int]:
        """The tokens at the table's places: all that follow a state."""
        return self._inputs

    @property
    def is_ready(self) -> bool:
        """True if `tail` reaches up to the last token."""
        return self.tail.stop == len(self.tokens) - 1 and self.tail.start < self.tail.stop

    def add(self, token_id: int) -> None:
        """Take in one more token of the answer, which is in the list already, and compare it with the guess."""
        super().add(token_id)
        self._inputs.append(token_id)

    def follow(self, cache: KVCache) -> None:
        """Open a table that ends where the kept states begin, or later."""
        self.settle()
        table = self.table
        if table is not None and self.tail.start > self.base + table.length_tokens:
            self.release(has_ended=False)
        if self.table is None:
            self.table = self._open(cache)
        self.tail.forget(self.base + self.table.length_tokens)

    def read_states(self) -> Floats:
        """Return the states of the inputs that are not in the table, (T, n)."""
        assert self.table is not None
        return self.tail.read(self.base + self.table.length_tokens)

    @property
    def settled_tokens(self) -> int:
        """Always 0: what was drafted is computed again."""
        return 0

    def _open(self, cache: KVCache) -> SequenceTable:
        """Return a table with what others left of this text, if it reaches the kept states, else one that begins
        there."""
        self.base, self._inputs = 0, self.tokens[1:]
        if self._shares_pages:
            if self.keys is None:
                self.keys = cache.start_keys(str(self.tokens[0]).encode())
            table = cache.open_table(self._inputs, self.keys, limit_tokens=len(self._inputs) - 1)
            if table.length_tokens >= self.tail.start:
                return table
            cache.release(table)
        self.base = self.tail.start
        self._inputs = self.tokens[self.base + 1 :]
        return cache.open_private_table()


_SETTLED = 4  # tokens that are right one after another, after which the place is trusted
_FIRST_RATES = (0.6, 0.9)  # how often guesses are right before that many, and after, until some are counted
_EXPECTED_WEIGHT = 0.1  # of the newest guess
_PLACES_LOOKED_AT = 8  # places with the same two tokens before them
_LONGEST_ANCHOR = 16  # tokens that are compared to choose among them
_MOST_EXPECTED = 16_384  # of the text that are looked at, its first ones: each takes some 100 bytes


class Prediction:
    """The place in the expected `text` where an answer is. `right_tokens` of the answer's tokens were expected."""

    def __init__(self, text: Sequence[int], answer: Sequence[int] = ()) -> None:
        self._text = list(text[:_MOST_EXPECTED])
        self._places: dict[tuple[int, int], list[int]] = {}  # after each two tokens of the text, in rising order
        for place, pair in enumerate(zip(self._text, self._text[1:], strict=False), 2):
            self._places.setdefault(pair, []).append(place)
        self._answer: deque[int] = deque(maxlen=_LONGEST_ANCHOR)
        self._place, self._run = 0, _SETTLED  # its beginning is expected first
        self._base = 0  # where the answer left the text for good
        self._rates = list(_FIRST_RATES)
        self.right_tokens = 0
        for token_id in answer:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Add one more token of the answer, and compare it with the expected one."""
        self._answer.append(token_id)
        if self.has_guess:
            is_right, number = self._text[self._place] == token_id, self._run >= _SETTLED
            self._rates[number] += _EXPECTED_WEIGHT * (is_right - self._rates[number])
            if is_right:
                self._place, self._run, self.right_tokens = self._place + 1, self._run + 1, self.right_tokens + 1
                return
        if self._run >= _SETTLED:
            self._base = self._place
        self._place, self._run = self._find(), 0

    @property
    def has_guess(self) -> bool:
        """True if a next token is expected."""
        return 0 <= self._place < len(self._text)

    @property
    def rate(self) -> float:
        """The share of such guesses that were right lately."""
        return self._rates[self._run >= _SETTLED]

    def propose(self, most: int) -> list[int]:
        """Return the next tokens of the text, at most `most`."""
        return self._text[self._place : self._place + most] if self.has_guess else []

    def _find(self) -> int:
        """Return the place with most of the answer's last tokens before it, the nearest one further on; -1 for none."""
        answer = list(self._answer)
        places = self._places.get((answer[-2], answer[-1]), []) if len(answer) > 1 else []
        start = bisect_left(places, self._base + 2)
        near = places[start : start + _PLACES_LOOKED_AT] or places[-_PLACES_LOOKED_AT:]
        return max(near, key=lambda place: self._match(place, answer), default=-1)

    def _match(self, place: int, answer: Sequence[int]) -> int:
        """Return how many tokens before a place equal the last ones of the answer; two at least."""
        length, most = 2, min(place, len(answer))
        while length < most and self._text[place - 1 - length] == answer[-1 - length]:
            length += 1
        return length


class PredictedLookup(Lookup):
    """Guesses what is expected, or what the text itself offers if that is right more often."""

    def __init__(self, tokens: Sequence[int], prediction: Prediction) -> None:
        super().__init__(tokens)
        self._prediction = prediction

    def add(self, token_id: int) -> None:
        """Add one more token of the text."""
        self._prediction.add(token_id)
        super().add(token_id)

    def is_due(self) -> bool:
        """Return True if a token is expected, or the last tokens occurred before."""
        return self._prediction.has_guess or super().is_due()

    def propose(self, most: int) -> list[int]:
        """Return the tokens of the better source."""
        return self._prediction.propose(most) if self._leads else super().propose(most)

    def estimate(self, tokens: int) -> list[float]:
        """Return for each guess how often guesses of that source were right lately."""
        return [self._prediction.rate] * tokens if self._leads else super().estimate(tokens)

    @property
    def _leads(self) -> bool:
        if not self._prediction.has_guess:
            return False
        return not super().is_due() or self._prediction.rate >= super().estimate(1)[0]


def expect(drafter: Drafter, tokens: Sequence[int], prediction: Prediction) -> Drafter:
    """Return a drafter for the answer with these `tokens` that guesses what is expected as well."""
    if isinstance(drafter, ModelDrafter):
        drafter.lookup = PredictedLookup(tokens, prediction)
        return drafter
    return PredictedLookup(tokens, prediction) if isinstance(drafter, Lookup) else drafter
