"""Vectors of texts as clients want them: pooled as the model was made, scaled to length 1, cut to fewer dimensions."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import InvalidRequest
from mlxr.engine.request import Pooling as Pooling

VectorPooling = Literal["mean", "last", "cls"]  # those that make one vector, which may be asked for
POOLINGS: tuple[VectorPooling, ...] = get_args(VectorPooling)
Vector = NDArray[np.float32]


def scale_vector(vector: Vector, dimensions: int | None = None) -> Vector:
    """The first `dimensions` numbers of `vector` (all without it), as a vector of length 1."""
    cut = vector[:dimensions].astype(np.float32)
    length = float(np.linalg.norm(cut))
    scaled: Vector = cut / np.float32(length) if length else cut
    return scaled


def choose_pooling(stated: str | None, asked: Pooling | None, field: str) -> Pooling:
    """How states become a vector: as asked for, else as the model's files state, else their mean.

    Raises InvalidRequest, naming the `field` with the texts, for what files state and mlxr does not do.
    """
    if asked is not None:
        return asked
    if stated is None or stated == "none":
        return "mean"
    if stated in POOLINGS:
        return stated
    remedy = f"ask for another `pooling`, one of {', '.join(POOLINGS)}, or take another model"
    if stated == "rank":
        what = "is made to rank pairs of texts, as its files say; send them to /v1/rerank"
        raise InvalidRequest(field, f"this model {what}, {remedy}")
    what = f"makes vectors with {stated}, as its files say, and mlxr does not do that"
    raise InvalidRequest(field, f"this model {what}; {remedy}")


def describe_pooling(stated: str | None, used: Pooling) -> str:
    """What to tell of a vector that is made with `used`."""
    unstated = stated is None or stated == "none"
    return f"{used}; the files of this model state none, so it may not be made for embeddings" if unstated else used
