"""The registry's front door: import, add, derive, copy, remove, and files that it must not touch or follow."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from paper_models import TOWER, inspect_paper, make_model, paper_registry

from mlxr.core.errors import FormatError, InvalidRequest, NameTaken, NotFound, RegistryError
from mlxr.registry import Changes, ModelFacts, Registry, blobs
from mlxr.registry.blobs import hash_files
from mlxr.registry.catalogue import MIGRATIONS, Transaction
from mlxr.registry.record import ModelFile, ModelRecord


def store(registry: Registry, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    registry.blobs.write(digest, [data[:100], data[100:]])
    return digest


def names(registry: Registry) -> list[str]:
    return [record.name for record in registry.list()]


def test_an_empty_registry_makes_nothing(registry: Registry) -> None:
    assert registry.list() == ()
    with pytest.raises(NotFound, match="mlxr pull"):
        registry.get("nothing")
    registry.sweep()
    assert registry.store_bytes() == 0
    assert not registry.folder.exists()


def test_import_references_the_file(registry: Registry, model_file: Path) -> None:
    seen: list[tuple[int, int]] = []
    record = registry.import_file(model_file, progress=lambda done, total: seen.append((done, total)))
    assert record.name == "Tiny-1.1B.Q4_K_M:latest"
    assert registry.get("tiny-1.1b.q4_k_m") == record
    assert (record.path, record.is_owned, record.parameter_size) == (model_file, False, "1.1B")
    size = model_file.stat().st_size
    assert seen[-1] == (size, size)
    assert record.files[0].sha256 == hashlib.sha256(model_file.read_bytes()).hexdigest()
    registry.remove(record.name)
    assert model_file.exists(), "a file of the user's was deleted"
    assert registry.list() == ()


def test_files_that_change_are_refused(registry: Registry, model_file: Path) -> None:
    registry.import_file(model_file, "mine")
    content = model_file.read_bytes()
    for other in (content[:-1] + bytes([content[-1] ^ 1]), content + b"x"):
        model_file.write_bytes(other)
        os.utime(model_file, ns=(0, 10**18))
        with pytest.raises(RegistryError, match="changed since it was imported"):
            registry.get("mine")
        assert "changed" in (registry.list()[0].problem or "")
    model_file.write_bytes(content)
    assert registry.get("mine").problem is None
    model_file.unlink()
    with pytest.raises(RegistryError, match="No such file"):
        registry.get("mine")
    registry.remove("mine")
    assert registry.list() == ()


def test_files_of_another_time_are_read_once(
    registry: Registry, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = registry.import_file(model_file, "mine")
    read: list[Path] = []

    def note(paths: list[Path]) -> tuple[ModelFile, ...]:
        read.extend(paths)
        return hash_files(paths)

    monkeypatch.setattr(blobs, "hash_files", note)
    os.utime(model_file, ns=(0, 10**18))
    found = registry.get("mine")
    assert found.files[0].changed_ns == 10**18
    assert found.digest == record.digest
    again = Registry(registry.folder, inspect=registry._inspect)
    assert again.get("mine") == found == registry.list()[0]
    assert read == [model_file]


def test_a_half_file_is_not_imported(registry: Registry, model_file: Path) -> None:
    model_file.write_bytes(make_model()[:-1])
    with pytest.raises(FormatError, match="not whole"):
        registry.import_file(model_file)
    assert registry.list() == ()


def test_blobs_become_a_model_and_go_with_the_last_one(registry: Registry) -> None:
    digest = store(registry, make_model())
    record = registry.add("a", {"m.gguf": f"sha256:{digest}"}, Changes(system="Be brief."))
    assert record.path == registry.blobs.path(digest)
    assert (record.is_owned, record.system) == (True, "Be brief.")
    registry.sweep(min_age_s=0)
    assert registry.blobs.has(digest), "a blob that is in use was swept away"
    assert registry.copy("a", "b").digest == record.digest
    derived = registry.derive("c", registry.get("b"), Changes(parameters={"temperature": 0.5}))
    assert derived.digest != record.digest
    assert (derived.from_name, derived.system, derived.parameters) == ("b", "Be brief.", {"temperature": 0.5})
    for name, left in (("a", True), ("c", True), ("b", False)):
        registry.remove(name)
        assert registry.blobs.has(digest) is left
    assert registry.store_bytes() == 0


def test_what_a_name_had_before_goes(registry: Registry) -> None:
    old, new = store(registry, make_model(1)), store(registry, make_model(2))
    registry.add("a", {"m.gguf": old})
    registry.add("A", {"m.gguf": new}, replaces=True)
    assert not registry.blobs.has(old)
    assert names(registry) == ["A:latest"]


def test_a_name_that_is_taken_is_refused(registry: Registry, model_file: Path) -> None:
    old, new = store(registry, make_model(1)), store(registry, make_model(2))
    kept = registry.add("a", {"m.gguf": old})
    registry.import_file(model_file, "mine")
    changed = Changes(system="x")
    replacements = [
        lambda replaces: registry.add("a", {"m.gguf": new}, replaces=replaces),
        lambda replaces: registry.import_file(model_file, "A", replaces=replaces),
        lambda replaces: registry.copy("mine", "a", replaces=replaces),
        lambda replaces: registry.derive("a", registry.get("a"), changed, replaces=replaces),
    ]
    for replace_it in replacements:
        with pytest.raises(NameTaken, match=r"a exists; .*--force"):
            replace_it(False)
        assert registry.get("a") == kept
        assert registry.blobs.has(old)
    registry.copy("a", "a")  # nothing would be lost
    registry.add("a", {"m.gguf": old})
    registry.add("a", {"renamed.gguf": old})
    model_file.write_bytes(make_model(3))
    assert registry.import_file(model_file, "mine").files[0].sha256 == hashlib.sha256(make_model(3)).hexdigest()
    registry.derive("set", registry.get("mine"), changed)
    with pytest.raises(NameTaken):  # the system message would be lost
        registry.import_file(model_file, "set")
    for replace_it in replacements:
        replace_it(True)
    assert not registry.blobs.has(old)


def test_a_model_stays_until_the_one_in_its_place_is_whole(
    tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "store", inspect=inspect_paper, builtin={"demo": model_file})
    digest = store(registry, make_model(1))
    kept = registry.add("a", {"m.gguf": digest})
    put = Transaction.put

    def die(transaction: Transaction, record: ModelRecord) -> None:
        put(transaction, record)
        if record.system is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Transaction, "put", die)
    for source in (registry.get("demo"), registry.find(model_file)):  # files that no catalogue has yet
        with pytest.raises(KeyboardInterrupt):
            registry.derive("a", source, Changes(system="x"), replaces=True)
        assert registry.get("a") == kept
        assert registry.blobs.has(digest)


def test_split_files_and_folders_keep_their_names(registry: Registry) -> None:
    parts = {f"m-0000{n}-of-00002.gguf": store(registry, make_model(n)) for n in (1, 2)}
    record = registry.add("split", parts)
    assert record.path.name == "m-00001-of-00002.gguf"
    assert len(inspect_paper(record.path).files) == 2
    folder = registry.add("folder", {"config.json": store(registry, b"{}\n"), "model.safetensors": parts.popitem()[1]})
    assert (folder.format, sorted(entry.name for entry in folder.path.iterdir())) == (
        "safetensors",
        ["config.json", "model.safetensors"],
    )
    registry.remove("split")
    assert not record.path.parent.exists()
    assert inspect_paper(registry.get("folder").path)
    registry.remove("folder")
    assert list(registry.blobs.digests()) == []
    assert list((registry.folder / "bundles").iterdir()) == []


@pytest.mark.parametrize("name", ["../m.gguf", "/etc/passwd", "a/b.gguf", "..", ".m.gguf", "", "a\0b", "m\n.gguf"])
def test_file_names_that_lead_out_are_refused(registry: Registry, name: str) -> None:
    digest = store(registry, make_model())
    with pytest.raises(InvalidRequest, match="cannot be the name of a file"):
        registry.add("a", {name: digest, "other.gguf": digest})
    assert registry.list() == ()


def test_unknown_and_wrong_blobs(registry: Registry) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    with pytest.raises(NotFound, match="not in the store"):
        registry.add("a", {"m.gguf": digest})
    with pytest.raises(InvalidRequest, match="the contents are"):
        registry.blobs.write(digest, [b"wrong"])
    assert not registry.blobs.has(digest)
    assert list(registry.blobs.folder.iterdir()) == []
    with pytest.raises(InvalidRequest, match="from 1 to"):
        registry.add("a", {})


def test_links_out_of_the_store_are_not_followed(registry: Registry, model_file: Path) -> None:
    digest = store(registry, make_model())
    registry.add("a", {"m.gguf": digest})
    registry.blobs.path(digest).unlink()
    registry.blobs.path(digest).symlink_to(model_file)  # the same bytes, but not ours
    with pytest.raises(RegistryError, match="not a plain file"):
        registry.get("a")
    assert registry.list()[0].problem is not None
    registry.remove("a")
    assert model_file.exists()


def test_a_folder_that_is_being_made_is_left_alone(registry: Registry) -> None:
    parts = {f"m-0000{n}-of-00002.gguf": store(registry, make_model(n)) for n in (1, 2)}
    made = registry._bundles.make(parts)  # as far as another process may have got
    registry.add("other", {"m.gguf": store(registry, make_model(3))})
    registry.remove("other")
    assert made.exists()
    registry.add("split", parts)
    registry.copy("split", "again")
    registry.remove("split")
    assert registry.get("again").path == made
    registry.remove("again")
    assert not made.parent.exists()


def test_links_of_a_folder_must_be_ours(registry: Registry, model_file: Path) -> None:
    parts = {f"m-0000{n}-of-00002.gguf": store(registry, make_model(n)) for n in (1, 2)}
    second = registry.add("a", parts).path.with_name("m-00002-of-00002.gguf")
    second.unlink()
    second.symlink_to(model_file)
    with pytest.raises(RegistryError, match="leads out of the store"):
        registry.get("a")
    second.unlink()
    second.write_bytes(make_model(2))
    with pytest.raises(RegistryError):
        registry.get("a")
    registry.remove("a")
    assert model_file.exists()


def test_a_catalogue_that_names_foreign_paths_is_not_believed(registry: Registry, model_file: Path) -> None:
    registry.add("a", {"m.gguf": store(registry, make_model())})
    with sqlite3.connect(registry.folder / "catalogue.db") as db:
        db.execute("UPDATE models SET path = ?", (str(model_file),))
    db.close()
    with pytest.raises(RegistryError, match="is not"):
        registry.get("a")
    registry.remove("a")
    assert model_file.exists()


def test_a_lost_blob_is_a_problem_not_a_model(registry: Registry) -> None:
    digest = store(registry, make_model())
    registry.add("a", {"m.gguf": digest})
    registry.blobs.path(digest).write_bytes(b"")
    with pytest.raises(RegistryError, match="has 0 bytes"):
        registry.get("a")
    registry.blobs.path(digest).unlink()
    with pytest.raises(RegistryError, match="not in the store"):
        registry.get("a")


def test_sweep_removes_what_nobody_has(registry: Registry) -> None:
    used, unused = store(registry, make_model(1)), store(registry, make_model(2))
    registry.add("a", {"m.gguf": used})
    incoming = registry.blobs.receive(unused)
    incoming.write(b"half")
    incoming._file.close()  # as if its process had died here
    registry.sweep()
    assert registry.blobs.has(unused), "too young to go"
    registry.sweep(min_age_s=0)
    assert [digest for digest, _ in registry.blobs.digests()] == [used]
    assert len(list(registry.blobs.folder.iterdir())) == 1
    assert registry.get("a")


def test_builtin_models(tmp_path: Path, model_file: Path) -> None:
    registry = Registry(tmp_path / "store", inspect=inspect_paper, builtin={"demo": model_file})
    record = registry.get("Demo")
    assert (record.name, record.short_name, record.path) == ("demo:latest", "demo", model_file)
    assert names(registry) == ["demo:latest"]
    assert not registry.folder.exists()
    with pytest.raises(InvalidRequest, match="comes with mlxr"):
        registry.remove("demo")
    with pytest.raises(InvalidRequest, match="comes with mlxr"):
        registry.copy("demo", "DEMO")
    assert registry.copy("demo", "mine").name == "mine:latest"
    assert registry.derive("other", registry.get("demo"), Changes(system="x")).from_name == "demo"
    assert names(registry) == ["mine:latest", "other:latest", "demo:latest"]


def test_a_model_that_cannot_be_stored_is_not_half_made(tmp_path: Path, model_file: Path) -> None:
    registry = Registry(tmp_path / "store", inspect=inspect_paper, builtin={"demo": model_file})
    with pytest.raises(UnicodeEncodeError):
        registry.derive("other", registry.get("demo"), Changes(system="\ud83d"))
    with pytest.raises(InvalidRequest, match="comes with mlxr"):
        registry.derive("demo", registry.get("demo"), Changes(system="x"))
    assert names(registry) == ["demo:latest"]


def test_find_also_opens_paths_and_get_never_does(registry: Registry, model_file: Path) -> None:
    assert registry.find(model_file).path == model_file
    assert registry.find(str(model_file)).digest == registry.find(model_file).digest
    assert registry.list() == ()
    with pytest.raises(InvalidRequest):
        registry.get(str(model_file))
    with pytest.raises(NotFound):
        registry.find("a" * 5000)
    registry.import_file(model_file, "mine")
    assert registry.find("mine").is_owned is False


def test_touch(registry: Registry, model_file: Path) -> None:
    registry.import_file(model_file, "mine")
    assert registry.get("mine").last_used_at is None
    registry.touch("mine:latest")
    first = registry.get("mine").last_used_at
    assert first is not None
    registry.touch("gone:latest")
    assert registry.get("mine").last_used_at == first


def test_a_newer_catalogue_is_refused(registry: Registry, model_file: Path) -> None:
    registry.import_file(model_file, "mine")
    with sqlite3.connect(registry.folder / "catalogue.db") as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(RegistryError, match="newer mlxr"):
        registry.list()


def test_every_version_is_brought_up_to_date(registry: Registry, model_file: Path) -> None:
    registry.folder.mkdir()
    with sqlite3.connect(registry.folder / "catalogue.db") as db:
        MIGRATIONS[0](db)
        db.execute("PRAGMA user_version = 1")
    db.close()
    registry.import_file(model_file, "mine")
    assert names(registry) == ["mine:latest"]
    with sqlite3.connect(registry.folder / "catalogue.db") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_broken_catalogue_says_so(registry: Registry, model_file: Path) -> None:
    registry.import_file(model_file, "mine")
    for suffix in ("-wal", "-shm"):
        (registry.folder / f"catalogue.db{suffix}").unlink(missing_ok=True)
    (registry.folder / "catalogue.db").write_bytes(b"this is no database, and long enough to be seen as such" * 10)
    with pytest.raises(RegistryError, match=r"catalogue\.db"):
        registry.list()


def test_many_threads_and_registries_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            registry = paper_registry(tmp_path / "store")
            for turn in range(4):
                digest = store(registry, make_model(turn))  # the same blobs for all: they meet in adding and removing
                try:
                    registry.add(f"m{number}", {"m.gguf": digest})
                    assert registry.get(f"m{number}").problem is None
                    registry.touch(f"m{number}:latest")
                    assert all(record.problem is None for record in registry.list())
                    registry.remove(f"m{number}")
                except (NotFound, RegistryError) as error:
                    assert "not in the store" in str(error)  # noqa: PT017 - another thread removed the last user
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    registry = paper_registry(tmp_path / "store")
    assert all(record.problem is None for record in registry.list())


def test_towers_beside_imported_files_belong_to_their_models(registry: Registry, tmp_path: Path) -> None:
    named, other = (tmp_path / name for name in ("named", "other"))
    for folder, names in ((named, ("Tiny-Q4_0.gguf", "Tiny.mmproj-f16.gguf")), (other, ("sha256-0a", "sha256-0b"))):
        folder.mkdir()
        for name, data in zip(names, (make_model(1, sees=True), TOWER), strict=True):
            (folder / name).write_bytes(data)
    first = registry.import_file(named / "Tiny-Q4_0.gguf", "named")
    blind = registry.import_file(other / "sha256-0a", "other")
    assert (blind.tower, len(blind.files)) == (None, 1)
    second = registry.import_file(other / "sha256-0a", "other", tower=other / "sha256-0b")
    assert (first.tower, second.tower) == (named / "Tiny.mmproj-f16.gguf", other / "sha256-0b")
    assert "vision" in second.capabilities
    assert first.size_bytes == second.size_bytes == blind.size_bytes + len(TOWER)
    assert registry.derive("made", registry.get("other"), Changes(system="x")).tower == second.tower
    (other / "sha256-0b").write_bytes(TOWER + b"more")
    with pytest.raises(RegistryError, match="sha256-0b changed since it was imported"):
        registry.get("made")


def test_a_blob_that_goes_while_its_model_is_read_is_named(tmp_path: Path) -> None:
    """Another process removes the last model that has it."""
    registry = paper_registry(tmp_path / "store")
    digest = store(registry, make_model(1))

    def inspect(path: Path, tower: Path | None = None, /) -> ModelFacts:
        path.unlink()
        return inspect_paper(path)

    registry._inspect = inspect
    with pytest.raises(NotFound, match=rf"blob sha256:{digest} is not in the store"):
        registry.add("m", {"m.gguf": digest})


def test_a_new_catalogue_waits_for_another_process_that_makes_it(tmp_path: Path) -> None:
    registry = paper_registry(tmp_path / "store")
    (tmp_path / "store").mkdir()
    holder = sqlite3.connect(tmp_path / "store" / "catalogue.db", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, holder.execute, ["COMMIT"])
    release.start()
    digest = store(registry, make_model(1))
    registry.add("m", {"m.gguf": digest})
    release.join()
    holder.close()
    assert names(registry) == ["m:latest"]
