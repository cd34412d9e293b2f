"""`mlxr cp`: a second name for a model."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxr.cli.flags import Force, RegistrySettings, complete_models
from mlxr.cli.terminal import print_fields
from mlxr.service.catalogue import open_registry

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="The model.",
        autocompletion=complete_models,
    ),
]
Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Its other name.")]


def cp(source: Source, destination: Destination, settings: RegistrySettings, force: Force = False) -> None:
    """Give a model a second name. No file is copied. A name that another model has needs --force."""
    record = open_registry(settings).copy(source, destination, replaces=force)
    print_fields([("copied", record.short_name)])
