"""`mlxr stop`: let a server unload a model."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxr.cli.flags import complete_models
from mlxr.cli.remote import ServerUrl, ask_server
from mlxr.cli.terminal import print_fields
from mlxr.core.settings import resolve

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The model.",
        autocompletion=complete_models,
    ),
]


def stop(model: Model, url: ServerUrl = None) -> None:
    """Unload a model from a server. Answers in progress end first; the next request loads it again."""
    ask_server(resolve(), url, "/api/generate", {"model": model, "keep_alive": 0, "stream": False}, timeout_s=None)
    print_fields([("stopped", model)])
