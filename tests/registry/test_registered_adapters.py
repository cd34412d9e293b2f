"""Adapters beside the models: added, found, removed, and parts of models that were made with them."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from paper_models import inspect_paper, make_model

from mlxr.core.errors import InvalidRequest, ModelError, NameTaken, NotFound, RegistryError
from mlxr.registry import Changes, Registry
from mlxr.registry.catalogue import MIGRATIONS
from mlxr.registry.record import AdapterFacts


def inspect_adapter(path: Path, base: Path) -> AdapterFacts:
    """Return the facts of a paper adapter, which fits if the base is longer than it."""
    files = tuple(sorted(path.iterdir())) if path.is_dir() else (path,)
    if not all(file.is_file() for file in files):
        raise NotFound(f"{path}: no such adapter")
    if sum(file.stat().st_size for file in files) > base.stat().st_size:
        raise ModelError(f"{path}: is made for another model")
    return AdapterFacts("gguf", 8, 3, files)


@pytest.fixture
def registry(tmp_path: Path, model_file: Path) -> Registry:
    registry = Registry(tmp_path / "store", inspect=inspect_paper, inspect_adapter=inspect_adapter)
    registry.import_file(model_file, "base")
    return registry


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sql.gguf"
    path.write_bytes(b"adapter")
    return path


def test_added_found_and_removed(registry: Registry, file: Path) -> None:
    assert registry.adapters.list() == ()
    record = registry.adapters.add("sql", file, registry.get("base"))
    assert (record.base, record.rank, record.weights, record.size_bytes) == ("base", 8, 3, 7)
    assert registry.adapters.get("SQL") == registry.adapters.list()[0] == record
    registry.remove_adapter("sql")
    assert file.exists()
    for call in (registry.adapters.get, registry.remove_adapter):
        with pytest.raises(NotFound, match="'sql' not found"):
            call("sql")


def test_one_that_does_not_fit_or_changes_is_told(registry: Registry, file: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.gguf"
    long.write_bytes(bytes(10_000))
    with pytest.raises(ModelError, match="another model"):
        registry.adapters.add("long", long, registry.get("base"))
    registry.adapters.add("sql", file, registry.get("base"))
    file.write_bytes(b"another")
    assert "changed" in (registry.adapters.list()[0].problem or "")
    with pytest.raises(RegistryError, match=r"adapter sql: .* changed"):
        registry.adapters.get("sql")
    file.unlink()
    assert "No such file" in (registry.adapters.list()[0].problem or "")


def test_an_adapter_is_replaced_only_when_that_is_said(registry: Registry, file: Path) -> None:
    base = registry.get("base")
    registry.adapters.add("sql", file, base)
    other = file.with_name("other.gguf")
    other.write_bytes(b"adapter too")
    with pytest.raises(NameTaken, match="the adapter sql exists"):
        registry.adapters.add("SQL", other, base)
    assert registry.adapters.get("sql").path == file
    assert registry.adapters.add("sql", other, base, replaces=True).path == other


@pytest.mark.parametrize("name", ["", "a/b", "..", "@x", "a:b", "a b", "x" * 129, "\n"])
def test_names_that_could_be_anything_else_are_refused(name: str, registry: Registry, file: Path) -> None:
    with pytest.raises(InvalidRequest, match="name of an adapter"):
        registry.adapters.add(name, file, registry.get("base"))


def test_a_part_goes_with_the_last_model_that_has_it(registry: Registry, file: Path) -> None:
    base = registry.get("base")
    part = registry.adapters.make_part(file, base)
    one = registry.derive("one", base, Changes(adapter=part))
    two = registry.derive("two", base, Changes(adapter=registry.adapters.make_part(file, base)))
    assert one.digest != base.digest
    assert replace(one, name="").digest == two.digest
    assert registry.adapters.list() == ()
    assert registry.find_adapter_of(registry.get("one")) == registry.find_adapter_of(two) is not None
    registry.remove("one")
    found = registry.find_adapter_of(two)
    assert found is not None
    assert found.path == file
    registry.remove("two")
    with pytest.raises(RegistryError, match="create it again"):
        registry.find_adapter_of(two)


def test_uploaded_files_stay_as_long_as_somebody_has_them(registry: Registry, file: Path) -> None:
    digest = registry.make_blob(lambda out: out.write_bytes(file.read_bytes()))
    base = registry.get("base")
    part = registry.adapters.make_part({"a.gguf": f"sha256:{digest}"}, base)
    model = registry.derive("made", base, Changes(adapter=part))
    registry.copy("made", "again")
    registry.sweep(0.0)
    found = registry.find_adapter_of(model)
    assert found is not None
    assert (found.is_owned, found.path.read_bytes()) == (True, b"adapter")
    registry.remove("made")
    assert registry.blobs.path(digest).exists()
    registry.derive("again", base, Changes(), replaces=True)
    assert not registry.blobs.path(digest).exists()
    with pytest.raises(NotFound):
        registry.adapters.make_part({"a.gguf": digest}, base)


def test_a_catalogue_of_before_is_brought_up_to_date(tmp_path: Path, model_file: Path) -> None:
    (tmp_path / "old").mkdir()
    with sqlite3.connect(tmp_path / "old" / "catalogue.db") as db:
        for migrate in MIGRATIONS[:2]:
            migrate(db)
        db.execute("PRAGMA user_version = 2")
    db.close()
    registry = Registry(tmp_path / "old", inspect=inspect_paper, inspect_adapter=inspect_adapter)
    assert registry.adapters.list() == ()
    assert registry.import_file(model_file, "base").adapter is None
    assert make_model() == model_file.read_bytes()
