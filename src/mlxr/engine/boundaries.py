"""At which boundaries of one sequence the state of the recurrent layers is kept as a snapshot. Integers only.

A state is as large as the keys and values of many tokens, so it is kept where somebody is likely to go on: at the last
boundary of the prompt; where a message ends, if the caller says so; where an earlier text was found to part from this
one; and, so that no recomputation is long, once in so many tokens. A step can keep only the state that it ends with,
so the scheduler cuts prompts there, which changes no bit. Of an answer the last boundary behind it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxr.cache.group import Snapshot

MAX_ASKED = 8  # boundaries of messages in one prompt: the first one, where instructions end, and the last ones


class Boundaries:
    """Those of a sequence whose prompt has `prompt_tokens` tokens, rounded down to full pages.

    `asked_tokens` are positions at which messages end. Snapshots beyond those that are known to be of use come every
    `spacing_tokens`, a multiple of the page size.
    """

    __slots__ = ("_lasting", "_page_size", "_prompt_tokens", "_spacing_tokens")

    def __init__(
        self, page_size: int, spacing_tokens: int, prompt_tokens: int, asked_tokens: Iterable[int] = ()
    ) -> None:
        self._page_size, self._spacing_tokens, self._prompt_tokens = page_size, spacing_tokens, prompt_tokens
        self._lasting: set[int] = set()
        asked = sorted({position for position in asked_tokens if position < prompt_tokens})
        for position in (*asked[:1], *asked[1:][1 - MAX_ASKED :], prompt_tokens - 1):
            self.add(position)

    def add(self, position: int) -> int:
        """Keep a snapshot at the last boundary that is not after `position`, from which others will go on; that one."""
        boundary = max(0, position) // self._page_size * self._page_size
        if boundary:
            self._lasting.add(boundary)
        return boundary

    def cut(self, start: int, tokens: int, pending_tokens: int) -> int:
        """How many of the next `tokens` tokens after `start` a step computes, so that it ends where a state is kept.

        A step that leaves some of the `pending_tokens` ends with a page where it can: if the sequence stops there, its
        state is of use.
        """
        end = start + tokens
        spaced = (start // self._spacing_tokens + 1) * self._spacing_tokens
        nearest = min((boundary for boundary in (*self._lasting, spaced) if start < boundary < end), default=end)
        if nearest == end and tokens < pending_tokens and end // self._page_size * self._page_size > start:
            nearest = end // self._page_size * self._page_size
        return nearest - start

    def judge(self, position: int) -> Snapshot:
        """Whether the state after `position` tokens is kept."""
        if position in self._lasting:
            return Snapshot.LASTING
        if position % self._spacing_tokens == 0:
            return Snapshot.PASSING
        return Snapshot.NONE if position < self._prompt_tokens else Snapshot.TRAILING
