"""How the tables of the catalogue came to be what they are: one function per version, in order, never edited again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable


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
    """Removing a model asks who else uses its files."""
    db.execute("CREATE INDEX model_files_by_sha256 ON model_files (sha256)")


def create_adapters(db: sqlite3.Connection) -> None:
    """Low-rank adapters by name, with the columns of models, and the one that a model was made with as JSON."""
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
