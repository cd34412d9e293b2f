"""`mlxr create`: a model made from another one by a Modelfile."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Force, RegistrySettings
from mlxr.cli.terminal import make_printable, print_fields, print_note, show_progress
from mlxr.core.errors import NotFound
from mlxr.registry import AdapterRecord, ModelRecord, Registry
from mlxr.registry.modelfile import decode_modelfile, parse_modelfile
from mlxr.service.catalogue import open_registry
from mlxr.service.creation import create_model

Name = Annotated[str, typer.Argument(metavar="NAME", help="What to call the new model.")]
File = Annotated[
    Path,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="The Modelfile: FROM, ADAPTER, PARAMETER, SYSTEM, ...; - reads it from a pipe.",
    ),
]

Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize", "-q", metavar="TYPE", help="Convert the weights to a type of `mlxr convert`, such as q4_K_M."
    ),
]


def create(
    name: Name,
    settings: RegistrySettings,
    file: File = Path("Modelfile"),
    quantize: Quantize = None,
    force: Force = False,
) -> None:
    """Make a model from another one with a Modelfile, which names that model after FROM and says what to change."""
    data, folder = _read(file)
    modelfile = parse_modelfile(decode_modelfile(data))
    registry = open_registry(settings)
    source = _find_source(registry, modelfile.source, folder)
    adapter = None if modelfile.adapter is None else find_adapter(registry, modelfile.adapter, folder)
    with show_progress(f"quantising {modelfile.source}", counts_bytes=True) as progress:
        record = create_model(
            registry,
            name,
            source,
            modelfile.changes,
            quantize=quantize,
            progress=progress,
            adapter=adapter,
            replaces=force,
            renderer=modelfile.hints.get("RENDERER"),
        )
    if modelfile.hints:
        idle = ", ".join(f"{name} {value}" for name, value in modelfile.hints.items())
        print_note(make_printable(f"without effect here, where the model's own template writes prompts: {idle}"))
    rows = [("created", record.short_name), ("from", modelfile.source), ("adapter", modelfile.adapter or "")]
    print_fields([(key, value) for key, value in [*rows, ("id", record.digest[:12])] if value])


def _find_source(registry: Registry, source: str, folder: Path) -> ModelRecord:
    """What FROM names: a model, or a path, which is relative to the Modelfile."""
    try:
        return registry.find(source)
    except NotFound:
        return registry.find(folder / os.path.expanduser(source))


def find_adapter(registry: Registry, source: str, folder: Path) -> AdapterRecord | Path:
    """Find the adapter that ADAPTER names: one of the registry, or a path relative to the Modelfile."""
    try:
        return registry.adapters.get(source)
    except NotFound:
        return (folder / os.path.expanduser(source)).absolute()


def _read(file: Path) -> tuple[bytes, Path]:
    """Read the Modelfile; also return the folder that its paths start from: its own, or the current one for a pipe."""
    place = Path(os.path.expanduser(file))
    if str(file) == "-":
        return sys.stdin.buffer.read(), Path()
    if not place.exists() or place.is_dir():
        raise NotFound(f"{file}: no such Modelfile; --file names another one")
    return place.read_bytes(), place.parent if place.is_file() else Path()
