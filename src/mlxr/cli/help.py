"""`mlxr help`: what --help says, in another order of words."""

from __future__ import annotations

from typing import Annotated

import typer

Command = Annotated[str | None, typer.Argument(metavar="COMMAND", help="The command; without one, all are listed.")]


def help_(command: Command = None) -> None:
    """Explain a command. `mlxr help run` prints what `mlxr run --help` does."""
    from mlxr.cli.main import build_app

    arguments = ["--help"] if command is None else [command, "--help"]
    build_app(arguments)(args=arguments, prog_name="mlxr", standalone_mode=False)
