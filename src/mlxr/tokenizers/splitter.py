"""Cuts a text at the special tokens written in it.

Knows spellings only. A text goes in, pieces come out in order: a `str` for text between special tokens, an `int` for
a special token's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialSplitter:
    """Finds special tokens in texts: the leftmost first, and there the longest.

    The same rule as the `tokenizers` library, whose vocabularies the models were trained with. llama.cpp looks for
    the longest token of the whole text first; the two differ only where spellings overlap in part.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._lengths: dict[str, tuple[int, ...]] = {}
        for first in {text[0] for text in ids}:
            self._lengths[first] = tuple(sorted({len(text) for text in ids if text[0] == first}, reverse=True))
        starts = "".join(re.escape(first) for first in sorted(self._lengths))
        self._starts = re.compile(f"[{starts}]") if starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The pieces of `text`, none of them empty."""
        if self._starts is None:
            if text:
                yield text
            return
        done = position = 0
        while match := self._starts.search(text, position):
            position = match.start()
            found = self._match_at(text, position)
            if found is None:
                position += 1
                continue
            if position > done:
                yield text[done:position]
            yield self._ids[found]
            done = position = position + len(found)
        if done < len(text):
            yield text[done:]

    def _match_at(self, text: str, position: int) -> str | None:
        for length in self._lengths[text[position]]:
            candidate = text[position : position + length]
            if candidate in self._ids:
                return candidate
        return None
