"""The table of models, in SQLite: write-ahead log, short transactions, several processes and threads at once.

Knows rows and records, no files. Every call opens its own connection, so there is nothing to close and nothing that a
fork or a second thread could share by mistake. Reading works where nothing can be written: if SQLite cannot open the
files because the disk is full or the folder is read-only, a copy in memory is read (`open_snapshot`). A process killed
at any moment leaves the state before or after a transaction, never between.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from mlxr.core.errors import MlxrError, NoSpace, RegistryError, Unavailable
from mlxr.registry.blobs import REMEDY, explain_disk
from mlxr.registry.modelfile import check_options
from mlxr.registry.record import AdapterRecord, AdapterRef, ModelFile, ModelRecord


def create_models(db: sqlite3.Connection) -> None:
    """Models by name, and their files in order.

    Times are nanoseconds since 1970. `path` is relative to the store for owned models, absolute for others.
    """
    db.execute(
        """CREATE TABLE models (
            name TEXT PRIMARY KEY COLLATE NOCASE, digest TEXT NOT NULL, path TEXT NOT NULL, is_owned INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL, format TEXT NOT NULL, architecture TEXT NOT NULL,
            parameters_count INTEGER NOT NULL, quantization TEXT NOT NULL, context_tokens INTEGER NOT NULL,
            embedding_length INTEGER NOT NULL, modified_ns INTEGER NOT NULL, last_used_ns INTEGER,
            own_template TEXT NOT NULL, capabilities TEXT NOT NULL, template TEXT, system TEXT,
            parameters TEXT NOT NULL, messages TEXT NOT NULL, license TEXT NOT NULL, from_name TEXT
        ) STRICT"""
    )
    db.execute(
        """CREATE TABLE model_files (
            model TEXT NOT NULL COLLATE NOCASE REFERENCES models(name) ON DELETE CASCADE ON UPDATE CASCADE,
            position INTEGER NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL, size_bytes INTEGER NOT NULL,
            changed_ns INTEGER NOT NULL, PRIMARY KEY (model, position)
        ) STRICT, WITHOUT ROWID"""
    )


def index_files_by_digest(db: sqlite3.Connection) -> None:
    """Index files by digest: before a model's files are removed, we look for others that use them."""
    db.execute("CREATE INDEX model_files_by_sha256 ON model_files (sha256)")


def create_adapters(db: sqlite3.Connection) -> None:
    """Low-rank adapters by name, with the columns of models; a model's `adapter` is JSON that names its adapter."""
    db.execute(
        """CREATE TABLE adapters (
            name TEXT PRIMARY KEY COLLATE NOCASE, base TEXT NOT NULL, digest TEXT NOT NULL, path TEXT NOT NULL,
            is_owned INTEGER NOT NULL, size_bytes INTEGER NOT NULL, format TEXT NOT NULL, rank INTEGER NOT NULL,
            weights INTEGER NOT NULL, modified_ns INTEGER NOT NULL, is_part INTEGER NOT NULL
        ) STRICT"""
    )
    db.execute(
        """CREATE TABLE adapter_files (
            adapter TEXT NOT NULL COLLATE NOCASE REFERENCES adapters(name) ON DELETE CASCADE ON UPDATE CASCADE,
            position INTEGER NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL, size_bytes INTEGER NOT NULL,
            changed_ns INTEGER NOT NULL, PRIMARY KEY (adapter, position)
        ) STRICT, WITHOUT ROWID"""
    )
    db.execute("CREATE INDEX adapter_files_by_sha256 ON adapter_files (sha256)")
    db.execute("ALTER TABLE models ADD COLUMN adapter TEXT")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (create_models, index_files_by_digest, create_adapters)


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


_PLAIN = ("name", "base", "digest", "size_bytes", "format", "rank", "weights")
_ADAPTER_COLUMNS = (*_PLAIN, "path", "is_owned", "modified_ns", "is_part")
_INSERT_ADAPTER = (
    f"INSERT INTO adapters ({', '.join(_ADAPTER_COLUMNS)}) VALUES ({', '.join(':' + c for c in _ADAPTER_COLUMNS)})"
)


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
        self._db.execute(_INSERT_ADAPTER, values)
        put_files(self._db, "adapter", record.name, record.files)

    def delete(self, name: str) -> None:
        """Remove an adapter's rows."""
        self._db.execute("DELETE FROM adapters WHERE name = ?", (name,))

    def is_part_of_a_model(self, name: str) -> bool:
        """Return True if a model that was made with the adapter is still there."""
        found = self._db.execute(
            "SELECT 1 FROM models WHERE json_valid(adapter) AND json_extract(adapter, '$[0]') = ? COLLATE NOCASE",
            (name,),
        )
        return found.fetchone() is not None

    def _read(self, row: sqlite3.Row) -> AdapterRecord:
        return AdapterRecord(
            **{column: row[column] for column in _PLAIN},
            path=self._store / row["path"],  # an absolute path stays unchanged
            is_owned=bool(row["is_owned"]),
            is_part=bool(row["is_part"]),
            modified_at=to_time(row["modified_ns"]),
            files=read_files(self._db, "adapter", row["name"]),
        )


