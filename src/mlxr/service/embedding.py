"""Vectors of texts as clients want them: scaled to length 1, cut to fewer dimensions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


def scale_vector(vector: Vector, dimensions: int | None = None) -> Vector:
    """The first `dimensions` numbers of `vector` (all without it), as a vector of length 1."""
    cut = vector[:dimensions].astype(np.float32)
    length = float(np.linalg.norm(cut))
    scaled: Vector = cut / np.float32(length) if length else cut
    return scaled
