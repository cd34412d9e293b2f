"""Kernels on the host: the words of kernels, a compiler that makes fibers of their threads, and recorded steps."""
