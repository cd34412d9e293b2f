"""The base of the operators' GPU implementations: arrays, kernel sources, the launcher, recorded steps, an emulator.

Kernel bodies are written once, in the common subset of Metal and CUDA C++, beside the operators (`*.body`). Each target
has a folder, whose prelude defines the words that differ (`metal/metal.h`, `cuda/cuda.h`, `emulated/emulated.h`); those
of rings in a threadgroup's memory are in `rings.h`, for the kernels that have rings. The emulator runs threads on
`emulated/fibers.h`. Importing this package needs no `mlx`.
"""
