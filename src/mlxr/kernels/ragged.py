"""The ragged batch: tokens of several sequences one after another, for one forward pass.

Prefill chunks and single decode tokens share one batch. It has only integers, and knows no model and no cache arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, fields
from itertools import accumulate

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.checks import check_ints, check_size, refuse
from mlxr.kernels.tensor import FloatArray, IntArray

_NAME = "RaggedBatch"
NO_STATE = -1
NO_STATES: IntArray = np.empty(0, dtype=np.int32)
NO_AXES: IntArray = np.empty((3, 0), dtype=np.int32)
MAX_RUN = 16  # most neighbouring tokens of one text that are computed as sequences of one token (`split_rows`)


@frozen(eq=False)
class RowsOver:
    """Rows of encoded pictures, which take the place of embeddings of tokens.

    `values` are (rows, hidden * (1 + extra)): each row has the input of the first layer, then what is added to the
    output of each of the first `extra` layers.
    """

    places: IntArray  # (rows,): tokens of the batch, ascending
    values: FloatArray


@frozen(eq=False)
class RaggedBatch:
    """T tokens of S sequences; all arrays int32 and C-contiguous.

    The tokens of a sequence are the last ones of its context: positions end at context_length - 1.

    Layers whose caches differ form groups, each with its own slots and page table. A batch has those of the first
    group; `others` are the same batch with those of the other groups (`of_group`).

    Recurrent layers keep one state for each sequence, in slots of their pools. For a model without any pages, slots are
    -1 and the page table has no columns.
    """

    token_ids: IntArray  # (T,)
    positions: IntArray  # (T,): of each token in its sequence
    slots: IntArray  # (T,): page_id * page_size + offset where the token's K and V go
    query_starts: IntArray  # (S + 1,): tokens of sequence s are [query_starts[s], query_starts[s+1])
    context_lengths: IntArray  # (S,): tokens in the cache, including this step's
    page_table: IntArray  # (S, max_pages): page ids in order of position, -1 where there is none
    output_rows: IntArray  # (R,): the tokens whose logits are wanted
    # Slots of states, (S,), empty for a model without recurrent layers. reads: the state before a sequence's first
    # token, NO_STATE for zeros; writes: the state after its last token, in slots that this step does not read; nexts:
    # the slots that the next step may write, if known.
    state_reads: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    state_writes: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    state_nexts: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    longest_context: int = field(init=False)  # tokens of the longest context
    # 1, or MAX_RUN if sequences are single tokens, of which so many may be neighbours in one text (`split_rows`): the
    # same step then writes the keys of the tokens before them
    longest_run: int = field(init=False, default=1)
    others: tuple[RaggedBatch, ...] = field(init=False, default=())
    adapters: tuple[object, ...] = field(init=False, default=())  # of each sequence, or None; empty if none has one
    types: IntArray = field(init=False, default_factory=lambda: NO_STATES)  # of tokens; empty if all are 0
    rows_over: RowsOver | None = field(init=False, default=None)
    # (3, T): coordinates of tokens on the three axes of rotation, in a batch with pictures; empty if the three are the
    # same for each token. `turns` (T,) are the tokens' rows in the rotation tables, which are made for this batch if
    # there are axes; empty if the rows are the positions
    axes: IntArray = field(init=False, default_factory=lambda: NO_AXES)
    turns: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    # (T,): the end of the positions that a token sees in layers with whole pictures: for a picture's token, its last
    # token's; empty if every token sees up to its own
    ends: IntArray = field(init=False, default_factory=lambda: NO_STATES)

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_values()
        object.__setattr__(self, "longest_context", int(self.context_lengths.max()))

    @classmethod
    def of_single_tokens(
        cls, token_ids: list[int], positions: list[int], slots: list[int], page_table: IntArray
    ) -> RaggedBatch:
        """Return a batch of one token of each sequence, with logits of all; unchecked, as it is correct as made.

        That saves time between steps, when the interpreter's code and data have left the processor's caches.
        """
        order = list(range(len(token_ids) + 1))
        lengths = [position + 1 for position in positions]
        rows = np.array((token_ids, positions, slots, lengths, order[:-1]), dtype=np.int32)
        return cls._join(rows[0], rows[1], rows[2], np.array(order, dtype=np.int32), rows[3], page_table, rows[4])

    @classmethod
    def of_few_tokens(
        cls, token_ids: list[int], positions: list[int], slots: list[int], counts: list[int], page_table: IntArray
    ) -> RaggedBatch:
        """Return a batch of `counts[s]` tokens of each sequence s, with logits of all, unchecked."""
        starts = [0, *accumulate(counts)]
        lengths = [positions[stop - 1] + 1 for stop in starts[1:]]
        rows = np.array((token_ids, positions, slots, range(len(token_ids))), dtype=np.int32)
        ends = np.array(lengths, dtype=np.int32)
        return cls._join(rows[0], rows[1], rows[2], np.array(starts, dtype=np.int32), ends, page_table, rows[3])

    @classmethod
    def _join(cls, *values: IntArray) -> RaggedBatch:
        """Return a batch of these arrays, from token ids to output rows, unchecked."""
        batch = cls.__new__(cls)
        states, longest = (NO_STATES, NO_STATES, NO_STATES), max(values[4].tolist())
        for name, value in zip(
            _FIELDS, (*values, *states, longest, 1, (), (), NO_STATES, None, NO_AXES, NO_STATES, NO_STATES), strict=True
        ):
            object.__setattr__(batch, name, value)
        return batch

    def with_groups(self, places: Iterable[tuple[IntArray, IntArray]]) -> RaggedBatch:
        """Return the batch with the slots and page tables of further groups."""
        others = tuple(self._replace(slots=slots, page_table=table) for slots, table in places)
        for other in others:
            check_ints(_NAME, "slots", other.slots)
            check_size(_NAME, "length of slots", other.slots.shape[0], self.tokens)
            check_ints(_NAME, "page_table", other.page_table, 2)
            check_size(_NAME, "rows of page_table", other.page_table.shape[0], self.sequences)
        return self._replace(others=others)

    def with_states(
        self, reads: IntArray, writes: IntArray, nexts: IntArray | None = None, *, spare: int | None = None
    ) -> RaggedBatch:
        """Return the batch with the slots of its sequences' states before it, after it and after the next one.

        Without `nexts`, the slots that the next step writes are unknown. Sequences whose states nobody wants may all
        write slot `spare`. Raises ValueError unless each of the others writes a slot of its own, which no sequence
        reads.
        """
        unknown = np.full(len(writes), NO_STATE, np.int32) if nexts is None else nexts
        batch = self._replace(state_reads=reads, state_writes=writes, state_nexts=unknown)
        batch._check_states(spare)
        return batch

    def with_adapters(self, adapters: tuple[object, ...]) -> RaggedBatch:
        """Return the batch with the adapter (an object of the model) of each sequence; None for one without."""
        check_size(_NAME, "number of adapters", len(adapters), self.sequences)
        return self._replace(adapters=adapters) if any(one is not None for one in adapters) else self

    def with_types(self, types: IntArray) -> RaggedBatch:
        """Return the batch with the types of its tokens, (T,): 1 for tokens of the second of two texts, else 0."""
        check_ints(_NAME, "types", types)
        check_size(_NAME, "length of types", types.shape[0], self.tokens)
        return self._replace(types=types)

    def with_pictures(self, rows: RowsOver | None, axes: IntArray, ends: IntArray = NO_STATES) -> RaggedBatch:
        """Return the batch with rows in place of embeddings, and the tokens' `axes`, (3, T) or (3, 0), and `ends`, (T,)
        or (0,). The ids of tokens with such rows become 0, the padding, for look-ups in other tables."""
        check_ints(_NAME, "axes", axes, 2)
        if axes.shape not in ((3, 0), (3, self.tokens)):
            refuse(_NAME, "axes", f"of shape {axes.shape}", f"(3, {self.tokens}), or (3, 0)")
        if rows is not None and (len(rows.places) != len(rows.values) or rows.places.max() >= self.tokens):
            refuse(_NAME, "rows_over", f"{len(rows.places)} places of {len(rows.values)} rows", "one of each token")
        check_ints(_NAME, "ends", ends)
        if len(ends) not in (0, self.tokens):
            refuse(_NAME, "length of ends", len(ends), f"{self.tokens}, or 0")
        turns = np.arange(axes.shape[1], dtype=np.int32)
        if axes.shape[1] and (axes == axes[0]).all():  # as in texts after pictures: ordinary tables will do
            turns, axes = np.ascontiguousarray(axes[0]), NO_AXES
        others = tuple(other._replace(axes=axes, turns=turns, ends=ends) for other in self.others)
        token_ids = self.token_ids
        if rows is not None:
            token_ids = token_ids.copy()
            token_ids[rows.places] = 0
        return self._replace(token_ids=token_ids, rows_over=rows, axes=axes, turns=turns, ends=ends, others=others)

    @property
    def rope_rows(self) -> IntArray:
        """The row of each token in the rotation tables, (T,)."""
        return self.turns if len(self.turns) else self.positions

    def place_types(self, rows: int) -> IntArray:
        """Return the row of each token in a table with `rows` rows for each type: one per position, or one for all."""
        places = np.zeros_like(self.positions) if rows == 1 else self.positions
        return places + self.types * np.int32(rows) if len(self.types) else places

    def split_rows(self) -> RaggedBatch:
        """Return the same tokens as sequences of one token each, with logits of all; they share their text's pages.

        A token still sees those before it, because every layer writes all keys and values before it reads any. The
        batch must have sequences of at most MAX_RUN tokens, without states and adapters.
        """
        owners = np.repeat(np.arange(self.sequences, dtype=np.int32), np.diff(self.query_starts))
        rows = np.arange(self.tokens + 1, dtype=np.int32)
        places = [group.page_table[owners] for group in self.groups]
        split = self._replace(
            query_starts=rows,
            context_lengths=self.positions + np.int32(1),
            page_table=places[0],
            output_rows=rows[:-1],
            longest_run=MAX_RUN,
            others=(),
        )
        return split.with_groups(zip([group.slots for group in self.others], places[1:], strict=True))

    def with_tokens(self, **values: IntArray) -> RaggedBatch:
        """Return the batch of single tokens with these arrays replaced, and without other groups or states.

        Nothing is checked: the arrays are made of checked ones, and time between steps is precious.
        """
        lengths = values["context_lengths"]
        none: dict[str, object] = {"state_reads": NO_STATES, "state_writes": NO_STATES, "state_nexts": NO_STATES}
        return self._replace(**values, **none, others=(), longest_context=int(lengths.max()))

    @property
    def has_states(self) -> bool:
        """True if the sequences have states."""
        return len(self.state_writes) > 0

    @property
    def groups(self) -> tuple[RaggedBatch, ...]:
        """The batch with the slots and page table of each group, in order."""
        return (self, *self.others)

    def of_group(self, number: int) -> RaggedBatch:
        """Return the batch with the slots and page table of group `number`."""
        return self if number == 0 else self.others[number - 1]

    def _replace(self, **changes: object) -> RaggedBatch:
        """Return a copy with some fields replaced, unchecked."""
        copy = type(self).__new__(type(self))
        for name in _FIELDS:
            object.__setattr__(copy, name, changes.get(name, getattr(self, name)))
        return copy

    @property
    def tokens(self) -> int:
        """T, tokens in the batch."""
        return len(self.token_ids)

    @property
    def sequences(self) -> int:
        """S, sequences in the batch."""
        return len(self.context_lengths)

    @property
    def is_step(self) -> bool:
        """True if each sequence has one token, and no two of them are neighbours in the same text."""
        return self.longest_run == 1 and self.tokens == self.sequences

    def _check_shapes(self) -> None:
        for name in ("token_ids", "positions", "slots", "query_starts", "context_lengths", "output_rows"):
            check_ints(_NAME, name, getattr(self, name))
        check_ints(_NAME, "page_table", self.page_table, 2)
        check_size(_NAME, "length of positions", self.positions.shape[0], self.tokens)
        check_size(_NAME, "length of slots", self.slots.shape[0], self.tokens)
        check_size(_NAME, "length of query_starts", self.query_starts.shape[0], self.sequences + 1)
        check_size(_NAME, "rows of page_table", self.page_table.shape[0], self.sequences)
        if not self.tokens or not self.sequences:
            refuse(_NAME, "the batch", f"{self.tokens} tokens of {self.sequences} sequences", "at least one of each")

    def _check_states(self, spare: int | None) -> None:
        """Check that each slot that is written, except `spare`, is written by one sequence and read by none."""
        for name in ("state_reads", "state_writes", "state_nexts"):
            slots = getattr(self, name)
            check_ints(_NAME, name, slots)
            check_size(_NAME, f"length of {name}", slots.shape[0], self.sequences)
        reads, writes = self.state_reads.tolist(), self.state_writes[self.state_writes != spare].tolist()
        if min(reads) < NO_STATE:
            refuse(_NAME, "state_reads", reads, f"slots, or {NO_STATE} for none")
        if min(writes, default=0) < 0 or len({*writes}) < len(writes) or not {*writes}.isdisjoint(reads):
            refuse(_NAME, "state_writes", writes, f"slots of one sequence each, none of which is read: {reads}")

    def _check_values(self) -> None:
        starts, lengths = self.query_starts, self.context_lengths
        queries = starts[1:] - starts[:-1]
        if starts[0] != 0 or starts[-1] != self.tokens or queries.min() < 1:
            refuse(_NAME, "query_starts", starts.tolist(), f"ascending from 0 to {self.tokens}, no sequence empty")
        # positions are the tail of each context: token i of sequence s sits at context_length - query_length + i
        tails = np.repeat(lengths - starts[1:], queries) + np.arange(self.tokens, dtype=np.int32)
        if not np.array_equal(tails, self.positions) or tails.min() < 0:
            refuse(_NAME, "positions", self.positions.tolist(), f"the last ones of contexts of {lengths.tolist()}")
        rows = self.output_rows
        if rows.shape[0] and (rows.min() < 0 or rows.max() >= self.tokens):
            refuse(_NAME, "output_rows", rows.tolist(), f"rows from 0 to {self.tokens - 1}")


_FIELDS = tuple(one.name for one in fields(RaggedBatch))
