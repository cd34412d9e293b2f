"""Questions to a running server that are no conversations: what is loaded, what to unload, vectors of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mlxr.cli.remote import EXACT, find_own_key
from mlxr.core.errors import MlxrError
from mlxr.core.sampling import EVERYDAY
from mlxr.core.settings import Settings

TIMEOUT_S = 10.0
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The server (http://host:port); default: the host and port of the settings."
    ),
]


def ask_server(
    settings: Settings,
    url: str | None,
    path: str,
    body: dict[str, object] | None = None,
    *,
    timeout_s: float | None = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the server's answer to a POST with `body`, or to a GET without one; None as `timeout_s` waits for ever.

    `url` is the server's address, None that of the settings. Raises MlxrError with what the server says, or where
    none answers.
    """
    import httpx

    socket = settings.unix_socket if url is None else None
    if url is not None and url.startswith("unix:"):
        socket, url = url.removeprefix("unix:"), None
    base_url = url or ("http://localhost" if socket else f"http://{settings.host}:{settings.port}")
    key = find_own_key(settings)
    headers = EXACT if key is None else {**EXACT, "Authorization": f"Bearer {key}"}
    if socket is not None and not Path(socket).is_socket():
        raise MlxrError(f"{socket}: no server of ours answers there: there is no socket")
    transport = None if socket is None else httpx.HTTPTransport(uds=socket)
    base_url = base_url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base_url, transport=transport, headers=headers, timeout=timeout_s) as client:
            response = client.get(path) if body is None else client.post(path, json=body)
            reply: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise MlxrError(f"{socket or base_url}: no server of ours answers there: {error}") from error
    if response.status_code != 200:
        raise MlxrError(f"{socket or base_url}: {_read_error(reply) or f'HTTP status {response.status_code}'}")
    return reply


def ask_parameters(settings: Settings, url: str, model: str | None) -> Mapping[str, object]:
    """The parameters that were set on a server's model (None: its default model), under Ollama's names.

    Where the server does not say, they are what people expect.
    """
    try:
        model = model or str(ask_server(settings, url, "/v1/admin/info").get("default_model"))
        text = ask_server(settings, url, "/api/show", {"model": model}).get("parameters")
    except MlxrError:  # whoever asks the model for an answer hears the reason
        return EVERYDAY
    found = dict(_ask_sampling(settings, url, model))
    for line in str(text or "").splitlines():
        name, _, value = line.partition(" ")
        parsed = json.loads(value)
        earlier = found.get(name, [])
        found[name] = [*earlier, parsed] if isinstance(earlier, list) and isinstance(parsed, str) else parsed
    return found


def _ask_sampling(settings: Settings, url: str, model: str) -> Mapping[str, object]:
    """Return the sampling that the server states for answers that people read; nothing from other servers than ours."""
    try:
        values = ask_server(settings, url, f"/v1/admin/models/{quote(model, safe='')}/sampling")
    except MlxrError:
        return EVERYDAY
    return {name: values[name] for name in EVERYDAY if name in values}


def _read_error(reply: object) -> str | None:
    """The message of an error in OpenAI's or Ollama's form."""
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
