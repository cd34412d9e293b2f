"""The service's names of what is wrong with a request, turned into the names that the dialect has for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mlxr.core.errors import ContextFull, InvalidRequest


@contextmanager
def spell_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InvalidRequest that names a field of `names`, or a part of one, name what that stands for instead."""
    try:
        yield
    except InvalidRequest as error:
        field = error.field if error.field in names else re.split(r"[.\[]", error.field, maxsplit=1)[0]
        if type(error) not in (InvalidRequest, ContextFull) or field not in names:
            raise
        raise error.rename(names[field]) from None
