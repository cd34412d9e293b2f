"""The table of models, in SQLite: write-ahead log, short transactions, several processes and threads at once.

Knows rows and records, no files. Every call opens its own connection, so there is nothing to close and nothing that a
fork or a second thread could share by mistake. A process killed at any moment leaves the state before or after a
transaction, never between.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from mlxr.core.errors import RegistryError
from mlxr.registry.adapter_rows import AdapterRows
from mlxr.registry.migrations import MIGRATIONS
from mlxr.registry.record import AdapterRecord, AdapterRef, ModelRecord
from mlxr.registry.rows import put_files, read_files, to_ns, to_time

BUSY_PAUSE_S = 0.01
BUSY_TIMEOUT_S = 60.0
_COLUMNS = (
    "name",
    "digest",
    "path",
    "is_owned",
    "size_bytes",
    "format",
    "architecture",
    "parameters_count",
    "quantization",
    "context_tokens",
    "embedding_length",
    "modified_ns",
    "last_used_ns",
    "own_template",
    "capabilities",
    "template",
    "system",
    "parameters",
    "messages",
    "license",
    "from_name",
    "adapter",
)
_CONVERTED = {"path", "is_owned", "modified_ns", "last_used_ns", "capabilities", "parameters", "messages", "adapter"}
_INSERT = f"INSERT INTO models ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + c for c in _COLUMNS)})"


class Catalogue:
    """The catalogue in the file `path`. Reading one that does not exist finds nothing and makes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = path.parent

    def list(self) -> tuple[ModelRecord, ...]:
        """All models by name."""
        with self._open(must_exist=False) as db:
            if db is None:
                return ()
            db.execute("BEGIN")
            rows = db.execute("SELECT * FROM models ORDER BY name").fetchall()
            return tuple(self._read(db, row) for row in rows)

    def find(self, name: str) -> ModelRecord | None:
        """The model of that name, in any case."""
        with self._open(must_exist=False) as db:
            if db is None:
                return None
            db.execute("BEGIN")
            row = db.execute("SELECT * FROM models WHERE name = ?", (name,)).fetchone()
            return None if row is None else self._read(db, row)

    def list_adapters(self) -> tuple[AdapterRecord, ...]:
        """All adapters by name."""
        with self._open(must_exist=False) as db:
            return () if db is None else AdapterRows(db, self.store).list()

    def find_adapter(self, name: str) -> AdapterRecord | None:
        """The adapter of that name, in any case."""
        with self._open(must_exist=False) as db:
            return None if db is None else AdapterRows(db, self.store).find(name)

    @contextmanager
    def change(self) -> Iterator[Transaction]:
        """A transaction that keeps all other writers out until the block ends; an exception undoes it."""
        with self._open(must_exist=True) as db:
            assert db is not None
            db.execute("BEGIN IMMEDIATE")
            yield Transaction(self, db)
            db.execute("COMMIT")

    @contextmanager
    def _open(self, *, must_exist: bool) -> Iterator[sqlite3.Connection | None]:
        if not must_exist and not self.path.exists():
            yield None
            return
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
                db.row_factory = sqlite3.Row
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA synchronous = FULL")  # removed rows must be on disk before their files go
                self._migrate(db)
                yield db
        except sqlite3.Error as error:
            raise RegistryError(f"{self.path}: the catalogue of models cannot be used: {error}") from error

    def _migrate(self, db: sqlite3.Connection) -> None:
        version = _read_version(db)
        if version == len(MIGRATIONS):
            return
        if version > len(MIGRATIONS):
            raise RegistryError(
                f"{self.path}: the catalogue has version {version}, this mlxr knows up to {len(MIGRATIONS)}; "
                "install a newer mlxr"
            )
        _write_ahead(db)
        db.execute("BEGIN IMMEDIATE")
        for number in range(_read_version(db), len(MIGRATIONS)):  # read again: another process may have been first
            MIGRATIONS[number](db)
            db.execute(f"PRAGMA user_version = {number + 1}")
        db.execute("COMMIT")

    def _read(self, db: sqlite3.Connection, row: sqlite3.Row) -> ModelRecord:
        return ModelRecord(
            **{column: row[column] for column in _COLUMNS if column not in _CONVERTED},
            path=self.store / row["path"],  # an absolute path stays what it is
            is_owned=bool(row["is_owned"]),
            modified_at=to_time(row["modified_ns"]),
            last_used_at=None if row["last_used_ns"] is None else to_time(row["last_used_ns"]),
            capabilities=frozenset(json.loads(row["capabilities"])),
            parameters=json.loads(row["parameters"]),
            messages=tuple(json.loads(row["messages"])),
            adapter=None if row["adapter"] is None else AdapterRef(*json.loads(row["adapter"])),
            files=read_files(db, "model", row["name"]),
        )


