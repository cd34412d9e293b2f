"""The ragged batch: tokens of several sequences one after another, as one forward pass sees them.

Prefill chunks and single decode tokens share one batch. Integers only; knows no model and no cache arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate

import numpy as np

from mlxr.kernels.checks import check_ints, check_size, refuse
from mlxr.kernels.tensor import FloatArray, IntArray

_NAME = "RaggedBatch"
NO_STATE = -1
NO_STATES: IntArray = np.empty(0, dtype=np.int32)
NO_AXES: IntArray = np.empty((3, 0), dtype=np.int32)
MAX_RUN = 16  # neighbouring tokens of one text that are computed as sequences of their own


@dataclass(frozen=True, slots=True, eq=False)
class RowsOver:
    """Rows that stand where embeddings of tokens would be looked up: those of encoded pictures.

    Each has `values` (rows, hidden * (1 + extra)): what enters the first layer, then what is added to what leaves each
    of the first `extra` layers.
    """

    places: IntArray  # (rows,): tokens of the batch, ascending
    values: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """T tokens of S sequences; all arrays int32 and C-contiguous.

    The tokens of a sequence are the last ones of its context: positions end at context_length - 1.

    Layers whose caches differ form groups, each with its own slots and page table. A batch is that of the first group;
    `others` are the same batch as the other groups see it (`of_group`).

    Recurrent layers keep one state for each sequence, in slots of their pools. A model without any pages has slots of
    -1 and a page table without columns.
    """

    token_ids: IntArray  # (T,)
    positions: IntArray  # (T,): of each token in its sequence
    slots: IntArray  # (T,): page_id * page_size + offset where the token's K and V go
    query_starts: IntArray  # (S + 1,): tokens of sequence s are [query_starts[s], query_starts[s+1])
    context_lengths: IntArray  # (S,): tokens in the cache with this step's
    page_table: IntArray  # (S, max_pages): page ids in order of position, -1 where there is none
    output_rows: IntArray  # (R,): the tokens whose logits are wanted
    # Slots of states, (S,), empty for a model without recurrent layers: where a sequence begins, NO_STATE for zeros;
    # where that after its last token goes, which nobody reads in this step; and what the next step may write, if known.
    state_reads: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    state_writes: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    state_nexts: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    longest_context: int = field(init=False)  # tokens of the longest context
    # 1, or MAX_RUN where sequences are single tokens of which so many may be neighbours in one text (`split_rows`):
    # keys of those before a token are then written by the same step
    longest_run: int = field(init=False, default=1)
    others: tuple[RaggedBatch, ...] = field(init=False, default=())
    adapters: tuple[object, ...] = field(init=False, default=())  # of each sequence, or None; empty if none has one
    types: IntArray = field(init=False, default_factory=lambda: NO_STATES)  # of tokens; empty where all are 0
    rows_over: RowsOver | None = field(init=False, default=None)
    # (3, T): where tokens stand on the axes by which queries and keys turn, of a batch with pictures; empty where all
    # three are the same for each. `turns` (T,) are rows of rotation tables, which with axes were made for this batch;
    # empty where these are the positions
    axes: IntArray = field(init=False, default_factory=lambda: NO_AXES)
    turns: IntArray = field(init=False, default_factory=lambda: NO_STATES)
    # (T,): where the positions end that a token sees in layers with whole pictures, for one of a picture that of its
    # last token; empty where all end with their own
    ends: IntArray = field(init=False, default_factory=lambda: NO_STATES)

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_values()
        object.__setattr__(self, "longest_context", int(self.context_lengths.max()))

    @classmethod
    def of_single_tokens(
        cls, token_ids: list[int], positions: list[int], slots: list[int], page_table: IntArray
    ) -> RaggedBatch:
        """One token of each sequence, which all are wanted: right by the way it is made, so that no look is needed.

        Between the steps of a model nothing of the interpreter is in the caches, and memory waits for it.
        """
        order = list(range(len(token_ids) + 1))
        lengths = [position + 1 for position in positions]
        rows = np.array((token_ids, positions, slots, lengths, order[:-1]), dtype=np.int32)
        return cls._join(rows[0], rows[1], rows[2], np.array(order, dtype=np.int32), rows[3], page_table, rows[4])

    @classmethod
    def of_few_tokens(
        cls, token_ids: list[int], positions: list[int], slots: list[int], counts: list[int], page_table: IntArray
    ) -> RaggedBatch:
        """As many tokens of each sequence as `counts` says, which all are wanted: right as `of_single_tokens` is."""
        starts = [0, *accumulate(counts)]
        lengths = [positions[stop - 1] + 1 for stop in starts[1:]]
        rows = np.array((token_ids, positions, slots, range(len(token_ids))), dtype=np.int32)
        ends = np.array(lengths, dtype=np.int32)
        return cls._join(rows[0], rows[1], rows[2], np.array(starts, dtype=np.int32), ends, page_table, rows[3])

    @classmethod
    def _join(cls, *values: IntArray) -> RaggedBatch:
        """The arrays, unchecked, from token ids to output rows."""
        batch = cls.__new__(cls)
        states, longest = (NO_STATES, NO_STATES, NO_STATES), max(values[4].tolist())
        for name, value in zip(
            _FIELDS, (*values, *states, longest, 1, (), (), NO_STATES, None, NO_AXES, NO_STATES, NO_STATES), strict=True
        ):
            object.__setattr__(batch, name, value)
        return batch

    def with_groups(self, places: Iterable[tuple[IntArray, IntArray]]) -> RaggedBatch:
        """The batch with the slots and page tables of further groups."""
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
        """The batch with the slots that hold the states of its sequences, before it, after it and after the next one.

        Without `nexts` it is not known what the step after this one writes. Sequences whose states nobody wants may all
        write slot `spare`. Raises ValueError unless each other one has a slot of its own to write, which no sequence
        reads.
        """
        unknown = np.full(len(writes), NO_STATE, np.int32) if nexts is None else nexts
        batch = self._replace(state_reads=reads, state_writes=writes, state_nexts=unknown)
        batch._check_states(spare)
        return batch

    def with_adapters(self, adapters: tuple[object, ...]) -> RaggedBatch:
        """The batch with the adapter of each sequence, which the model knows; None for a sequence without one."""
        check_size(_NAME, "number of adapters", len(adapters), self.sequences)
        return self._replace(adapters=adapters) if any(one is not None for one in adapters) else self

    def with_types(self, types: IntArray) -> RaggedBatch:
        """The batch with the types of its tokens, (T,): 1 of those of the second of two texts, else 0."""
        check_ints(_NAME, "types", types)
        check_size(_NAME, "length of types", types.shape[0], self.tokens)
        return self._replace(types=types)

    def with_pictures(self, rows: RowsOver | None, axes: IntArray, ends: IntArray = NO_STATES) -> RaggedBatch:
        """The batch with rows over embeddings, where its tokens stand on three axes, (3, T) or (3, 0), and where what
        they see ends, (T,) or (0,). Of other tables they get the row of token 0, the padding."""
        check_ints(_NAME, "axes", axes, 2)
        if axes.shape not in ((3, 0), (3, self.tokens)):
            refuse(_NAME, "axes", f"of shape {axes.shape}", f"(3, {self.tokens}), or (3, 0)")
        if rows is not None and (len(rows.places) != len(rows.values) or rows.places.max() >= self.tokens):
            refuse(_NAME, "rows_over", f"{len(rows.places)} places of {len(rows.values)} rows", "one of each token")
        check_ints(_NAME, "ends", ends)
        if len(ends) not in (0, self.tokens):
            refuse(_NAME, "length of ends", len(ends), f"{self.tokens}, or 0")
        turns = np.arange(axes.shape[1], dtype=np.int32)
        if axes.shape[1] and (axes == axes[0]).all():  # texts behind pictures stand in one place of ordinary tables
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
        """The row of each token in a table with `rows` for each type, one for each position, or one for all."""
        places = np.zeros_like(self.positions) if rows == 1 else self.positions
        return places + self.types * np.int32(rows) if len(self.types) else places

    def split_rows(self) -> RaggedBatch:
        """The same tokens as sequences of one token each, all of them wanted, that share the pages of their text.

        A token sees what is before it: in every layer keys and values of all tokens are written before any is read.
        For sequences of at most MAX_RUN tokens, without states and adapters.
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
        """The batch with single tokens in other places, and no other groups or states.

        They are right by the way they are made of checked ones, so that no look is needed, as between two steps of a
        model nothing should take time.
        """
        lengths = values["context_lengths"]
        none: dict[str, object] = {"state_reads": NO_STATES, "state_writes": NO_STATES, "state_nexts": NO_STATES}
        return self._replace(**values, **none, others=(), longest_context=int(lengths.max()))

    @property
    def has_states(self) -> bool:
        """Whether the sequences have states."""
        return len(self.state_writes) > 0

    @property
    def groups(self) -> tuple[RaggedBatch, ...]:
        """The batch as each group of layers sees it."""
        return (self, *self.others)

    def of_group(self, number: int) -> RaggedBatch:
        """The batch with the slots and page table of group `number`."""
        return self if number == 0 else self.others[number - 1]

    def _replace(self, **changes: object) -> RaggedBatch:
        """A copy with other values, unchecked."""
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
        """Whether each sequence has one token, none of which is a neighbour of another one in the same text."""
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
        """Slots are written by one sequence each, and not read by any."""
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
