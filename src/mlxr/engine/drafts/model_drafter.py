"""Keeps the guesses of a draft model for one answer, and the books of its cache about it.

Knows no model: `DraftModel` computes for all answers at once, and leaves here what it found. Where the answer repeats
an earlier text, the guesses come from there instead, which takes no time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.cache.prefix import PageKeys
from mlxr.engine.drafts.lookup import Lookup
from mlxr.engine.drafts.rates import Rates


class ModelDrafter:
    """Follows the answer in `tokens`, a list that grows. `release_table` takes its table, `note_end` its length."""

    __slots__ = (
        "_added_tokens",
        "_highest",
        "_note_end",
        "_release_table",
        "_right_tokens",
        "_start",
        "drafted",
        "end_tokens",
        "keys",
        "lookup",
        "opened_tokens",
        "probabilities",
        "rates",
        "reach",
        "rests_until",
        "table",
        "tokens",
        "written_tokens",
    )

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
        self.end_tokens = sys.maxsize  # with which the answer ends at the latest
        self.lookup, self.rates = Lookup(tokens), Rates(common)
        self.table: SequenceTable | None = None
        self.drafted: list[int] = []
        self.probabilities: list[float] = []  # that the model gave them
        self.written_tokens = 0  # of the drafted ones, whose keys and values lie in the pages behind what counts
        self.reach = 1.0  # how likely all of the drafted tokens are right
        self._highest = max(tokens, default=0)
        self._start = self._right_tokens = 0
        self.rests_until = 0  # the step from which on the model is to be looked at

    @property
    def inputs(self) -> list[int]:
        """The tokens of the table's places."""
        return self.tokens

    @property
    def open(self) -> SequenceTable:
        """The table, which must be there."""
        assert self.table is not None, "the table of a draft was not opened"
        return self.table

    @property
    def is_ready(self) -> bool:
        """Whether all is known that the guesses rest on."""
        return True

    @property
    def takes_lookup(self) -> bool:
        """Whether the text itself is at least as good a source of guesses now as the model."""
        return bool(self.lookup.propose(1)) and self.lookup.estimate(1)[0] >= self.rates.first

    @property
    def was_right(self) -> bool:
        """Whether the last draft of the model began with the right token."""
        return self._right_tokens > 0

    def is_foreign(self, vocab_size: int) -> bool:
        """Whether the answer has a token that a model with so many does not know."""
        return self._highest >= vocab_size

    def follow(self, cache: KVCache) -> None:
        """Have a table, whose books are up to date: what was drafted right and is in the pages counts as written."""
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
        """A new draft follows the tokens so far, of which all are in the table."""
        self.drafted, self.probabilities, self.reach = [], [], 1.0
        self._start, self._right_tokens, self.written_tokens = len(self.tokens), 0, 0

    def take(self, token_id: int, probability: float) -> None:
        """The model's likeliest next token."""
        self.drafted.append(token_id)
        self.probabilities.append(probability)
        self.reach *= self.rates.estimate(probability)

    def settle(self) -> int:
        """End the last draft; how many of its tokens are in the pages and were right, so that they count as written."""
        right = self.settled_tokens
        self._right_tokens = self.written_tokens = 0
        return right

    @property
    def settled_tokens(self) -> int:
        """How many tokens of the last draft are in the pages, were right, and do not count as written yet."""
        return min(self._right_tokens, self.written_tokens)

    def is_due(self) -> bool:
        """Whether the text itself offers a guess; whether the model is looked at, the planner knows."""
        return self.lookup.is_due()

    def add(self, token_id: int) -> None:
        """The answer has one more token, which is compared with the guess; it is in the list already."""
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
        """Whether the last draft of the model, but for `place` tokens that were right, follows the tokens so far."""
        return self._start + place == len(self.tokens) and place <= len(self.drafted) and bool(self.drafted)

    def propose(self, most: int) -> list[int]:
        """Return what the model drafted after the last token, or else what the text itself offers."""
        if self.is_current():
            return self.drafted[:most]
        return self.lookup.propose(most)

    def estimate(self, tokens: int) -> list[float]:
        """How often tokens were right of which the model, or the text, was as sure."""
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
