"""How scores become weights: what `attend` is told besides the queries and the pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
