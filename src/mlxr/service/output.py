"""What an answer's text consists of: thoughts, text, and calls of tools, as the conversation's format marks them.

Knows text only. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlxr.service.reasoning import ReasoningSplitter, Thought, hold_back
from mlxr.service.tools import CallParser, Piece

# What Command R7B and Command A write around an answer. Folders do not say that these are control tokens.
WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class OutputParser:
    """First the reasoning is taken out of the text, then the calls out of what is left; `dropped` are no text."""

    def __init__(
        self, reasoning: ReasoningSplitter | None, calls: CallParser | None, dropped: Sequence[str] = ()
    ) -> None:
        self._reasoning, self._calls, self._dropped = reasoning, calls, dropped
        self._held = ""  # may become one of `dropped`

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
        self._held, held = "", self._held
        pieces += self._read_text(held)
        return pieces if self._calls is None else [*pieces, *self._calls.flush()]

    def _read(self, parts: list[Thought | str]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            pieces += [part] if isinstance(part, Thought) else self._read_text(self._drop(part))
        return pieces

    def _read_text(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return list(self._calls.push(text))
        return [text] if text else []

    def _drop(self, text: str) -> str:
        """The text without what is dropped, and without an end that could become it."""
        if not self._dropped:
            return text
        *found, rest = re.split("|".join(map(re.escape, self._dropped)), self._held + text)
        sure = len(rest) - max(hold_back(rest, spelling) for spelling in self._dropped)
        self._held = rest[sure:]
        return "".join(found) + rest[:sure]
