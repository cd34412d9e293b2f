"""`forward` on a GPU: the operators one after another, which a recorded step replays as a whole."""

from __future__ import annotations

from mlxr.kernels.forward.reference import forward

__all__ = ["forward"]