class Transaction:
    """What can be done in one transaction."""

    def __init__(self, catalogue: Catalogue, db: sqlite3.Connection) -> None:
        self._catalogue, self._db = catalogue, db
        self.adapters = AdapterRows(db, catalogue.store)

    def find(self, name: str) -> ModelRecord | None:
        """The model of that name."""
        row = self._db.execute("SELECT * FROM models WHERE name = ?", (name,)).fetchone()
        return None if row is None else self._catalogue._read(self._db, row)

    def put(self, record: ModelRecord) -> None:
        """Add a model, or replace the one of that name."""
        self._db.execute("DELETE FROM models WHERE name = ?", (record.name,))
        self._db.execute(_INSERT, _to_row(record, self._catalogue.store))
        put_files(self._db, "model", record.name, record.files)

    def delete(self, name: str) -> None:
        """Remove a model's rows."""
        self._db.execute("DELETE FROM models WHERE name = ?", (name,))

    def mark_used(self, name: str, at: datetime) -> None:
        """Note that a model was used; nothing happens for a name that is gone."""
        self._db.execute("UPDATE models SET last_used_ns = ? WHERE name = ?", (to_ns(at), name))

    def unused(self, digests: Iterable[str]) -> list[str]:
        """Those of `digests` that no owned model and no owned adapter has among its files."""
        used = (
            "SELECT 1 FROM model_files f JOIN models m ON m.name = f.model WHERE m.is_owned AND f.sha256 = :digest "
            "UNION ALL "
            "SELECT 1 FROM adapter_files f JOIN adapters a ON a.name = f.adapter "
            "WHERE a.is_owned AND f.sha256 = :digest"
        )
        return [digest for digest in digests if self._db.execute(used, {"digest": digest}).fetchone() is None]

    def owned_paths(self) -> set[Path]:
        """What the owned models and adapters load."""
        rows = self._db.execute("SELECT path FROM models WHERE is_owned UNION SELECT path FROM adapters WHERE is_owned")
        return {self._catalogue.store / row["path"] for row in rows}


def _write_ahead(db: sqlite3.Connection) -> None:
    """Let readers and a writer work side by side. SQLite itself does not wait here for others that do the same."""
    end_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(BUSY_PAUSE_S)


def _read_version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _to_row(record: ModelRecord, store: Path) -> Mapping[str, object]:
    path = record.path.relative_to(store) if record.is_owned else record.path
    return {column: getattr(record, column) for column in _COLUMNS if column not in _CONVERTED} | {
        "path": str(path),
        "is_owned": int(record.is_owned),
        "modified_ns": to_ns(record.modified_at),
        "last_used_ns": None if record.last_used_at is None else to_ns(record.last_used_at),
        "capabilities": json.dumps(sorted(record.capabilities)),
        "parameters": json.dumps(dict(record.parameters)),
        "messages": json.dumps([dict(message) for message in record.messages]),
        "adapter": None if record.adapter is None else json.dumps([record.adapter.name, record.adapter.digest]),
    }
