"""`mlxr rm`: remove models from the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxr.cli.flags import RegistrySettings, complete_models
from mlxr.cli.terminal import print_fields
from mlxr.service.catalogue import open_registry

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="The models to remove.",
        autocompletion=complete_models,
    ),
]


def rm(names: Names, settings: RegistrySettings) -> None:
    """Remove models. A pulled file is deleted with the last model that uses it; imported files stay."""
    registry = open_registry(settings)
    for name in names:
        record = registry.remove(name)
        rows = [("removed", record.short_name)]
        print_fields(rows if record.is_owned else [*rows, ("still there", str(record.path))])
