"""The catalogue when the disk or another process keeps it from being used as usual."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from paper_models import make_model, paper_registry

from mlxr.core.errors import NoSpace, RegistryError, Unavailable
from mlxr.registry import Registry
from mlxr.registry.registry import CATALOGUE_NAME


def connect(registry: Registry) -> sqlite3.Connection:
    return sqlite3.connect(registry.folder / CATALOGUE_NAME, isolation_level=None)


def forbid_side_files(registry: Registry) -> None:
    """Keep SQLite from making the files that it needs beside the database, as in a folder that may only be read."""
    (registry.folder / f"{CATALOGUE_NAME}-shm").mkdir()


def test_models_are_found_where_nothing_can_be_written(registry: Registry, model_file: Path) -> None:
    made = registry.import_file(model_file, "tiny")
    forbid_side_files(registry)
    assert registry.list() == (made,)
    assert registry.get("tiny") == made
    assert registry.adapters.list() == ()
    os.utime(model_file, ns=(1, 1))  # its digest has to be made again, and cannot be noted
    assert registry.get("tiny").problem is None
    with pytest.raises(NoSpace, match=r"cannot be changed: .+; free space, .* models_folder"):
        registry.copy("tiny", "other")


@pytest.mark.parametrize("torn", [False, True])
def test_a_log_that_nobody_wrote_back_is_read(registry: Registry, model_file: Path, tmp_path: Path, torn: bool) -> None:
    """A killed process leaves it so: finished transactions count, the rest of the log does not."""
    registry.import_file(model_file, "first")
    with closing(connect(registry)) as keeper:  # so that the log stays
        keeper.execute("SELECT * FROM models").fetchall()
        for number in range(12):
            registry.copy("first", f"copy{number}")
        registry.remove("copy3")
        left = paper_registry(tmp_path / "left")
        shutil.copytree(registry.folder, left.folder)
        shm = left.folder / f"{CATALOGUE_NAME}-shm"
        shm.unlink()
        log = left.folder / f"{CATALOGUE_NAME}-wal"
        assert log.stat().st_size > 0
        if torn:
            data = log.read_bytes()
            log.write_bytes(data[:-3] + bytes(3))
    expected = {record.name for record in registry.list()}
    forbid_side_files(left)
    found = {record.name for record in left.list()}
    shm.rmdir()
    assert found == {record.name for record in left.list()}, "SQLite itself reads the same"
    assert found == expected or torn


def test_an_older_catalogue_is_read_where_it_cannot_be_brought_up_to_date(registry: Registry, model_file: Path) -> None:
    registry.import_file(model_file, "tiny")
    with closing(connect(registry)) as db:
        db.execute("DROP TABLE adapter_files")
        db.execute("DROP TABLE adapters")
        db.execute("ALTER TABLE models DROP COLUMN adapter")
        db.execute("PRAGMA user_version = 2")
    forbid_side_files(registry)
    assert [record.short_name for record in registry.list()] == ["tiny"]


def test_a_catalogue_that_is_held_is_waited_for_only_as_long_as_asked(tmp_path: Path, model_file: Path) -> None:
    registry = paper_registry(tmp_path / "store", wait_s=0.05)
    made = registry.import_file(model_file, "tiny")
    with closing(connect(registry)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert registry.get("tiny") == made
        start_s = time.monotonic()
        with pytest.raises(Unavailable, match="held by another process; end that process, or try again"):
            registry.copy("tiny", "other")
        os.utime(model_file, ns=(1, 1))
        assert registry.get("tiny").problem is None  # what it noted otherwise can wait
        assert time.monotonic() - start_s < 20


DAMAGES = [
    ("parameters", "[[["),
    ("parameters", "[" * 100_000),
    ("parameters", "[1]"),
    ("parameters", '{"temperature": "hot"}'),
    ("messages", "[1, 2]"),
    ("messages", '[{"role": 1}]'),
    ("messages", "null"),
    ("capabilities", "null"),
    ("capabilities", "[[1]]"),
    ("adapter", "5"),
    ("adapter", '["only"]'),
    ("path", "a\0b"),
]


@pytest.mark.parametrize(("column", "value"), DAMAGES)
def test_a_damaged_row_is_a_model_with_a_problem(
    registry: Registry, model_file: Path, column: str, value: object
) -> None:
    registry.import_file(model_file, "good")
    registry.copy("good", "bad")
    with closing(connect(registry)) as db:
        db.execute(f"UPDATE models SET {column} = ? WHERE name LIKE 'bad%'", (value,))
    bad, good = registry.list()
    assert bad.problem is not None
    assert good.problem is None
    assert registry.get("good") == good
    with pytest.raises(RegistryError, match="bad: "):
        registry.get("bad")
    registry.remove("bad")
    assert registry.list() == (good,)


def test_text_that_is_no_unicode_spoils_no_list(registry: Registry, model_file: Path) -> None:
    registry.import_file(model_file, "good")
    with closing(connect(registry)) as db:
        db.execute("UPDATE models SET license = CAST(x'ff61' AS TEXT)")
    assert [record.license for record in registry.list()] == ["\ufffda"]


def test_a_full_disk_is_told_with_the_folder(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(NoSpace, match=r"blobs: nothing can be written: No space left .* free space"):
            registry.blobs.write(hashlib.sha256(make_model()).hexdigest(), [make_model()])
    assert list(registry.blobs.digests()) == []
    assert list(registry.blobs.folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(registry: Registry, model_file: Path) -> None:
    registry.folder.parent.mkdir(parents=True, exist_ok=True)
    registry.folder.write_text("in the place of the folder")
    with pytest.raises(RegistryError, match="store: cannot be used"):
        registry.import_file(model_file, "tiny")
