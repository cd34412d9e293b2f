"""Texts over which no repetition of DRY reaches, as the sequences of tokens in which they can stand.

A text stands inside one token, or begins with the last bytes of one and goes on with the tokens of its rest. Made once
for a text and a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from mlxr.tokenizers import Tokenizer

MAX_BYTES = 40
MAX_TAIL_TOKENS = 20
_KEPT_TEXTS = 256

Sequences = frozenset[tuple[int, ...]]


class BreakerFinder:
    """Finds the sequences for the first `vocab_size` tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._spelling = [tokenizer.token_bytes(i) for i in range(min(vocab_size, tokenizer.vocab_size))]
        self._by_end: dict[int, list[int]] = {}
        for token_id, spelling in enumerate(self._spelling):
            if spelling:
                self._by_end.setdefault(spelling[-1], []).append(token_id)
        self._find = lru_cache(_KEPT_TEXTS)(self._find_one)

    def find(self, texts: Iterable[str]) -> Sequences:
        """The sequences of all `texts`, of which longer ones count as their first 40 bytes."""
        return frozenset().union(*(self._find(text) for text in texts))

    def _find_one(self, text: str) -> Sequences:
        wanted = text.encode(errors="replace")[:MAX_BYTES]
        found: set[tuple[int, ...]] = {
            (token_id,) for token_id, spelling in enumerate(self._spelling) if wanted in spelling
        }
        for cut in range(1, len(wanted)):
            rest = wanted[cut:].decode(errors="ignore")
            tail = tuple(self._tokenizer.encode(rest, add_special=False)[:MAX_TAIL_TOKENS])
            heads = self._by_end.get(wanted[cut - 1], ())
            found |= {(head, *tail) for head in heads if tail and self._spelling[head].endswith(wanted[:cut])}
        return frozenset(found)
