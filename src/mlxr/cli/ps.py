"""`mlxr ps`: the models that a server has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx
import typer

from mlxr.cli.flags import Json
from mlxr.cli.terminal import format_bytes, make_printable, print_json, print_note, print_table
from mlxr.core.errors import MlxrError
from mlxr.core.settings import Settings, resolve

TIMEOUT_S = 10.0
Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The server; default: the host and port of the settings.")
]


def ps(url: Url = None, json: Json = False) -> None:
    """Show the models that a server has loaded."""
    settings = resolve()
    models = _ask(settings, url)
    if json:
        print_json(models)
    elif not models:
        print_note("no model is loaded")
    else:
        print_table(("NAME", "ID", " SIZE", " CONTEXT", "UNTIL"), [_row(model) for model in models])


def _ask(settings: Settings, url: str | None) -> Sequence[Mapping[str, Any]]:
    socket = None if url is not None else settings.unix_socket
    base_url = url or ("http://localhost" if socket else f"http://{settings.host}:{settings.port}")
    headers = {"Authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
    transport = None if socket is None else httpx.HTTPTransport(uds=socket)
    try:
        with httpx.Client(base_url=base_url, transport=transport, headers=headers, timeout=TIMEOUT_S) as client:
            response = client.get("/api/ps")
            response.raise_for_status()
            models: Sequence[Mapping[str, Any]] = response.json()["models"]
            return models
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise MlxrError(f"{socket or base_url}: no server of ours answers there: {error}") from error


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    left_s = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    until = "for ever" if left_s > 10 * 365 * 86400 else f"{left_s / 60:.0f} minutes from now"
    size = format_bytes(int(model["size"]))
    return make_printable(model["name"]), str(model["digest"])[:12], size, str(model["context_length"]), until
