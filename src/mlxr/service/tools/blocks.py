"""Reads calls that come in blocks, each between a marker at its beginning and one at its end.

Shared by the formats whose calls are not JSON: a block is given out when it is whole. What it holds is the business of
the format, as is where it ends: values may spell the marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mlxr.service.json_text import write_json
from mlxr.service.reasoning import hold_back
from mlxr.service.tools.format import CallParser, CallPiece

Call = tuple[str, Mapping[str, object]]  # name and arguments


class EndFinder(Protocol):
    """Looks for the end of one block in a text that grows."""

    @property
    def passed(self) -> tuple[int, int] | None:
        """An end marker that was taken for a part of a value, should the block never end otherwise."""

    def find(self, text: str) -> tuple[int, int] | None:
        """Where the end marker begins and ends, None if the block goes on; `text` is that of the last call and more."""


class TagFinder:
    """Finds `end`, unless it stands inside of a value, between `opens` and `closes`."""

    passed = None

    def __init__(self, end: str, opens: str, closes: str) -> None:
        self._end, self._opens, self._closes = end, opens, closes
        tags = (end, opens, closes)
        self._tags, self._longest = re.compile("|".join(map(re.escape, tags))), max(map(len, tags))
        self._place, self._is_inside = 0, False

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the end marker begins and ends, if it is there."""
        for tag in self._tags.finditer(text, self._place):
            self._place = tag.end()
            if self._is_inside:
                self._is_inside = tag[0] != self._closes
            elif tag[0] == self._end:
                return tag.span()
            else:
                self._is_inside = tag[0] == self._opens
        self._place = max(self._place, len(text) - self._longest + 1)
        return None


class BlockParser(CallParser):
    """Text, and blocks that begin with one of `starts`.

    `open_finder` gets the start of a block and finds its end. `read` gets the start and what stands behind that, and
    says which calls these are, None if it is something else. `closing` may come behind the end of a block and is no
    text. `heads` are what a block begins with where a grammar is enforced.
    """

    def __init__(
        self,
        starts: Sequence[str],
        open_finder: Callable[[str], EndFinder],
        read: Callable[[str, str], Iterable[Call] | None],
        closing: str = "",
        heads: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._heads = heads
        self._starts, self._open_finder, self._read, self._closing = starts, open_finder, read, closing
        self._start = re.compile("|".join(map(re.escape, starts)))
        self._lead = ""  # the marker and the space before it, should the block turn out to be text
        self._finder: EndFinder | None = None
        self._wants_closing = False

    def _advance(self) -> bool:
        if self._wants_closing:
            return self._read_closing()
        return self._read_text() if self._finder is None else self._read_block(self._finder)

    def _read_text(self) -> bool:
        marker = self._start.search(self._text)
        if marker is not None:
            before = self._text[: marker.start()]
            self._give(before.rstrip())
            self._lead, self._text = before[len(before.rstrip()) :] + marker[0], self._text[marker.end() :]
            self._finder = self._open_finder(marker[0])
            return True
        keep = max(hold_back(self._text, start) for start in self._starts)
        sure = self._text[: len(self._text) - keep].rstrip()
        self._give(sure)
        self._text = self._text[len(sure) :]
        return False

    def _read_block(self, finder: EndFinder) -> bool:
        end = finder.find(self._text)
        if end is None:
            return False
        self._end_block(*end)
        return bool(self._text)

    def _end_block(self, begin: int, end: int) -> None:
        """The block goes as far as `begin`, and its end marker to `end`."""
        body, marker, self._text = self._text[:begin], self._text[begin:end], self._text[end:]
        self._decide(body, marker)

    def _decide(self, body: str, end: str, *, is_cut: bool = False) -> None:
        """Calls of known tools, or text."""
        calls = self._read(self._lead.strip(), body)
        if calls is None and is_cut:
            self._give_begun(self._lead, body, self._heads, is_enforced=bool(self._heads))
        elif calls is None:
            self._give(self._lead + body + end)
        for name, arguments in calls or ():
            if not self.is_over:
                self._found.append(CallPiece(self.calls, write_json(arguments), name))
                self.calls += 1
        self._wants_closing = bool(self._closing) and calls is not None
        self._lead, self._finder = "", None

    def _read_closing(self) -> bool:
        bare = self._text.lstrip()
        if self._closing.startswith(bare) and bare != self._closing:
            return False
        if bare.startswith(self._closing):
            self._text = bare.removeprefix(self._closing)
        self._wants_closing = False  # forgive one that is missing
        return bool(self._text)

    def _end(self) -> None:
        while self._finder is not None and not self.is_over:
            passed = self._finder.passed
            if passed is None or self._read(self._lead.strip(), self._text) is not None:
                self._decide(self._text, "", is_cut=True)
                return
            self._end_block(*passed)
            while not self.is_over and self._advance():
                pass
        if self.is_over:
            return
        if not self._wants_closing:
            self._give_rest(self._text, self._starts)
