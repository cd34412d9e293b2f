"""A head for the fake model: it reads off each state the tokens that it was made of, and so knows what comes next."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from fake_model import FULL, FakeConfig, FakeModel, Floats, fake_logits

from mlxr.cache.arena import ModelArena
from mlxr.engine.speculative.planner import HeadSource
from mlxr.kernels.ragged import RaggedBatch


class TelltaleModel(FakeModel):
    """The fake model, with states that are the number of a text that it remembers; no text has number 0."""

    def forward_hidden(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        logits = super().forward_hidden(batch, arena)
        return (
            np.stack([[self.note(self._read_history(batch, int(row), arena))] for row in batch.output_rows])
            if len(logits)
            else np.empty((0, 1), np.float32)
        )

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        return self.project(self.forward_hidden(batch, arena))

    def project(self, hidden: Floats, adapters: Sequence[object] = ()) -> Floats:
        rows = [fake_logits(TEXTS[int(row[0])], self.config.vocab_size) for row in hidden]
        return np.stack(rows) if rows else np.empty((0, self.config.vocab_size), np.float32)

    @staticmethod
    def note(text: list[int]) -> np.float32:
        number = NUMBERS.setdefault(tuple(text), len(NUMBERS) + 1)
        TEXTS[number] = text
        return np.float32(number)


NUMBERS: dict[tuple[int, ...], int] = {}
TEXTS: dict[int, list[int]] = {}


@dataclass
class FakeHead:
    """Right with a chance of `right`. It leaves its tokens in its pages, and looks whether those before are there."""

    right: float = 1.0
    config: FakeConfig = field(default_factory=lambda: FakeConfig(cache_layers=(FULL,)))
    taps: tuple[int, ...] | None = None
    read_share: float = 0.1
    rows: list[int] = field(default_factory=list)  # of each of its batches
    fails: bool = False

    def fuse(self, states: Floats) -> Floats:
        return states

    def name_tokens(self, numbers: list[int]) -> list[int]:
        return numbers

    def forward(self, batch: RaggedBatch, states: Floats, arena: ModelArena) -> tuple[Floats, Floats]:
        if self.fails:
            raise RuntimeError("out of luck")
        assert states.shape == (batch.tokens, 1)
        self.rows.append(batch.tokens)
        k_pool = arena.k_pools[0]
        pages, offsets = np.divmod(batch.slots, arena.page_size)
        k_pool[pages, :, offsets, :] = batch.token_ids[:, None, None]
        logits, made = [], []
        for row in batch.output_rows:
            text = [*TEXTS[int(states[row, 0])], int(batch.token_ids[row])]
            self._check(batch, int(row), text, arena)
            own = fake_logits(text)
            if random.Random(str(text)).random() >= self.right:
                own = own[::-1]
            logits.append(own)
            made.append([TelltaleModel.note(text)])
        width = self.config.vocab_size
        return np.array(logits, np.float32).reshape(-1, width), np.array(made, np.float32).reshape(-1, 1)

    def _check(self, batch: RaggedBatch, row: int, text: list[int], arena: ModelArena) -> None:
        """Assert that the pages hold the last tokens of the text, up to as many as the head has read."""
        sequence = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
        positions = np.arange(int(batch.positions[row]) + 1)
        pages, offsets = batch.page_table[sequence, positions // arena.page_size], positions % arena.page_size
        assert pages.min() >= 0, "a position without a page"
        found = arena.k_pools[0][pages, 0, offsets, 0].astype(int).tolist()
        assert text[len(text) - len(found) :] == found, "the pages of another text"


def make_head(right: float = 1.0) -> HeadSource:
    """A head whose likeliest token is right with this chance."""
    return HeadSource(FakeHead(right), b"fake head")
