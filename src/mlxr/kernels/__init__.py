"""Numerical operators, of which models are composed.

One file has an operator's signature and checks, its reference (NumPy float32, which defines the result), the call of
the native kernels, and the choice among these; similar operators share a file: `norms`, `elementwise`, `collectives`,
`recurrent`. The GPU implementation is in `gpu.py`, with the kernels' bodies beside it.
An operator is imported as in `from mlxr.kernels.norms import rms_norm`; its first argument is always
the `Context`, which names the device and counts what ran. This package knows no models and no files.
"""
