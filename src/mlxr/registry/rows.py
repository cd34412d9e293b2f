"""The files of models and adapters as rows, and times as the catalogue keeps them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from mlxr.registry.record import ModelFile

Kind = Literal["model", "adapter"]


def put_files(db: sqlite3.Connection, kind: Kind, name: str, files: Sequence[ModelFile]) -> None:
    """Add the files of a new row of that name."""
    db.executemany(
        f"INSERT INTO {kind}_files VALUES (?, ?, ?, ?, ?, ?)",
        [
            (name, position, file.name, file.sha256, file.size_bytes, file.changed_ns)
            for position, file in enumerate(files)
        ],
    )


def read_files(db: sqlite3.Connection, kind: Kind, name: str) -> tuple[ModelFile, ...]:
    """The files of the row of that name, in their order."""
    found = db.execute(
        f"SELECT name, sha256, size_bytes, changed_ns FROM {kind}_files WHERE {kind} = ? ORDER BY position", (name,)
    )
    return tuple(ModelFile(*file) for file in found)


def to_ns(moment: datetime) -> int:
    """A time as the catalogue keeps it: nanoseconds since 1970."""
    return int(moment.timestamp() * 1e6) * 1000


def to_time(nanoseconds: int) -> datetime:
    """The time that the catalogue keeps as `nanoseconds`."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
