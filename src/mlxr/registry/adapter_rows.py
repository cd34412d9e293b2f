"""The rows of low-rank adapters in the catalogue, in the transaction that the caller has open."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mlxr.registry.record import AdapterRecord
from mlxr.registry.rows import put_files, read_files, to_ns, to_time

_PLAIN = ("name", "base", "digest", "size_bytes", "format", "rank", "weights")
_COLUMNS = (*_PLAIN, "path", "is_owned", "modified_ns", "is_part")
_INSERT = f"INSERT INTO adapters ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + c for c in _COLUMNS)})"


class AdapterRows:
    """The adapters of the catalogue that `db` is a connection to; `store` is where owned files lie."""

    def __init__(self, db: sqlite3.Connection, store: Path) -> None:
        self._db, self._store = db, store

    def list(self) -> tuple[AdapterRecord, ...]:
        """All adapters by name."""
        return tuple(map(self._read, self._db.execute("SELECT * FROM adapters ORDER BY name").fetchall()))

    def find(self, name: str) -> AdapterRecord | None:
        """The adapter of that name, in any case."""
        row = self._db.execute("SELECT * FROM adapters WHERE name = ?", (name,)).fetchone()
        return None if row is None else self._read(row)

    def put(self, record: AdapterRecord) -> None:
        """Add an adapter, or replace the one of that name."""
        self.delete(record.name)
        path = record.path.relative_to(self._store) if record.is_owned else record.path
        values = {column: getattr(record, column) for column in _PLAIN} | {
            "path": str(path),
            "is_owned": int(record.is_owned),
            "is_part": int(record.is_part),
            "modified_ns": to_ns(record.modified_at),
        }
        self._db.execute(_INSERT, values)
        put_files(self._db, "adapter", record.name, record.files)

    def delete(self, name: str) -> None:
        """Remove an adapter's rows."""
        self._db.execute("DELETE FROM adapters WHERE name = ?", (name,))

    def is_part_of_a_model(self, name: str) -> bool:
        """Whether a model was made with the adapter and is still there."""
        found = self._db.execute(
            "SELECT 1 FROM models WHERE json_valid(adapter) AND json_extract(adapter, '$[0]') = ? COLLATE NOCASE",
            (name,),
        )
        return found.fetchone() is not None

    def _read(self, row: sqlite3.Row) -> AdapterRecord:
        return AdapterRecord(
            **{column: row[column] for column in _PLAIN},
            path=self._store / row["path"],  # an absolute path stays what it is
            is_owned=bool(row["is_owned"]),
            is_part=bool(row["is_part"]),
            modified_at=to_time(row["modified_ns"]),
            files=read_files(self._db, "adapter", row["name"]),
        )
