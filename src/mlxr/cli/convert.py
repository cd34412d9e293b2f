"""`mlxr convert`: a Hugging Face folder or a GGUF file becomes a GGUF file, quantised on request.

Tensors go from file to file in pieces, so a model of any size needs little memory.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from mlxr.cli.flags import Json
from mlxr.cli.terminal import format_bytes, print_fields, print_json, print_note, show_progress
from mlxr.core.errors import InvalidRequest
from mlxr.formats import AffineTensor, TensorSource, TensorToWrite, by_name, write_gguf
from mlxr.formats.recipes import RECIPES, find_recipe, tensor_type
from mlxr.loading import SourceModel, open_source

QUANTIZATION_VERSION = 2  # of ggml's block layouts, stated in every quantised file
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")

Source = Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face folder, a .gguf file, or 'demo'.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write.")]
TypeName = Annotated[
    str, typer.Option("--type", metavar="TYPE", help=f"One of {', '.join(recipe.name for recipe in RECIPES)}.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]


def convert(source: Source, out: Target, type_name: TypeName, force: Force = False, json: Json = False) -> None:
    """Write a model as GGUF, quantised on request."""
    recipe = find_recipe(type_name)
    check_target(out, force)
    start_s = time.perf_counter()
    model = open_source(source)
    _refuse_own_input(model, out)
    tensors = plan_tensors(model, recipe.name)
    metadata = dict(model.metadata) | {"general.file_type": recipe.file_type}
    if any(by_name(tensor.type_name).is_quantized for tensor in tensors):
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
    _warn_about_precision(model, tensors)
    types = {**model.metadata_types, "general.file_type": "u32", "general.quantization_version": "u32"}
    with show_progress(f"writing {out.name}") as progress:
        size_bytes = write_gguf(out, metadata, tensors, metadata_types=types, progress=progress)
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


def plan_tensors(model: SourceModel, recipe_name: str) -> list[TensorToWrite]:
    """What will be written, with the type that the recipe gives each tensor."""
    planned = []
    for name, source in model.tensors.items():
        wanted = tensor_type(
            recipe_name,
            name,
            source.shape,
            layer=find_layer(name),
            layers=model.config.layers,
            tied_output="output.weight" not in model.tensors,
            query_groups=model.config.heads // model.config.kv_heads,
        )
        planned.append(_plan_tensor(name, source, wanted, model.row_orders.get(name)))
    for name, values in model.extra.items():
        planned.append(TensorToWrite.from_array(name, "f32", np.array(values, np.float32)))
    return planned


def find_layer(name: str) -> int:
    """The layer that a tensor name states, 0 for tensors of no layer."""
    match = _LAYER.match(name)
    return 0 if match is None else int(match[1])


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


def _plan_tensor(
    name: str, source: TensorSource | AffineTensor, type_name: str, row_order: list[int] | None
) -> TensorToWrite:
    if row_order is not None and len(source.shape) == 1:  # a bias: reorder its numbers, not its rows
        return TensorToWrite.from_array(name, type_name, source.to_float32()[row_order])
    order = None if row_order is None else np.array(row_order, np.intp)
    return TensorToWrite.from_source(source, name=name, type_name=type_name, row_order=order)


def _refuse_own_input(model: SourceModel, out: Path) -> None:
    if out.exists() and any(out.samefile(path) for path in model.file.paths):
        raise InvalidRequest("OUT", f"{out} is the source itself")


def _warn_about_precision(model: SourceModel, tensors: list[TensorToWrite]) -> None:
    """Tell that quantising twice loses twice."""
    changed = {
        model.tensors[tensor.name].type_name
        for tensor in tensors
        if tensor.name in model.tensors and model.tensors[tensor.name].type_name != tensor.type_name
    }
    lossy = sorted(name for name in changed if by_name(name).is_quantized)
    if lossy:
        print_note(f"the source is quantised already ({', '.join(lossy)}); what that lost does not come back")
