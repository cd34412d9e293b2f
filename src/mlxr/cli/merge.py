"""`mlxr merge`: a model and an adapter become one GGUF file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.convert import check_target, refuse_own_input, report
from mlxr.cli.flags import Json
from mlxr.cli.terminal import print_note, show_progress
from mlxr.conversion import find_lossy, merge_adapter, plan_tensors, write_model
from mlxr.formats.recipes import RECIPES, find_recipe
from mlxr.loading import open_source

Base = Annotated[str, typer.Argument(metavar="BASE", help="A Hugging Face folder, a .gguf file, or 'demo'.")]
AdapterPath = Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT folder, or a GGUF adapter.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write.")]
TypeName = Annotated[
    str | None,
    typer.Option(
        "--type", metavar="TYPE", help=f"One of {', '.join(recipe.name for recipe in RECIPES)}; by default the base's."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]


def merge(
    base: Base, adapter: AdapterPath, out: Target, type_name: TypeName = None, force: Force = False, json: Json = False
) -> None:
    """Write a model with an adapter added to its weights."""
    recipe = None if type_name is None else find_recipe(type_name).name
    check_target(out, force)
    start_s = time.perf_counter()
    model = open_source(base)
    refuse_own_input(model, out)
    model = merge_adapter(model, adapter)
    tensors = plan_tensors(model, recipe)
    lossy = find_lossy(model, tensors)
    if lossy:
        print_note(f"the base is quantised ({', '.join(lossy)}), and what is merged is rounded anew")
    with show_progress(f"writing {out.name}") as progress:
        size_bytes = write_model(model, tensors, recipe, out, progress)
    report(out, tensors, size_bytes, time.perf_counter() - start_s, as_json=json)
