"""What the GPU implementations of the operators stand on: arrays, kernel sources, one launcher, an emulator.

Kernel bodies are written once, in the common subset of Metal and CUDA C++, beside the operators (`*.body`). Each target
has a folder. The words that differ are in its prelude (`metal/metal.h`, `cuda/cuda.h`, `emulated/emulated.h`); those of
rings in a threadgroup's memory are apart (`rings.h`), for the kernels that have them. `emulated/fibers.h` is what the
emulator runs threads on. Importing this package needs no `mlx`.
"""
