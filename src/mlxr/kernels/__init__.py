"""Numerical operators: what a model is written in.

An operator has its signature and checks, its reference (NumPy float32: the meaning), the call of the native kernels and
the choice among these in one file, some with their like: `norms`, `elementwise`, `collectives`, `recurrent`. What a GPU
runs stands in `gpu.py`, with the kernels' bodies beside it.
An operator is called as `from mlxr.kernels.norms import rms_norm`; the first argument is always
the `Context`, which says on what to run and counts what ran. Knows no models and no files.
"""