MAX_BYTES = 1 << 28
MAX_TRIES = 8
_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
_BIG_ENDIAN_SUMS = 0x377F0683
_MAGICS = (0x377F0682, _BIG_ENDIAN_SUMS)


def open_snapshot(path: Path) -> sqlite3.Connection:
    """A copy in memory of the database at `path` after its last finished transaction; changes to it are lost.

    Raises OSError for files that cannot be read, or change all the time.
    """
    data, log = _read_both(path)
    image = bytearray(data)
    _apply(image, log)
    image[18:20] = b"\x01\x01"  # a database in memory has no log
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.deserialize(bytes(image))
    return db


def _read_both(path: Path) -> tuple[bytes, bytes]:
    """Read the database and its log in one state: neither changed meanwhile."""
    beside = path.with_name(f"{path.name}-wal")
    for _ in range(MAX_TRIES):
        before = [_stamp(path), _stamp(beside)]
        if sum(size for size, _ in before) > MAX_BYTES:
            raise OSError(f"{path} is too large to be read into memory")
        data = path.read_bytes()
        try:
            log = beside.read_bytes()
        except FileNotFoundError:
            log = b""
        if before == [_stamp(path), _stamp(beside)]:
            return data, log
    raise OSError(f"{path} changes all the time")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _apply(image: bytearray, log: bytes) -> None:
    """Put the pages of all finished transactions in the log into the database; what follows a torn frame is old."""
    if len(log) < _HEADER.size:
        return
    magic, _, page_size, _, *salts, sum_0, sum_1 = _HEADER.unpack_from(log)
    order = ">" if magic == _BIG_ENDIAN_SUMS else "<"
    if magic not in _MAGICS or page_size < 512 or _add(log[:24], order, (0, 0)) != (sum_0, sum_1):
        return
    sums = sum_0, sum_1
    pages: dict[int, bytes] = {}
    frame_bytes = _FRAME.size + page_size
    for start in range(_HEADER.size, len(log) - frame_bytes + 1, frame_bytes):
        number, pages_after, salt_0, salt_1, *stated = _FRAME.unpack_from(log, start)
        page = log[start + _FRAME.size : start + frame_bytes]
        sums = _add(log[start : start + 8] + page, order, sums)
        if [salt_0, salt_1] != salts or list(sums) != stated:
            return
        pages[number] = page
        if pages_after:  # the transaction ends
            image.extend(bytes(max(0, pages_after * page_size - len(image))))
            for place, content in pages.items():
                image[(place - 1) * page_size : place * page_size] = content
            del image[pages_after * page_size :]
            pages.clear()


def _add(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """Return the running checksum of the log after `data`."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second


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

    If another process holds it, calls wait for up to `wait_s`.
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

        It waits for other writers up to `wait_s`, by default the catalogue's. Raises Unavailable or NoSpace.
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
        """The result of `read`, or `nothing` if there is no catalogue. Reads a copy if nothing can be written."""
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
        """The record of a row; if the row is damaged, the fields that can be read, with its `problem`."""
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
            path=self.store / row["path"],  # an absolute path stays unchanged
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
    """An open transaction: the changes that the catalogue can make."""

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
        """The paths that the owned models and adapters are loaded from."""
        rows = self._db.execute("SELECT path FROM models WHERE is_owned UNION SELECT path FROM adapters WHERE is_owned")
        return {self._catalogue.store / row["path"] for row in rows}


def _complain(what: str) -> NoReturn:
    raise ValueError(f"{what} are not what they must be")


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary code of an error."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _write_ahead(db: sqlite3.Connection, wait_s: float) -> None:
    """Let readers and a writer work side by side. SQLite does not wait by itself for another process that does this."""
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
