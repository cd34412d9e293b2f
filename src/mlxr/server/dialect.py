"""A dialect: routes below some path prefixes, and how errors look there.

The application holds a tuple of them. Adding a dialect is a package with a router and a row in `app`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxr.server.errors import ServerError
from mlxr.server.routes import Router

RenderError = Callable[[ServerError, str], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """`render_error(error, request_id)` is the JSON body of an error below one of `prefixes`."""

    name: str
    prefixes: tuple[str, ...]
    router: Router
    render_error: RenderError


def find_dialect(dialects: Sequence[Dialect], path: str) -> Dialect:
    """The dialect that `path` belongs to: that with the longest prefix. One of them must have the prefix ""."""
    fitting = [
        (len(prefix), dialect)
        for dialect in dialects
        for prefix in dialect.prefixes
        if not prefix or path == prefix or path.startswith(prefix.rstrip("/") + "/")
    ]
    return max(fitting, key=lambda pair: pair[0])[1]
