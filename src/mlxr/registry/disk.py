"""What a disk that takes nothing more means for the store: one error that names the folder and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxr.core.errors import NoSpace, RegistryError

REMEDY = "free space, let the folder be written, or name another one with the setting models_folder"
_TAKES_NOTHING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise NoSpace for what the block cannot write in `folder`; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKES_NOTHING:
            raise
        raise explain_disk(error, folder) from error


def explain_disk(error: OSError, folder: Path) -> RegistryError:
    """The error of the store for one of the system."""
    if error.errno in _TAKES_NOTHING:
        return NoSpace(f"{folder}: nothing can be written: {error.strerror}; {REMEDY}")
    return RegistryError(f"{folder}: cannot be used: {error.strerror or error}")
