"""`split_heads` on the CPU: the native operators one after another, which the vector units prefer to one long loop."""

from mlxr.kernels.split_heads.reference import split_heads

__all__ = ["split_heads"]
