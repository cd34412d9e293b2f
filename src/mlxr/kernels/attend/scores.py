"""How scores become weights: what `attend` is told besides the queries and the pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlxr.kernels.tensor import FloatArray

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores are products of queries and keys times `scale`, then capped, and hidden outside of the window.

    With a softcap c a score becomes c tanh(score / c). A head's weights are exp(score) over their sum, to which a sink
    adds exp(sink): it takes part like the score of one more position, whose value is zero. `sinks` is (heads,). With a
    `value_dim` values are the last so many numbers of the keys.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: FloatArray | None = None
    symmetric: bool = False  # what comes after a position is seen as what comes before it
    value_dim: int | None = None
    whole_pictures: bool = False  # what is seen ends where the batch says
    chunked: bool = False  # what is seen of a window begins where the own chunk of as many positions does
    biases: FloatArray | None = None  # (heads, 2n + 1): added by how far the key stands behind the query, from -n to n

    @property
    def powers(self) -> tuple[float, ...]:
        """Factors that make exponents of two of products: (factor,), or with a softcap (inner, outer) around tanh."""
        if self.softcap is None:
            return (self.scale * LOG2E,)
        return self.scale / self.softcap, self.softcap * LOG2E

    @property
    def constants(self) -> dict[str, int]:
        """Which of it a GPU kernel is compiled for."""
        return {"CAPPED": int(self.softcap is not None), "SINKS": int(self.sinks is not None)}

    @property
    def sees_ahead(self) -> bool:
        """Tell whether a position sees others behind it."""
        return self.symmetric or self.whole_pictures

    def name_variant(self, kv_type: str) -> str:
        """What the ledger calls attention of this kind over such pages."""
        parts = (
            ("window", self.sliding_window),
            ("symmetric", self.symmetric or None),
            ("softcap", self.softcap),
            ("sinks", self.sinks),
            ("latent", self.value_dim),
            ("pictures", self.whole_pictures or None),
        )
        return "+".join([kv_type, *(name for name, value in parts if value is not None)])


@lru_cache(maxsize=4)
def spread_slopes(heads: int, longest: int, largest: float = 8.0) -> FloatArray:
    """The biases (heads, 2 longest + 1) of ALiBi (arXiv:2108.12409): the distance times a slope of each head, below 0.

    The slopes of as many heads as are a power of two go down to 2**-largest; others have those between.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [head + 1.0 if head < power else head - power + 0.5 for head in range(heads)]
    slopes = np.array([2.0 ** (-largest * one / power) for one in exponents], np.float32)
    result: FloatArray = -slopes[:, None] * np.abs(np.arange(-longest, longest + 1)).astype(np.float32)
    return result


def spread_buckets(table: FloatArray, farthest: int) -> FloatArray:
    """The biases (heads, 2 farthest + 1) of T5 (arXiv:1910.10683), of its table (buckets, heads).

    Half of the buckets are for keys behind the query; of each half the first half has a bucket for each distance, and
    the others share what is farther by its logarithm.
    """
    half, exact = len(table) // 2, len(table) // 4
    far = np.arange(-farthest, farthest + 1)
    logarithms = np.log(np.maximum(np.abs(far), 1) / exact).astype(np.float32) / np.float32(math.log(farthest / exact))
    by_log = exact + (logarithms * np.float32(half - exact)).astype(np.int64)
    bucket = np.where(np.abs(far) < exact, np.abs(far), np.minimum(by_log, half - 1)) + half * (far > 0)
    return np.ascontiguousarray(table[bucket].T)
