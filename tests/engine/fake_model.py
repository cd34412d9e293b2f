"""A model without weights: its logits are a hash of the token history that it reads back from the cache.

Every token leaves its id in the K page and its position in the V page of its slot, and the next logits depend on all
ids of the context as the page table finds them. A recurrent layer's state is the number of tokens and their ids, so far
as a step has read it from one slot and written it to another. So a wrong slot, page, length, state or copy changes the
answer, and what an answer must be is known without an engine (`fake_logits`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.cache.arena import ModelArena
from mlxr.cache.shapes import CacheShape, LayerCache, StateShape, form_groups
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.speculative.planner import DraftSource
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sample import SampleRow, sample

Floats = npt.NDArray[np.float32]
VOCABULARY = 50
FULL = CacheShape(kv_heads=2, head_dim=4)
STATE = StateShape(1 + 128)  # the longest context, and its length


@dataclass(frozen=True)
class FakeConfig:
    """Measures of the fake model; small, and grouped 4 to 2."""

    cache_layers: tuple[LayerCache, ...] = (FULL, FULL)
    heads: int = 4
    vocab_size: int = VOCABULARY
    context_length: int = 128
    is_causal: bool = True
    rank_pooling: str = "last"


def fake_logits(history: Sequence[int], vocabulary: int = VOCABULARY) -> Floats:
    """Logits after `history`: normal numbers from a generator keyed with its hash."""
    digest = hashlib.blake2b(np.asarray(history, np.int32).tobytes(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
    return generator.standard_normal(vocabulary).astype(np.float32) * 3


@dataclass
class FakeModel:
    """Remembers its batches; `on_forward` is called first with each, `on_written` at the end, and both may raise."""

    config: FakeConfig = field(default_factory=FakeConfig)
    on_forward: Callable[[RaggedBatch], None] = lambda batch: None
    on_written: Callable[[RaggedBatch], None] = lambda batch: None
    batches: list[RaggedBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups = form_groups(self.config.cache_layers)

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        return self.project(self.forward_hidden(batch, arena))

    def project(self, hidden: Floats, adapters: Sequence[object] = ()) -> Floats:
        return hidden

    def forward_hidden(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        self.on_forward(batch)
        self.batches.append(batch)
        for group, k_pool, v_pool in self._list_pools(arena):
            pages, offsets = np.divmod(batch.of_group(group).slots, arena.page_size)
            k_pool[pages, :, offsets, :] = batch.token_ids[:, None, None]
            v_pool[pages, :, offsets, :] = batch.positions[:, None, None]
        for states in self._list_states(arena):
            advance_states(batch, states)
        self.on_written(batch)
        rows = [
            fake_logits(self._read_history(batch, int(row), arena), self.config.vocab_size) for row in batch.output_rows
        ]
        return np.stack(rows) if rows else np.empty((0, self.config.vocab_size), np.float32)

    def _list_pools(self, arena: ModelArena) -> list[tuple[int, Floats, Floats]]:
        """The group of each layer that has pages, and its pools."""
        pools = zip(self._groups.places, arena.k_pools, arena.v_pools, strict=True)
        return [(place.group, k_pool, v_pool) for place, k_pool, v_pool in pools if place and k_pool is not None]

    @staticmethod
    def _list_states(arena: ModelArena) -> list[Floats]:
        """The states of each recurrent layer."""
        return [states for states in arena.states if states is not None]

    def _read_history(self, batch: RaggedBatch, row: int, arena: ModelArena) -> list[int]:
        """Return the token ids that the row sees in the layer that sees most; other layers see the last of these."""
        sequence = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
        position, histories = int(batch.positions[row]), []
        for states in self._list_states(arena):
            state = states[batch.state_writes[sequence]].astype(int).tolist()
            assert state[0] == batch.context_lengths[sequence], "a foreign state"
            histories.append(state[1 : position + 2])
        for group, k_pool, v_pool in self._list_pools(arena):
            window = self._groups.paged[group].window or position + 1
            positions = np.arange(max(0, position + 1 - window), position + 1)
            table = batch.of_group(group).page_table
            pages, offsets = table[sequence, positions // arena.page_size], positions % arena.page_size
            assert pages.min() >= 0, "a position without a page"
            assert np.array_equal(v_pool[pages, 0, offsets, 0], positions), "a foreign page"
            histories.append(k_pool[pages, -1, offsets, -1].astype(int).tolist())
        longest: list[int] = max(histories, key=len)
        assert all(longest[len(longest) - len(history) :] == history for history in histories), "groups disagree"
        return longest


def advance_states(batch: RaggedBatch, states: Floats) -> None:
    """Stand in for a recurrent layer: advance the state that was read, token by token, to the one written."""
    states[batch.state_writes] = -1
    for sequence, (read, write) in enumerate(zip(batch.state_reads, batch.state_writes, strict=True)):
        start, stop = batch.query_starts[sequence : sequence + 2]
        state = states[read].copy() if read >= 0 else np.zeros(states.shape[1], np.float32)
        assert state[0] == batch.positions[start], "the state of another position"
        for token_id in batch.token_ids[start:stop]:
            state[0] += 1
            state[int(state[0])] = token_id
        states[write] = state


def make_engine(
    model: FakeModel | None = None,
    *,
    eos_ids: Sequence[int] = (),
    pages: int = 64,
    page_size: int = 4,
    context_tokens: int | None = None,
    max_batch_tokens: int = 16,
    max_sequences: int = 8,
    prefill_chunk_tokens: int = 16,
    max_waiting: int = 1024,
    kv_cache: str = "auto",
    prefix_sharing: bool = True,
    store_folder: Path | None = None,
    store_bytes: int = 2**20,
    draft: DraftSource | None = None,
    drafts: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """An engine over a fake model, small enough that every bound is soon met."""
    return Engine(
        model or FakeModel(),
        Context("reference"),
        ModelSettings(
            page_size=page_size,
            context_tokens=context_tokens,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_waiting=max_waiting,
            kv_cache=kv_cache,
            store_folder=None if store_folder is None else str(store_folder),
            store_bytes=store_bytes if store_folder is not None else 0,
            draft="auto" if drafts else "off",
        ),
        eos_ids=eos_ids,
        pages=pages,
        prefix_sharing=prefix_sharing,
        fingerprint=b"fake",
        draft=draft,
        clock=clock,
    )


def run_all(engine: Engine, max_steps: int = 2000) -> list[TokenEvent]:
    """Step until nothing is left, checking the books after every step; return all events in order."""
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check()
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
    assert engine.stats().used_pages == 0
    return events


def answer_of(events: Sequence[TokenEvent], sequence_id: int) -> list[int]:
    """Tokens of one request, in order."""
    return [event.token_id for event in events if event.sequence_id == sequence_id and event.token_id is not None]


def finish_of(events: Sequence[TokenEvent], sequence_id: int) -> FinishReason | None:
    """Return why one request ended: the reason in its last event, which must be the only one."""
    own = [event for event in events if event.sequence_id == sequence_id]
    assert all(event.finish_reason is None for event in own[:-1])
    return own[-1].finish_reason


def generate(prompt: Sequence[int], params: SamplingParams, engine: Engine | None = None, **options: Any) -> list[int]:
    """The answer of one request that is alone in its engine."""
    engine = engine or make_engine()
    sequence_id = engine.submit(EngineRequest(prompt, params, **options))
    return answer_of(run_all(engine), sequence_id)


def expect_greedy(prompt: Sequence[int], tokens: int, row: SampleRow | None = None) -> list[int]:
    """The greedy answer, computed without an engine."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(sample(Context("reference"), fake_logits(history)[None], [row or SampleRow()])[0].token_id)
    return history[len(prompt) :]
