"""`mlxr convert`: a Hugging Face folder or a GGUF file becomes a GGUF file, quantised on request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Json
from mlxr.cli.terminal import format_bytes, print_fields, print_json, print_note, show_progress
from mlxr.conversion import find_lossy, plan_tensors, write_model
from mlxr.core.errors import InvalidRequest
from mlxr.formats import TensorToWrite
from mlxr.formats.recipes import RECIPES, find_recipe
from mlxr.loading import SourceModel, open_source

Source = Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face folder, a .gguf file, or 'demo'.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write.")]
TypeName = Annotated[
    str, typer.Option("--type", metavar="TYPE", help=f"One of {', '.join(recipe.name for recipe in RECIPES)}.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]


def convert(source: Source, out: Target, type_name: TypeName, force: Force = False, json: Json = False) -> None:
    """Write a model as a GGUF file of a given type."""
    recipe = find_recipe(type_name)
    check_target(out, force)
    start_s = time.perf_counter()
    model = open_source(source)
    refuse_own_input(model, out)
    tensors = plan_tensors(model, recipe.name)
    lossy = find_lossy(model, tensors)
    if lossy:
        print_note(f"the source is quantised already ({', '.join(lossy)}); what that lost does not come back")
    with show_progress(f"writing {out.name}") as progress:
        size_bytes = write_model(model, tensors, recipe.name, out, progress)
    report(out, tensors, size_bytes, time.perf_counter() - start_s, as_json=json)


def check_target(out: Path, force: bool) -> None:
    """Raise InvalidRequest for a target that may not be written."""
    if out.suffix != ".gguf":
        raise InvalidRequest("OUT", f"{out} must end in .gguf")
    if not out.parent.is_dir():
        raise InvalidRequest("OUT", f"the folder {out.parent} does not exist")
    if out.exists() and not force:
        raise InvalidRequest("OUT", f"{out} exists; --force replaces it")
    if out.is_dir():
        raise InvalidRequest("OUT", f"{out} is a folder")


def report(out: Path, tensors: list[TensorToWrite], size_bytes: int, seconds: float, *, as_json: bool) -> None:
    """Print what was written."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.type_name] = counts.get(tensor.type_name, 0) + 1
    if as_json:
        print_json({"path": str(out), "size_bytes": size_bytes, "seconds": seconds, "tensors_by_type": counts})
        return
    types = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
    print_fields([("written", str(out)), ("size", format_bytes(size_bytes)), ("tensors", types)])


def refuse_own_input(model: SourceModel, out: Path) -> None:
    """Raise InvalidRequest where the target is a file of the model."""
    if out.exists() and any(out.samefile(path) for path in model.file.paths):
        raise InvalidRequest("OUT", f"{out} is the source itself")
