"""NVIDIA GPUs: the words of kernels, their compiler, the driver, and recorded steps as CUDA graphs."""
