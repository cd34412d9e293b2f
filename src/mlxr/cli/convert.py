"""`mlxr convert` and `mlxr merge`: a model, alone or with an adapter, becomes a GGUF file, quantised on request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Json
from mlxr.cli.terminal import format_bytes, print_fields, print_json, print_note, show_progress
from mlxr.conversion import (
    NO_OWN_TYPES,
    Importance,
    find_lossy,
    merge_adapter,
    note_importance,
    plan_tensors,
    read_importance,
    write_model,
)
from mlxr.core.errors import InvalidRequest
from mlxr.formats.recipes import RECIPES, find_recipe
from mlxr.loading import SourceModel, open_source

Source = Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face folder, a .gguf file, or 'demo'.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write.")]
TypeName = Annotated[
    str, typer.Option("--type", metavar="TYPE", help=f"One of {', '.join(recipe.name for recipe in RECIPES)}.")
]
OwnTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        help="The type of weights in whose names the pattern is found, such as 'ffn_down_exps=q6_k'; may be repeated, "
        "and the first that is found counts.",
    ),
]
Matrix = Annotated[
    Path | None,
    typer.Option("--imatrix", metavar="FILE", help="An importance matrix (GGUF) that says which columns count most."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]


def convert(
    source: Source,
    out: Target,
    type_name: TypeName,
    tensor_type: OwnTypes = None,
    imatrix: Matrix = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a model as a GGUF file of a given type."""
    recipe = find_recipe(type_name).name
    own = dict(_cut_pair(pair) for pair in tensor_type or ())
    importance = None if imatrix is None else read_importance(imatrix)
    model = open_target(source, out, force)
    if imatrix is not None and importance is not None:
        model = note_importance(model, imatrix, importance)
    note = "the source is quantised already ({}); what that lost does not come back"
    write(model, out, recipe, note, as_json=json, own=own, importance=importance)


def _cut_pair(pair: str) -> tuple[str, str]:
    pattern, _, type_name = pair.rpartition("=")
    if not pattern or not type_name:
        raise InvalidRequest("--tensor-type", f"{pair!r} is no PATTERN=TYPE, such as ffn_down_exps=q6_k")
    return pattern, type_name


def open_target(source: str, out: Path, force: bool) -> SourceModel:
    """Open the source model; raises InvalidRequest if the target `out` may not be written."""
    if out.suffix != ".gguf":
        raise InvalidRequest("OUT", f"{out} must end in .gguf")
    if not out.parent.is_dir():
        raise InvalidRequest("OUT", f"the folder {out.parent} does not exist")
    if out.exists() and not force:
        raise InvalidRequest("OUT", f"{out} exists; --force replaces it")
    if out.is_dir():
        raise InvalidRequest("OUT", f"{out} is a folder")
    model = open_source(source)
    if out.exists() and any(out.samefile(path) for path in model.file.paths):
        raise InvalidRequest("OUT", f"{out} is the source itself")
    return model


def write(
    model: SourceModel,
    out: Path,
    recipe: str | None,
    lossy_note: str,
    *,
    as_json: bool,
    own: Mapping[str, str] = NO_OWN_TYPES,
    importance: Importance | None = None,
) -> None:
    """Write the model and print a summary; quantised types take the place of {} in `lossy_note`."""
    start_s = time.perf_counter()
    tensors = plan_tensors(model, recipe, own, importance)
    if lossy := find_lossy(model, tensors):
        print_note(lossy_note.format(", ".join(lossy)))
    with show_progress(f"writing {out.name}") as progress:
        size_bytes = write_model(model, tensors, recipe, out, progress)
    counts = Counter(tensor.type_name for tensor in tensors)
    if as_json:
        seconds = time.perf_counter() - start_s
        print_json({"path": str(out), "size_bytes": size_bytes, "seconds": seconds, "tensors_by_type": counts})
        return
    types = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
    print_fields([("written", str(out)), ("size", format_bytes(size_bytes)), ("tensors", types)])


Base = Annotated[str, typer.Argument(metavar="BASE", help="A Hugging Face folder, a .gguf file, or 'demo'.")]
AdapterPath = Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT folder, or a GGUF adapter.")]
MergedType = Annotated[
    str | None,
    typer.Option(
        "--type", metavar="TYPE", help=f"One of {', '.join(recipe.name for recipe in RECIPES)}; by default the base's."
    ),
]


def merge(
    base: Base,
    adapter: AdapterPath,
    out: Target,
    type_name: MergedType = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a model with an adapter added to its weights."""
    recipe = None if type_name is None else find_recipe(type_name).name
    model = merge_adapter(open_target(base, out, force), adapter)
    write(model, out, recipe, "the base is quantised ({}), and what is merged is rounded anew", as_json=json)
