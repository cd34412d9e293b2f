"""What the GPU implementations of the operators stand on: arrays, kernel sources, one launcher, an emulator.

Kernel bodies are written once, in the common subset of Metal and CUDA C++, beside the operators (`*.body`). A prelude
per target (`metal.h`, `cuda.h`, `emulated.h`) gives the words that differ; those of rings in a threadgroup's memory are
apart (`cuda_rings.h`, `emulated_rings.h`), for the kernels that have them. `fibers.h` is what the emulator runs threads
on. Importing this package needs no `mlx`.
"""
