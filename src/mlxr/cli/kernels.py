"""`mlxr kernels`: the full source text of every GPU kernel, for inspection."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxr.core.errors import InvalidRequest
from mlxr.loading import KERNEL_TARGETS, list_kernel_sources

Target = Annotated[str, typer.Option("--target", help=f"The target to print it for: {', '.join(KERNEL_TARGETS)}.")]
Name = Annotated[str | None, typer.Option("--name", help="Only this kernel.")]


def kernels(target: Target = "metal", name: Name = None) -> None:
    """Print the source of the GPU kernels: the prelude of the target, the kernel's own headers, and its body.

    MLX writes the function around the body, with the types of the arrays and the
    constants of a launch.
    """
    if target not in KERNEL_TARGETS:
        raise InvalidRequest("target", f"must be one of {', '.join(KERNEL_TARGETS)}; got {target}")
    sources = list_kernel_sources(target)
    if name is not None and name not in sources:
        raise InvalidRequest("name", f"must be one of {', '.join(sources)}; got {name}")
    for kernel, text in sources.items():
        if name in (None, kernel):
            typer.echo(f"// ---- {kernel} ({target}) ----\n{text}")
