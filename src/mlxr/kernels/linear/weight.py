"""A weight, or several that share their input, ready to multiply with: what `prepare` returns and `linear` takes.

What `payload` is only the implementation knows that made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeight:
    """`in_features` inputs, outputs of `splits` features one after another; `nbytes` is what it holds in memory.

    `variant` names the weight types ("q4_k", "q4_k+q6_k"); `implementation` is the one whose `payload` this is.
    `names` are those that the model gives to the tensors of the splits, where adapters may update them. With `is_share`
    other ranks have the other inputs, and what it makes is a part of a sum.
    """

    in_features: int
    splits: tuple[int, ...]
    nbytes: int
    variant: str
    implementation: str
    payload: Any
    names: tuple[str, ...] = ()
    is_share: bool = False

    @property
    def out_features(self) -> int:
        """Number of output features of all parts together."""
        return sum(self.splits)
