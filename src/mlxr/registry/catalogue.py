"""The table of models, in SQLite: write-ahead log, short transactions, several processes and threads at once.

Knows rows and records, no files. Every call opens its own connection, so there is nothing to close and nothing that a
fork or a second thread could share by mistake. Reading needs nothing to be written: where SQLite cannot open the files,
as a disk is full or a folder may only be read, a copy in memory is read (`snapshot`). A process killed at any moment
leaves the state before or after a transaction, never between.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import NoReturn, TypeVar

from mlxr.core.errors import MlxrError, NoSpace, RegistryError, Unavailable
from mlxr.registry.adapter_rows import AdapterRows
from mlxr.registry.disk import REMEDY, explain_disk
from mlxr.registry.migrations import MIGRATIONS
from mlxr.registry.options import check_options
from mlxr.registry.record import AdapterRecord, AdapterRef, ModelFile, ModelRecord
from mlxr.registry.rows import put_files, read_files, to_ns, to_time
from mlxr.registry.snapshot import open_snapshot

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
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DISK_CODES = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
}
T = TypeVar("T")
_CONVERTED = {"path", "is_owned", "modified_ns", "last_used_ns", "capabilities", "parameters", "messages", "adapter"}
_INSERT = f"INSERT INTO models ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + c for c in _COLUMNS)})"


class Catalogue:
    """The catalogue in the file `path`. Reading one that does not exist finds nothing and makes nothing.

    A process that holds it is waited for up to `wait_s`.
    """

    def __init__(self, path: Path, wait_s: float = BUSY_TIMEOUT_S) -> None:
        self.path, self.wait_s = path, wait_s
        self.store = path.parent

    def list(self) -> tuple[ModelRecord, ...]:
        """All models by name."""

        def read(db: sqlite3.Connection) -> tuple[ModelRecord, ...]:
            rows = db.execute("SELECT * FROM models ORDER BY name").fetchall()
            return tuple(self._read(db, row) for row in rows)

        return self._look(read, ())

    def find(self, name: str) -> ModelRecord | None:
        """The model of that name, in any case."""

        def read(db: sqlite3.Connection) -> ModelRecord | None:
            row = db.execute("SELECT * FROM models WHERE name = ?", (name,)).fetchone()
            return None if row is None else self._read(db, row)

        return self._look(read, None)

    def list_adapters(self) -> tuple[AdapterRecord, ...]:
        """All adapters by name."""
        return self._look(lambda db: AdapterRows(db, self.store).list(), ())

    def find_adapter(self, name: str) -> AdapterRecord | None:
        """The adapter of that name, in any case."""
        return self._look(lambda db: AdapterRows(db, self.store).find(name), None)

    @contextmanager
    def change(self, wait_s: float | None = None) -> Iterator[Transaction]:
        """A transaction that keeps all other writers out until the block ends; an exception undoes it.

        Others are waited for as long as the catalogue says, or `wait_s`. Raises Unavailable or NoSpace.
        """
        try:
            self.store.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_disk(error, self.store) from error
        try:
            with closing(self._connect(self.wait_s if wait_s is None else wait_s)) as db:
                db.execute("BEGIN IMMEDIATE")
                yield Transaction(self, db)
                db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _look(self, read: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """What `read` finds, or `nothing` where there is no catalogue. Where nothing can be written a copy is read."""
        try:
            if not self.path.exists():
                return nothing
        except OSError as error:
            raise Unavailable(f"{self.path}: the catalogue of models cannot be read: {error.strerror}") from error
        try:
            with closing(self._connect(self.wait_s)) as db:
                db.execute("BEGIN")
                return read(db)
        except sqlite3.Error as error:
            if _code(error) not in _DISK_CODES:
                raise self._explain(error) from error
            problem = error
        try:
            with closing(open_snapshot(self.path)) as db:
                self._prepare(db)
                return read(db)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"{self.path}: the catalogue of models cannot be read: {problem}") from error

    def _connect(self, wait_s: float) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=wait_s, isolation_level=None)
        try:
            self._prepare(db, wait_s)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection, wait_s: float = 0.0) -> None:
        db.row_factory = sqlite3.Row
        db.text_factory = lambda data: data.decode(errors="replace")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = FULL")  # removed rows must be on disk before their files go
        self._migrate(db, wait_s)

    def _explain(self, error: sqlite3.Error) -> RegistryError:
        code = _code(error)
        if code in _BUSY_CODES:
            text = "the catalogue of models is held by another process; end that process, or try again"
            return Unavailable(f"{self.path}: {text}")
        if code in _DISK_CODES:
            return NoSpace(f"{self.path}: the catalogue of models cannot be changed: {error}; {REMEDY}")
        return Unavailable(f"{self.path}: the catalogue of models cannot be used: {error}")

    def _migrate(self, db: sqlite3.Connection, wait_s: float) -> None:
        version = _read_version(db)
        if version == len(MIGRATIONS):
            return
        if version > len(MIGRATIONS):
            raise RegistryError(
                f"{self.path}: the catalogue has version {version}, this mlxr knows up to {len(MIGRATIONS)}; "
                "install a newer mlxr"
            )
        _write_ahead(db, wait_s)
        db.execute("BEGIN IMMEDIATE")
        for number in range(_read_version(db), len(MIGRATIONS)):  # read again: another process may have been first
            MIGRATIONS[number](db)
            db.execute(f"PRAGMA user_version = {number + 1}")
        db.execute("COMMIT")

    def _read(self, db: sqlite3.Connection, row: sqlite3.Row) -> ModelRecord:
        """The record of a row; of one that is damaged, what can be read, with its problem."""
        files = read_files(db, "model", row["name"])
        try:
            return self._parse(row, files)
        except (ValueError, TypeError, OverflowError, OSError, RecursionError, MlxrError) as error:
            reason = " ".join(str(error).split())[:200]
            return ModelRecord(
                **{column: row[column] for column in _COLUMNS if column not in _CONVERTED},
                path=self.path,
                is_owned=bool(row["is_owned"]),
                modified_at=to_time(0),
                last_used_at=None,
                capabilities=frozenset(),
                files=files,
                problem=f"its row in {self.path} is damaged ({reason}); remove the model and make it again",
            )

    def _parse(self, row: sqlite3.Row, files: tuple[ModelFile, ...]) -> ModelRecord:
        parameters, messages = json.loads(row["parameters"]), json.loads(row["messages"])
        check_options(parameters if isinstance(parameters, dict) else _complain("parameters"))
        texts = [text for message in messages for text in (*message, *message.values())]
        capabilities = json.loads(row["capabilities"])
        if not all(isinstance(text, str) for text in (*texts, *capabilities)):
            _complain("messages and capabilities")
        return ModelRecord(
            **{column: row[column] for column in _COLUMNS if column not in _CONVERTED},
            path=self.store / row["path"],  # an absolute path stays what it is
            is_owned=bool(row["is_owned"]),
            modified_at=to_time(row["modified_ns"]),
            last_used_at=None if row["last_used_ns"] is None else to_time(row["last_used_ns"]),
            capabilities=frozenset(capabilities),
            parameters=parameters,
            messages=tuple(messages),
            adapter=None if row["adapter"] is None else AdapterRef(*map(str, json.loads(row["adapter"]))),
            files=files,
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


def _complain(what: str) -> NoReturn:
    raise ValueError(f"{what} are not what they must be")


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary code of an error."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _write_ahead(db: sqlite3.Connection, wait_s: float) -> None:
    """Let readers and a writer work side by side. SQLite itself does not wait here for others that do the same."""
    end_s = time.monotonic() + wait_s
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
