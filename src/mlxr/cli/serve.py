"""`mlxr serve`: the HTTP server, until a signal ends it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import webbrowser
from dataclasses import replace
from typing import Annotated

import numpy  # noqa: F401 -- here, as deep in nested imports each call maps a new part of Python's stack (20 ms)
import typer
from starlette.applications import Starlette

import mlxr
from mlxr.cli.flags import ServerSettings
from mlxr.cli.terminal import print_note
from mlxr.core.errors import NotFound, SettingError
from mlxr.core.memory import share_heap
from mlxr.core.settings import Settings
from mlxr.server.access import is_loopback
from mlxr.server.activity import start_logging, start_tracing
from mlxr.server.listen import build_app, name_address, open_socket
from mlxr.server.listen import serve as serve_app
from mlxr.server.model_names import ServedModels
from mlxr.server.parts import Lifecycle
from mlxr.service.catalogue import DefaultModel
from mlxr.service.chat_templates import check_template

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="The model that answers requests that name none; the same as --default-model."
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser once the models are loaded.")]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        help="A low-rank adapter (LoRA) that requests may name; may be given several times. See --adapters.",
    ),
]

logger = logging.getLogger("mlxr.serve")
SWITCH_S = 0.001  # after which a waiting thread gets the interpreter; a step of the engine takes it some six times


def serve(settings: ServerSettings, model: Model = None, open_page: Open = False, adapter: Adapter = None) -> None:
    """Answer OpenAI, Ollama and Anthropic clients over HTTP. Settings come from flags, variables and a file."""
    if model is not None:
        settings = replace(settings, default_model=model)
    settings = replace(settings, adapters=(*settings.adapters, *(adapter or ())))
    check_template(settings)
    share_heap()
    sys.setswitchinterval(SWITCH_S)
    start_logging(settings)
    if settings.tracing:
        start_tracing()
    app = build_app(settings)
    default = app.state.parts.served.explain_default()
    try:
        app.state.parts.served.find(default.name)  # a wrong name ends the command, not every request
    except NotFound as error:
        from mlxr.cli.pull import offer

        offer(default.name, settings, error)
    app.state.parts.served.adapters.read_settings()
    if open_page:
        check_page(app, settings)
    listener = open_socket(settings)
    address = name_address(listener)
    tell(settings, describe(settings, address))
    tell(settings, describe_default(default))
    served = app.state.parts.served

    def on_ready(lifecycle: Lifecycle) -> None:
        tell(settings, describe_ready(settings, served, lifecycle))
        if open_page and lifecycle.is_ready:  # on a thread, as some browsers return only when they are closed
            threading.Thread(target=open_browser, args=(name_local(address),), daemon=True).start()

    serve_app(app, settings, [listener], on_ready)
    logger.info("the server has ended")
    if app.state.parts.pool.has_given_up:
        # A thread is still in native code, which must not find the interpreter gone.
        sys.stderr.flush()
        os._exit(0)


def tell(settings: Settings, text: str) -> None:
    """Print lines for the user who started the server; if the log is JSON, as records of the log."""
    for line in text.splitlines():
        logger.info(line) if settings.log_format == "json" else print_note(line)


def check_page(app: Starlette, settings: Settings) -> None:
    """Raise SettingError if no browser could open the page."""
    if settings.unix_socket is not None:
        raise SettingError("--open: no browser reaches a Unix socket; leave out --unix-socket")
    if not settings.page:
        raise SettingError("--open: the page is turned off; leave out --page false")
    if app.state.parts.page is None:
        raise SettingError("--open: the page was not built; run `make page` in the sources")


def open_browser(address: str) -> None:
    """Open the page, or print its address."""
    if not webbrowser.open(address):
        print_note(f"no browser was found; the page is at {address}")


def name_local(address: str) -> str:
    """Return the address of a server for browsers on this machine, also if it listens on every address."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def describe(settings: Settings, address: str) -> str:
    """Return the first line, with a warning if strangers may ask."""
    what = "a page for browsers, /v1 for OpenAI and Anthropic clients, /api for Ollama's"
    text = f"mlxr {mlxr.__version__} listens on {address}: {what}"
    has_keys = bool(settings.api_keys or settings.api_keys_file)
    if has_keys or settings.unix_socket is not None or is_loopback(settings.host):
        return text
    return f"{text}\nwarning: everybody who reaches this address may ask, as there are no api_keys"


def describe_default(default: DefaultModel) -> str:
    """Return the line that names the default model, and the reason."""
    return f"default model: {default.name}, as {default.reason}; --default-model names another one"


def describe_ready(settings: Settings, served: ServedModels, lifecycle: Lifecycle) -> str:
    """Return the second line: the loaded models, by the names that requests use."""
    if lifecycle.problem is not None:
        return f"not ready: {lifecycle.problem}"
    names = dict.fromkeys(served.find(name).short_name for name in (served.find_default(), *settings.pinned_models))
    return f"ready: {', '.join(names)}"
