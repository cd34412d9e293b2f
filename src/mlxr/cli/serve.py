"""`mlxr serve`: the HTTP server, until a signal ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

import mlxr
from mlxr.cli.flags import ServerSettings
from mlxr.cli.terminal import print_note
from mlxr.core.settings import Settings
from mlxr.server.lifecycle import Lifecycle
from mlxr.server.listen import build_app, name_address, open_socket
from mlxr.server.listen import serve as serve_app
from mlxr.server.logs import start_logging
from mlxr.server.origins import is_loopback
from mlxr.server.served import ServedModels
from mlxr.server.tracing import start_tracing

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="The model that answers requests that name none; the same as --default-model."
    ),
]


def serve(settings: ServerSettings, model: Model = None) -> None:
    """Answer OpenAI, Ollama and Anthropic clients over HTTP. Settings come from flags, variables and a file."""
    if model is not None:
        settings = replace(settings, default_model=model)
    start_logging(settings)
    if settings.tracing:
        start_tracing()
    app = build_app(settings)
    app.state.served.find(settings.default_model)  # a wrong name shall end the command, not every request
    listener = open_socket(settings)
    print_note(describe(settings, name_address(listener)))
    served = app.state.served
    serve_app(app, settings, [listener], lambda lifecycle: print_note(describe_ready(settings, served, lifecycle)))


def describe(settings: Settings, address: str) -> str:
    """The first line, and a warning where strangers may ask."""
    text = f"mlxr {mlxr.__version__} listens on {address}: /v1 for OpenAI and Anthropic clients, /api for Ollama's"
    has_keys = bool(settings.api_keys or settings.api_keys_file)
    if has_keys or settings.unix_socket is not None or is_loopback(settings.host):
        return text
    return f"{text}\nwarning: everybody who reaches this address may ask, as there are no api_keys"


def describe_ready(settings: Settings, served: ServedModels, lifecycle: Lifecycle) -> str:
    """The second line: the models that are loaded, by the names that requests use."""
    if lifecycle.problem is not None:
        return f"not ready: {lifecycle.problem}"
    names = dict.fromkeys(served.find(name).short_name for name in (settings.default_model, *settings.pinned_models))
    return f"ready: {', '.join(names)}"
