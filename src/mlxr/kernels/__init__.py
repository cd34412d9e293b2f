"""Numerical operators: what a model is written in.

A large operator is a folder: `__init__.py` (signature, checks, choice of the implementation), `reference.py` (NumPy
float32: the meaning), `cpu.py` (the native kernels) and `gpu.py` (launches, with the kernels' bodies beside it). Small
ones stand with their like, all of an operator in one place but what a GPU runs: `norms`, `elementwise`, `collectives`,
`embed`, `split_heads`. An operator is called as `from mlxr.kernels.norms import rms_norm`; the first argument is always
the `Context`, which says on what to run and counts what ran. Knows no models and no files.
"""
