"""The rule by which scores become weights: the parameters of `attend` besides the queries and the pages."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.tensor import FloatArray

LOG2E = math.log2(math.e)


@frozen(eq=False)
class Scores:
    """Parameters of scores, which are products of queries and keys times `scale`, capped, and masked by the window.

    With a softcap c, a score becomes c tanh(score / c). A head's weights are exp(score) over their sum, to which a sink
    adds exp(sink), like the score of one more position, whose value is zero. `sinks` is (heads,). With `value_dim`,
    values are the last `value_dim` numbers of the keys.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: FloatArray | None = None
    symmetric: bool = False  # a position also sees later ones, as far as earlier ones
    value_dim: int | None = None
    whole_pictures: bool = False  # a token sees up to its one of the batch's `ends`
    chunked: bool = False  # a position sees earlier ones only in its chunk of `sliding_window` positions
    biases: FloatArray | None = None  # (heads, 2n + 1): added by the key's distance after the query, from -n to n

    @property
    def powers(self) -> tuple[float, ...]:
        """Factors that turn products into exponents of two: (factor,), or with a softcap (inner, outer) around tanh."""
        if self.softcap is None:
            return (self.scale * LOG2E,)
        return self.scale / self.softcap, self.softcap * LOG2E

    @property
    def constants(self) -> dict[str, int]:
        """The constants for which a GPU kernel is compiled."""
        return {"CAPPED": int(self.softcap is not None), "SINKS": int(self.sinks is not None)}

    @property
    def sees_ahead(self) -> bool:
        """True if a position may see later ones."""
        return self.symmetric or self.whole_pictures

    def name_variant(self, kv_type: str) -> str:
        """Return the ledger's variant of such attention over pages of `kv_type`."""
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
    """Return ALiBi's biases (heads, 2 longest + 1) (arXiv:2108.12409): the distance times each head's negative slope.

    For a power of two of heads, slopes are powers down to 2**-largest; further heads have slopes between these.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [head + 1.0 if head < power else head - power + 0.5 for head in range(heads)]
    slopes = np.array([2.0 ** (-largest * one / power) for one in exponents], np.float32)
    result: FloatArray = -slopes[:, None] * np.abs(np.arange(-longest, longest + 1)).astype(np.float32)
    return result


def spread_buckets(table: FloatArray, farthest: int) -> FloatArray:
    """Return T5's biases (heads, 2 farthest + 1) (arXiv:1910.10683) from its table (buckets, heads).

    Half of the buckets are for keys after the query. In each half, the first half of the buckets have one distance
    each; the others share longer distances by their logarithm.
    """
    half, exact = len(table) // 2, len(table) // 4
    far = np.arange(-farthest, farthest + 1)
    logarithms = np.log(np.maximum(np.abs(far), 1) / exact).astype(np.float32) / np.float32(math.log(farthest / exact))
    by_log = exact + (logarithms * np.float32(half - exact)).astype(np.int64)
    bucket = np.where(np.abs(far) < exact, np.abs(far), np.minimum(by_log, half - 1)) + half * (far > 0)
    return np.ascontiguousarray(table[bucket].T)
