"""Numerical operators: what a model is written in.

A large operator is a folder: `__init__.py` (signature, checks, choice of the implementation), `reference.py` (NumPy
float32: the meaning), `cpu.py` (the native kernels) and `gpu.py` (launches, with the kernels' bodies beside it). Small
ones have all but what a GPU runs in one file, some with their like: `norms`, `elementwise`, `collectives`, `recurrent`.
An operator is called as `from mlxr.kernels.norms import rms_norm`; the first argument is always
the `Context`, which says on what to run and counts what ran. Knows no models and no files.
"""
