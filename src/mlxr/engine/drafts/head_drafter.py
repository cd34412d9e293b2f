"""The guesses of a head for one answer, and the positions that its cache has of it.

A head reads pairs: the model's state of a position and the token after it. Its table has a place for each pair. Where
the states before some position are gone, as the model found these tokens in its cache, the table begins there, unless
the pages of an earlier answer that began alike reach as far. What it drafted rests on its own states; those places are
computed again from the model's, once the model has been there.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.engine.drafts.model_drafter import ModelDrafter
from mlxr.engine.drafts.rates import Rates
from mlxr.engine.drafts.tail import StateTail
from mlxr.engine.runner import Floats


class HeadDrafter(ModelDrafter):
    """As a `ModelDrafter`, of a head. `shares`: others may find its pages.

    The engine puts the answer's states into `tail`. Place p of the table belongs to position `base` + p of the answer.
    `state` is what stands for the state before the last drafted token.
    """

    __slots__ = ("_inputs", "_shares", "base", "state", "tail")

    def __init__(
        self,
        tokens: list[int],
        shares: bool,
        common: Rates,
        release_table: Callable[[SequenceTable], None],
        note_end: Callable[[int], None],
    ) -> None:
        super().__init__(tokens, None, common, release_table, note_end)
        self._shares = shares
        self._inputs = tokens[1:]
        self.base = 0
        self.tail = StateTail()
        self.state: Floats | None = None

    @property
    def inputs(self) -> list[int]:
        """The tokens of the table's places: all that follow a state."""
        return self._inputs

    @property
    def is_ready(self) -> bool:
        """Whether the states of all tokens but the last are known."""
        return self.tail.stop == len(self.tokens) - 1 and self.tail.start < self.tail.stop

    def add(self, token_id: int) -> None:
        """The answer has one more token, which is compared with the guess; it is in the list already."""
        super().add(token_id)
        self._inputs.append(token_id)

    def follow(self, cache: KVCache) -> None:
        """Have a table that ends where the kept states begin, or later."""
        self.settle()
        table = self.table
        if table is not None and self.tail.start > self.base + table.length_tokens:
            self.release(has_ended=False)
        if self.table is None:
            self.table = self._open(cache)
        self.tail.forget(self.base + self.table.length_tokens)

    def read_states(self) -> Floats:
        """The states that belong to the inputs which are not in the table, (T, n)."""
        assert self.table is not None
        return self.tail.read(self.base + self.table.length_tokens)

    @property
    def settled_tokens(self) -> int:
        """None: what was drafted is computed again."""
        return 0

    def _open(self, cache: KVCache) -> SequenceTable:
        """A table with what others left of this text, if that reaches the kept states, else one that begins there."""
        self.base, self._inputs = 0, self.tokens[1:]
        if self._shares:
            if self.keys is None:
                self.keys = cache.start_keys(str(self.tokens[0]).encode())
            table = cache.open_table(self._inputs, self.keys, limit_tokens=len(self._inputs) - 1)
            if table.length_tokens >= self.tail.start:
                return table
            cache.release(table)
        self.base = self.tail.start
        self._inputs = self.tokens[self.base + 1 :]
        return cache.open_private_table()
