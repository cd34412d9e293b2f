"""`run_layers` on a GPU: the operators one after another, which leave to each other what one launch can do for two.

A step is recorded as a whole (`mlxr.kernels.gpu.graph`), so a call per operator costs nothing when it is replayed.
"""

from mlxr.kernels.layers.reference import prepare, run_layers

__all__ = ["prepare", "run_layers"]
