"""`mlxr import`: give a model that is on disk a name, or all models that another program has here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Force, RegistrySettings
from mlxr.cli.terminal import format_bytes, make_printable, print_fields, print_note, print_table, show_progress
from mlxr.core.errors import InvalidRequest, MlxrError, NameTaken, NotFound
from mlxr.loading import find_model
from mlxr.registry.elsewhere import PLACES, Foreign
from mlxr.registry.record import name_for
from mlxr.service.catalogue import open_registry

File = Annotated[
    Path | None, typer.Argument(metavar="[PATH]", help="A .gguf file or a Hugging Face folder. It stays where it is.")
]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="What to call it; default: its file name.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="|".join(PLACES), help="Give names to all models that this program has here."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --from: only list them.")]


def import_(
    settings: RegistrySettings,
    path: File = None,
    name: Name = None,
    source: From = None,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Give a model on disk a name. Its files stay where they are and are not copied.

    A name that another model has needs --force; the same file may be imported again.
    """
    if (path is None) == (source is None):
        raise InvalidRequest("PATH", "give a file or folder, or --from with the program whose models to take")
    registry = open_registry(settings)
    if path is not None:
        place = find_model(path)
        with show_progress(f"reading {place.name}") as progress:
            record = registry.import_file(place, name, progress=progress, replaces=force)
        print_fields(
            [("imported", record.short_name), ("from", str(record.path)), ("size", format_bytes(record.size_bytes))]
        )
        return
    models = _find_elsewhere(source or "")
    if dry_run:
        print_table(
            ("NAME", " SIZE", "PATH"), [(one.name, format_bytes(one.size_bytes), str(one.path)) for one in models]
        )
        return
    refused = 0
    for one in models:
        try:
            with show_progress(f"reading {one.name}") as progress:
                record = registry.import_file(one.path, one.name, progress=progress, replaces=force)
            print_fields([("imported", f"{record.short_name}  {format_bytes(record.size_bytes)}")])
        except NameTaken:
            print_note(f"{one.name} is here already; --force replaces it")
        except MlxrError as error:
            refused += 1
            print_note(make_printable(f"{one.name} is left out: {error}"))
    if refused:
        raise typer.Exit(1)


def _find_elsewhere(source: str) -> list[Foreign]:
    if source not in PLACES:
        raise InvalidRequest("--from", f"{source!r} is not known; known are {', '.join(PLACES)}")
    models = PLACES[source]()
    if not models:
        raise NotFound(f"{source}: no models of it are on this disk")
    return [
        Foreign(
            one.name if "/" in one.name or ":" in one.name else name_for(Path(one.name)).short, one.path, one.size_bytes
        )
        for one in models
    ]
