"""Which operators have an implementation, and the text of the GPU kernels: for whoever shows or checks them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import cast

import mlxr.kernels
from mlxr.kernels.gpu.kernel import Target, read_body, read_header


def list_native_operators(implementation: str = "cpu") -> frozenset[str]:
    """Names of the operators that have an implementation "cpu" or "gpu", as the ledger spells them."""
    return frozenset(
        module.name
        for module in pkgutil.iter_modules(mlxr.kernels.__path__)
        if module.ispkg and importlib.util.find_spec(f"mlxr.kernels.{module.name}.{implementation}") is not None
    )


def list_kernel_sources(target: str) -> dict[str, str]:
    """The text of every GPU kernel that is launched on one of KERNEL_TARGETS, by name: prelude, headers and body."""
    packages = ["gpu.pool", *(f"{operator}.gpu" for operator in sorted(list_native_operators("gpu")))]
    kernels = [
        kernel
        for package in packages
        for kernel in getattr(importlib.import_module(f"mlxr.kernels.{package}"), "KERNELS", ())
        if not (kernel.cuda_only and target == "metal")
    ]
    return {
        kernel.name: f"{read_header(kernel, cast(Target, target))}\n// arrays: {', '.join(kernel.inputs)} -> "
        f"{', '.join(kernel.outputs)}\n{{\n{read_body(kernel, cast(Target, target))}}}\n"
        for kernel in kernels
    }
