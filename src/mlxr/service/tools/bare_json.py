"""Reads answers that are nothing but calls, each one JSON object; anything else is text from beginning to end.

Shared by the formats that have no marker, or one that models forget.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.service.tools.format import CallParser
from mlxr.service.tools.json_call import CallReader


class BareJsonParser(CallParser):
    """Calls one after the other, with space and any of `separators` between, after at most one of `leads`."""

    def __init__(
        self, names: frozenset[str], keys: Sequence[str], *, leads: Sequence[str], separators: str, is_enforced: bool
    ) -> None:
        super().__init__()
        self._names, self._keys, self._leads, self._separators = names, keys, leads, separators
        self._is_enforced = is_enforced
        self._lead = ""  # what came before the call that is being read, should it turn out to be text
        self._reader: CallReader | None = None
        self._is_text = self._had_lead = False

    def _advance(self) -> bool:
        if self._is_text:
            self._give(self._text)
            self._text = ""
            return False
        if self._reader is not None:
            return self._read_call(self._reader)
        return self._read_between()

    def _read_between(self) -> bool:
        """Before a call: space, separators after another call, and a lead before the first."""
        bare = self._text.lstrip(" \t\r\n" + (self._separators if self.calls else ""))
        if not bare:
            return False
        if not self.calls and not self._had_lead:
            if any(lead.startswith(bare) and lead != bare for lead in self._leads):
                return False
            lead = max((lead for lead in self._leads if bare.startswith(lead)), key=len, default="")
            if lead:
                self._had_lead = True
                self._keep_lead(bare[len(lead) :])
                return True
        if bare.startswith("{"):
            self._keep_lead(bare)
            self._reader = CallReader(self.calls, self._names, self._keys, is_enforced=self._is_enforced)
            return True
        self._give_text("")
        return True

    def _keep_lead(self, rest: str) -> None:
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _read_call(self, reader: CallReader) -> bool:
        pieces, rest = reader.push(self._text)
        self._text = rest
        if any((piece.name, piece.arguments) in self.answered for piece in pieces):
            self._give_text(reader.raw)
            return bool(self._text)
        self._found += pieces
        if reader.is_complete:
            self.calls += 1
            self._lead, self._reader = "", None
        elif reader.is_broken:
            self._give_text(reader.raw)
        else:
            return False
        return bool(self._text)

    def _give_text(self, raw: str) -> None:
        """What was held back and all that follows is text."""
        self._give(self._lead + raw)
        self._lead, self._reader, self._is_text = "", None, True

    def _end(self) -> None:
        if self._reader is not None:
            if not self._is_enforced:
                self._give_text(self._reader.raw)
        elif not self.calls:
            self._give_text(self._text)
