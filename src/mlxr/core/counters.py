"""What an engine counts from the moment it is made: one set of numbers, which only ever grow.

The cache counts tokens as it looks for them, the engine all else. Whoever reads makes the differences: `/metrics`, the
live view, the replies of the admin routes and `LLM.stats` tell these very numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class PrefixCounters:
    """Tokens of prompts by where they were found when their pages were looked for."""

    memory_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    peer_hit_tokens: int = 0  # computed by another process and brought here
    missed_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that did not need to be computed."""
        return self.memory_hit_tokens + self.disk_hit_tokens + self.peer_hit_tokens


@dataclass(slots=True, kw_only=True)
class Counters(PrefixCounters):
    """Says what an engine has done since it was made."""

    steps: int = 0
    failed_steps: int = 0
    prefill_tokens: int = 0  # of prompts, or computed before and again after a preemption
    decode_tokens: int = 0  # of answers, that were written to the cache
    drafted_tokens: int = 0  # computed on a guess
    accepted_tokens: int = 0  # of those, the ones that were right
    recomputed_tokens: int = 0  # computed once more because of a preemption
    preemptions: int = 0  # times that a running answer had to give its pages back
    late_answers: int = 0  # ended by their deadline
    refused_requests: int = 0  # found the queue full
    evicted_pages: int = 0  # cached pages that were given up
    dropped_pages: int = 0  # pages that did not get, or stay, in the store
    copied_bytes: int = 0  # of keys and values, copied by the cache path instead of being read in place

    def since(self, before: Counters) -> dict[str, int]:
        """Return what was added since `before`, without what was not."""
        added = ((row.name, getattr(self, row.name) - getattr(before, row.name)) for row in fields(self))
        return {name: count for name, count in added if count}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Says how often an operator ran in one implementation.

    Implementations are "cpu" (native), "gpu" (our kernels, and the library that recorded steps multiply with), "mlx"
    (MLX's own operations, on any device) and "reference" (NumPy).
    """

    operator: str
    implementation: str
    variant: str  # names the kernel and the form of the numbers
    count: int


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Says how many rows one kernel multiplied by weights of experts, in one form of the weights.

    Each pair of a token and an expert is a row of two products, gate with up and down; on a CPU weights of several
    types are multiplied each by itself.
    """

    implementation: str
    kernel: str
    rows: int
