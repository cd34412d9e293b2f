"""The service's names of what is wrong with a request, turned into the names that the dialect has for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mlxr.core.errors import InvalidRequest


@contextmanager
def spell_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InvalidRequest that names a field of `names` name what it stands for instead."""
    try:
        yield
    except InvalidRequest as error:
        if type(error) is not InvalidRequest or error.field not in names:
            raise
        raise InvalidRequest(names[error.field], error.reason) from None
