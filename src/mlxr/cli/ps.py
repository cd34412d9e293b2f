"""`mlxr ps`: the models that a server has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mlxr.cli.flags import Json
from mlxr.cli.remote import ServerUrl, ask_server
from mlxr.cli.terminal import format_bytes, make_printable, print_json, print_note, print_table
from mlxr.core.settings import resolve


def ps(url: ServerUrl = None, json: Json = False) -> None:
    """Show the models that a server has loaded."""
    models: Sequence[Mapping[str, Any]] = ask_server(resolve(), url, "/api/ps").get("models", [])
    if json:
        print_json(models)
    elif not models:
        print_note("no model is loaded")
    else:
        print_table(("NAME", "ID", " SIZE", " CACHE", " CONTEXT", "UNTIL"), [_row(model) for model in models])


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    left_s = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    until = "for ever" if left_s > 10 * 365 * 86400 else f"{left_s / 60:.0f} minutes from now"
    size = format_bytes(int(model["size"]))
    name, digest = make_printable(model["name"]), str(model["digest"])[:12]
    return name, digest, size, _tell_cache(model), str(model["context_length"]), until


def _tell_cache(model: Mapping[str, Any]) -> str:
    """Return what the cache takes and may take, or that it is shared; blank where the server does not say."""
    if "cache_max_bytes" not in model:
        return "-"
    cache = f"{format_bytes(model['cache_in_use_bytes'])} of {format_bytes(model['cache_max_bytes'])}"
    return f"{cache}, shared" if model["shared_with"] else cache
