"""What an answer's text consists of: thoughts, text, and calls of tools, as the conversation's format marks them.

Knows text only. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mlxr.service.reasoning import ReasoningSplitter, Thought, hold_back
from mlxr.service.tools import CallParser, CallPiece, Piece

# What Command R7B and Command A write around an answer. Folders do not say that these are control tokens.
WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

MAX_REPEATS = 2  # calls in a row that say nothing new


class OutputParser:
    """First the reasoning is taken out of the text, then the calls out of what is left; `dropped` are no text.

    With `drops_repeats` each call comes once.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: CallParser | None,
        dropped: Sequence[str] = (),
        *,
        drops_repeats: bool = False,
    ) -> None:
        self._reasoning, self._calls, self._dropped = reasoning, calls, dropped
        self._sieve = _RepeatSieve() if drops_repeats else None
        self._held = ""  # may become one of `dropped`

    @property
    def has_calls(self) -> bool:
        """Whether a call is complete."""
        return self._calls is not None and self._calls.calls > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that follows counts."""
        has_looped = self._sieve is not None and self._sieve.is_over
        return has_looped or (self._calls is not None and self._calls.is_over)

    def push(self, text: str) -> list[Piece]:
        """What is certain with this piece of text."""
        return self._read([text] if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> list[Piece]:
        """What was held back; called once, when no more text comes."""
        pieces = [] if self._reasoning is None else self._read(self._reasoning.flush())
        self._held, held = "", self._held
        pieces += self._read_text(held)
        if self._calls is None:
            return pieces
        pieces += self._sift(self._calls, self._calls.flush())
        return pieces

    def _read(self, parts: list[Thought | str]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            pieces += [part] if isinstance(part, Thought) else self._read_text(self._drop(part))
        return pieces

    def _read_text(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._sift(self._calls, self._calls.push(text))
        return [text] if text else []

    def _sift(self, calls: CallParser, pieces: list[Piece]) -> list[Piece]:
        return pieces if self._sieve is None else self._sieve.push(pieces, calls.calls)

    def _drop(self, text: str) -> str:
        """The text without what is dropped, and without an end that could become it."""
        if not self._dropped:
            return text
        *found, rest = re.split("|".join(map(re.escape, self._dropped)), self._held + text)
        sure = len(rest) - max(hold_back(rest, spelling) for spelling in self._dropped)
        self._held = rest[sure:]
        return "".join(found) + rest[:sure]


class _RepeatSieve:
    """Leaves out calls that are equal to earlier ones of the answer; after some in a row nothing follows any more.

    A model that must call and may call again often writes the same call until its tokens run out. A call is held back
    only while all that has come of it is the beginning of an earlier one.
    """

    def __init__(self) -> None:
        self._made: list[tuple[str, str]] = []  # names and arguments
        self._number: int | None = None  # of the call that grows
        self._name = self._arguments = ""
        self._held: list[CallPiece] = []
        self._left_out = self._in_a_row = 0

    @property
    def is_over(self) -> bool:
        """Tell whether the model only repeats itself."""
        return self._in_a_row == MAX_REPEATS

    def push(self, pieces: Sequence[Piece], complete: int) -> list[Piece]:
        """Return what is left of these pieces; `complete` calls have come to their end with them."""
        found: list[Piece] = []
        for piece in pieces:
            if self._number is not None and not (isinstance(piece, CallPiece) and piece.call == self._number):
                self._end_call()
            if self.is_over:
                return found
            found += self._add(piece) if isinstance(piece, CallPiece) else [piece]
        if self._number is not None and self._number < complete:
            self._end_call()
        return found

    def _add(self, piece: CallPiece) -> list[CallPiece]:
        """More of a call: what can be no repetition any more."""
        if self._number is None:
            self._number, self._name, self._arguments = piece.call, piece.name or "", ""
        self._arguments += piece.arguments
        self._held.append(replace(piece, call=piece.call - self._left_out))
        if any(name == self._name and made.startswith(self._arguments) for name, made in self._made):
            return []
        held, self._held = self._held, []
        return held

    def _end_call(self) -> None:
        """Count the call that has come to its end; one that is held back is a repetition, or the beginning of one."""
        if self._held:
            self._held, self._left_out, self._in_a_row = [], self._left_out + 1, self._in_a_row + 1
        else:
            self._made.append((self._name, self._arguments))
            self._in_a_row = 0
        self._number = None
