"""What an engine has done and what its cache holds, as plain numbers at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.cache.stats import CacheStats
from mlxr.engine.scheduler import Chunk


@dataclass(slots=True)
class Work:
    """What an engine has done since it was made."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    failed_steps: int = 0
    late_answers: int = 0
    refused_requests: int = 0

    def count(self, chunk: Chunk) -> None:
        """`chunk` was computed, and its tokens do not count as cached yet."""
        self.recomputed_tokens += chunk.sequence.count_computed(chunk.tokens)
        if chunk.sequence.is_decoding:
            self.decode_tokens += chunk.tokens
        else:
            self.prefill_tokens += chunk.tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, and the state of its cache now.

    A page is used (some request holds it; shared when several do), cached or free. `peak_pages` is the most ever used
    at once; `ungrouped_bytes_per_page` what a page would take if every query head had keys and values of its own.
    `preemptions` counts the times a running answer had to give its pages back, `recomputed_tokens` what was computed
    once more because of that. `late_answers` were ended by their deadline, `refused_requests` found the queue full.
    """

    kv_cache: str
    pages: int
    used_pages: int
    shared_pages: int
    cached_pages: int
    free_pages: int
    peak_pages: int
    page_size: int
    page_bytes: int
    arena_bytes: int
    ungrouped_bytes_per_page: int
    waiting_sequences: int
    running_sequences: int
    preemptions: int
    cache: CacheStats
    steps: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    failed_steps: int
    late_answers: int
    refused_requests: int

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use now."""
        return self.used_pages * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of the most pages ever in use at once."""
        return self.peak_pages * self.page_bytes

    @property
    def gqa_saved_bytes(self) -> int:
        """Bytes that grouped-query attention saved at the peak, against one K and V per query head."""
        return self.peak_pages * (self.ungrouped_bytes_per_page - self.page_bytes)
