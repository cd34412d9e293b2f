"""Reads answers that are nothing but calls, each one JSON object; anything else is text from there to the end.

Shared by the formats that have no marker, or one that models forget. A call that has been answered again and again is
text: small models write it once more instead of an answer, and a client that ran it for ever would never end.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.service.tools.format import CallParser, CallPiece
from mlxr.service.tools.json_call import CallReader


class BareJsonParser(CallParser):
    """Calls one after the other, with space and any of `separators` between; `leads` may come before each.

    `closing` may come behind a call. Text is read on by `rest`, where there is one; that reads everything in answers
    that are bound by a grammar, which has the marks of `rest`.
    """

    def __init__(
        self,
        names: frozenset[str],
        keys: Sequence[str],
        *,
        leads: Sequence[str],
        separators: str,
        is_enforced: bool,
        closing: str = "",
        rest: CallParser | None = None,
    ) -> None:
        super().__init__()
        self._names, self._keys, self._leads = names, keys, leads
        self._separators, self._closing, self._rest = " \t\r\n" + separators, closing, rest
        self._stops = (closing,) if closing else ()
        self._is_enforced = is_enforced
        self._lead = ""  # what came before the call that is being read, should it turn out to be text
        self._reader: CallReader | None = None
        self._is_text = self._has_lead = self._is_behind = False

    def _advance(self) -> bool:
        if self._is_text or (self.is_bound and self._rest is not None):
            self._is_text, text, self._text = True, self._text, ""
            self._pass_on(text)
            return False
        if self._reader is not None:
            return self._read_call(self._reader)
        return self._read_between()

    def _read_between(self) -> bool:
        """Before a call: space, separators and the closing marker behind another one, and a lead."""
        bare = self._text.lstrip(self._separators if self._is_behind else " \t\r\n")
        marks = list(self._leads) if self._is_behind or not self._has_lead else []
        if self._is_behind and self._closing:
            marks.append(self._closing)
        if not bare or any(mark.startswith(bare) and mark != bare for mark in marks):
            return False
        mark = max((mark for mark in marks if bare.startswith(mark)), key=len, default="")
        if mark:
            self._has_lead = True
            self._keep_lead(bare[len(mark) :])
            return True
        if bare.startswith("{"):
            self._keep_lead(bare)
            self._reader = CallReader(
                self.calls,
                self._names,
                self._keys,
                is_enforced=self._is_enforced,
                needs_arguments=self.is_bound,
                stops=self._stops,
            )
            return True
        self._turn_to_text("")
        return True

    def _keep_lead(self, rest: str) -> None:
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _read_call(self, reader: CallReader) -> bool:
        pieces, self._text = reader.push(self._text)
        if not reader.is_broken:
            self._take_call(reader, pieces)
        else:
            self._turn_to_text(reader.raw)
        return bool(self._text)

    def _take_call(self, reader: CallReader, pieces: Sequence[CallPiece]) -> None:
        """More of a call, which is text once it is whole and has been answered often enough."""
        if any((piece.name, piece.arguments) in self.answered for piece in pieces) and not self._is_enforced:
            self._give(self._lead + reader.raw)
        else:
            self._found += pieces
            self.calls += reader.is_complete
        if reader.is_complete:
            self._lead, self._reader, self._is_behind = "", None, True

    def _turn_to_text(self, raw: str) -> None:
        """What was held back and all that follows is text."""
        self._text = self._lead + raw + self._text
        self._lead, self._reader, self._is_text = "", None, True

    def _pass_on(self, text: str) -> None:
        """Give text out, or let it be read for calls of another kind."""
        if self._rest is None:
            self._give(text)
            return
        self._rest.calls, self._rest.max_calls = self.calls, self.max_calls
        self._found += self._rest.push(text)
        self.calls = self._rest.calls

    def _end(self) -> None:
        if self._reader is not None:
            pieces = self._reader.finish()
            if self._reader.is_complete:
                self._take_call(self._reader, pieces)
            elif not self._is_enforced:
                self._turn_to_text(self._reader.raw)
        elif not self._is_text and not self.calls:
            self._turn_to_text("")
        if self._is_text:
            self._pass_on(self._text)
            if self._rest is not None:
                self._found += self._rest.flush()
