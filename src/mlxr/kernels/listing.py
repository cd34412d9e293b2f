"""Which operators have an implementation, and the text of the GPU kernels: for whoever shows or checks them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import cast

import mlxr.kernels
from mlxr.kernels.choice import Choice, FunctionChoice
from mlxr.kernels.gpu.kernel import Target, read_body, read_header


def list_native_operators(implementation: str = "cpu") -> frozenset[str]:
    """Names of the operators that have an implementation "cpu" or "gpu", as the ledger spells them."""
    return frozenset(
        choice.operator
        for name in _list_modules()
        for choice in vars(importlib.import_module(name)).values()
        if isinstance(choice, Choice | FunctionChoice) and choice.has(implementation)
    )


def list_kernel_sources(target: str) -> dict[str, str]:
    """The text of every GPU kernel that is launched on one of KERNEL_TARGETS, by name: prelude, headers and body."""
    folders = (
        f"{package.__name__}.gpu"
        for package in map(importlib.import_module, _list_modules())
        if hasattr(package, "__path__")
    )
    kernels = [
        kernel
        for name in ("mlxr.kernels.gpu.pool", *(name for name in folders if importlib.util.find_spec(name)))
        for kernel in getattr(importlib.import_module(name), "KERNELS", ())
        if not (kernel.cuda_only and target == "metal")
    ]
    return {
        kernel.name: f"{read_header(kernel, cast(Target, target))}\n// arrays: {', '.join(kernel.inputs)} -> "
        f"{', '.join(kernel.outputs)}\n{{\n{read_body(kernel, cast(Target, target))}}}\n"
        for kernel in kernels
    }


def _list_modules() -> list[str]:
    return [f"mlxr.kernels.{module.name}" for module in pkgutil.iter_modules(mlxr.kernels.__path__)]
