"""`mlxr import`: give a model that is on disk a name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Force, RegistrySettings
from mlxr.cli.terminal import format_bytes, print_fields, show_progress
from mlxr.loading import find_model
from mlxr.service.catalogue import open_registry

File = Annotated[
    Path, typer.Argument(metavar="PATH", help="A .gguf file or a Hugging Face folder. It stays where it is.")
]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="What to call it; default: its file name.")]


def import_(path: File, settings: RegistrySettings, name: Name = None, force: Force = False) -> None:
    """Give a model on disk a name. Its files stay where they are and are not copied.

    A name that another model has needs --force; the same file may be imported again.
    """
    place = find_model(path)
    with show_progress(f"reading {place.name}") as progress:
        record = open_registry(settings).import_file(place, name, progress=progress, replaces=force)
    print_fields(
        [("imported", record.short_name), ("from", str(record.path)), ("size", format_bytes(record.size_bytes))]
    )
