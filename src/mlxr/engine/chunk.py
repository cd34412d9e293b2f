"""What a step computes of one sequence: its next tokens, and those that were drafted after them."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.engine.batch import BatchPart
from mlxr.engine.drafts.tail import MOST_ROWS
from mlxr.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `tokens` pending tokens of `sequence` and the drafted ones after them are computed in this step."""

    sequence: Sequence
    tokens: int
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens that are computed, drafted ones included."""
        return self.tokens + len(self.draft)

    @property
    def output_rows(self) -> int:
        """How many rows of logits are wanted: of the last pending token, and of each drafted one."""
        return 1 + len(self.draft) if self.draws_token else 0

    @property
    def completes(self) -> bool:
        """Whether nothing is pending afterwards, so that the next token can be drawn, or the text is embedded."""
        return self.tokens == self.sequence.pending_tokens

    @property
    def draws_token(self) -> bool:
        """Whether the next token can be drawn afterwards."""
        return self.completes and self.sequence.draws

    @property
    def waits_for_draft(self) -> bool:
        """Whether nothing counts as written before all of the draft was checked: states do not go back."""
        return bool(self.draft) and self.sequence.table.states is not None

    @property
    def hidden_tokens(self) -> int:
        """How many hidden states at the end of the chunk are needed, for an embedding or for scores."""
        pool, scores = self.sequence.pool, self.sequence.scores
        if pool is not None:
            return pool.count_wanted(
                self.tokens, is_first=not self.sequence.table.length_tokens, completes=self.completes
            )
        return self.tokens if scores is not None and scores.is_open else 0

    @property
    def kept_tokens(self) -> int:
        """How many states at the end of the chunk are kept for a head that drafts."""
        return 0 if self.sequence.tail is None else min(self.rows, MOST_ROWS)

    def to_part(self) -> BatchPart:
        """The chunk as the batch wants it."""
        table = self.sequence.table
        token_ids = self.sequence.tokens[table.length_tokens : table.length_tokens + self.tokens]
        return BatchPart(
            table,
            [*token_ids, *self.draft],
            self.output_rows,
            self.hidden_tokens,
            self.sequence.request.adapter,
            self.kept_tokens,
        )
