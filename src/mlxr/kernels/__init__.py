"""Numerical operators, one folder each: what a model is written in.

A folder holds `__init__.py` (signature, checks, choice of the implementation), `reference.py` (NumPy float32: the
meaning) and `cpu.py` (the native kernels). An operator is called as `from mlxr.kernels.rms_norm import rms_norm`; the
first argument is always the `Context`, which says on what to run and counts what ran. Knows no models and no files.
"""
