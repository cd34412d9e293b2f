"""What an answer's text consists of: thoughts, text, and calls of tools, as the conversation's format marks them.

Knows text only. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from mlxr.service.reasoning import ReasoningSplitter, Thought
from mlxr.service.tools import CallParser, CallPiece

Piece = str | Thought | CallPiece


class OutputParser:
    """First the reasoning is taken out of the text, then the calls out of what is left."""

    def __init__(self, reasoning: ReasoningSplitter | None, calls: CallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def has_calls(self) -> bool:
        """Whether a call is complete."""
        return self._calls is not None and self._calls.calls > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that follows counts."""
        return self._calls is not None and self._calls.is_over

    def push(self, text: str) -> list[Piece]:
        """What is certain with this piece of text."""
        return self._read([text] if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> list[Piece]:
        """What was held back; called once, when no more text comes."""
        pieces = [] if self._reasoning is None else self._read(self._reasoning.flush())
        return pieces if self._calls is None else [*pieces, *self._calls.flush()]

    def _read(self, parts: list[Thought | str]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, Thought) or self._calls is None:
                pieces.append(part)
            else:
                pieces += self._calls.push(part)
        return pieces
