"""Pages on disk: they return after a restart, keep within their bound, and are served only if right in every bit."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, PAGE_SIZE, World, page_files

from mlxr.cache import store
from mlxr.cache.store import HEADER_BYTES, PageStore
from mlxr.core.stats import StoreDrop
from mlxr.kernels.tensor import ByteArray

PROMPT = list(range(1, 20 * PAGE_SIZE + 2))  # twenty full pages and a token
MODEL, PAYLOAD_BYTES = bytes(32), 64


def fill_store(folder: Path, prompt: list[int] = PROMPT, fingerprint: bytes = b"model", layers: int = 2) -> None:
    """Live one process's life: answer a prompt, store its pages, end."""
    world = World(pages=32, folder=folder, fingerprint=fingerprint, layers=[FULL] * layers)
    world.serve(prompt)
    world.cache.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def open_store(folder: Path, entries: float, model: bytes = MODEL) -> PageStore:
    """A store by itself, with room for that many pages of PAYLOAD_BYTES."""
    store = PageStore(folder, int(entries * (HEADER_BYTES + PAYLOAD_BYTES)))
    store.open(model, [PAYLOAD_BYTES])
    return store


def holds(store: PageStore, number: int) -> bool:
    """Return True if the store has a page, which must be the right one."""
    payload = store.read((0, key_of(number)))
    assert payload is None or np.array_equal(payload, payload_of(number))
    return payload is not None


def payload_of(number: int) -> ByteArray:
    return np.random.default_rng(number).integers(0, 256, PAYLOAD_BYTES, dtype=np.uint8)


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    fill_store(tmp_path)
    world = World(pages=32, folder=tmp_path)
    assert world.lookup(PROMPT, 10**6) == 20 * PAGE_SIZE
    assert world.serve(PROMPT) == 20 * PAGE_SIZE
    stats = world.cache.stats()
    assert (stats.memory_hit_tokens, stats.disk_hit_tokens) == (0, 20 * PAGE_SIZE)
    assert world.serve(PROMPT) == 20 * PAGE_SIZE
    assert world.cache.stats().memory_hit_tokens == 20 * PAGE_SIZE
    world.cache.close()
    assert world.store_stats.written_pages == 0  # what is stored is not written again


def test_pages_of_answers_are_stored_too(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    table = world.open([1, 2])
    world.write(table, [1, 2])
    for length in range(3, 2 * PAGE_SIZE + 1):
        world.write(table, list(range(1, length + 1)))
    world.cache.release(table)
    world.cache.close()
    assert World(folder=tmp_path).serve(list(range(1, 2 * PAGE_SIZE + 2))) == 2 * PAGE_SIZE


def flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


DAMAGES: list[Callable[[bytearray, random.Random], bytearray]] = [
    *[flip] * 8,  # anywhere
    lambda data, rng: bytearray(flip(data[:HEADER_BYTES], rng) + data[HEADER_BYTES:]),
    lambda data, rng: bytearray(flip(data[:HEADER_BYTES], rng) + data[HEADER_BYTES:]),
    lambda data, rng: bytearray(data[:HEADER_BYTES] + flip(data[HEADER_BYTES:], rng)),
    lambda data, rng: bytearray(),
    lambda data, rng: data[: HEADER_BYTES - 1],
    lambda data, rng: data[:HEADER_BYTES],
    lambda data, rng: data[:-1],
    lambda data, rng: data + b"\0",
    lambda data, rng: data + data,
    lambda data, rng: bytearray(len(data)),
    lambda data, rng: bytearray(data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES)),
    lambda data, rng: bytearray(rng.randbytes(len(data))),
]


@pytest.mark.parametrize("while_open", [False, True])
def test_twenty_damaged_pages_are_all_detected(tmp_path: Path, while_open: bool) -> None:
    """Damage of every kind to all twenty pages, before the store is opened or behind its back."""
    prompts = [[1000 + index] * PAGE_SIZE + [1] for index in range(len(DAMAGES))]
    for prompt in prompts:
        fill_store(tmp_path, prompt)
    worlds = [World(pages=32, folder=tmp_path)] if while_open else []
    rng = random.Random(11)
    assert len(page_files(tmp_path)) == len(DAMAGES) == 20
    for path, damage in zip(page_files(tmp_path), DAMAGES, strict=True):
        path.write_bytes(damage(bytearray(path.read_bytes()), rng))
    world = worlds[0] if while_open else World(pages=32, folder=tmp_path)
    assert [world.serve(prompt) for prompt in prompts] == [0] * 20
    drops = world.store_stats.drops
    assert sum(drops.values()) == 20
    assert drops[StoreDrop.HALF_WRITTEN] == 6  # those of a wrong size
    assert drops[StoreDrop.DAMAGED] >= 11
    world.cache.close()
    again = World(pages=32, folder=tmp_path)  # all have been computed and written anew
    assert [again.serve(prompt) for prompt in prompts] == [PAGE_SIZE] * 20
    assert sum(again.store_stats.drops.values()) == 0


def test_every_bit_of_a_page_counts(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10)
    assert store.write((0, key_of(1)), payload_of(1), 1)
    (path,) = page_files(tmp_path)
    sound = path.read_bytes()
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        store.open(MODEL, [PAYLOAD_BYTES])
        assert not holds(store, 1)
        assert not path.exists()
    path.write_bytes(sound)
    store.open(MODEL, [PAYLOAD_BYTES])
    assert holds(store, 1)


def test_run_ends_before_a_damaged_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill_store(tmp_path)
    world = World(pages=32, folder=tmp_path)
    for path in sorted(page_files(tmp_path), key=lambda path: -path.stat().st_mtime_ns)[5::5]:
        path.write_bytes(flip(bytearray(path.read_bytes()), random.Random(5)))  # pages number 5, 10 and 15
    assert world.serve(PROMPT) == 5 * PAGE_SIZE
    assert world.serve([*PROMPT[: 5 * PAGE_SIZE], 1]) == 5 * PAGE_SIZE
    assert sum(world.store_stats.drops.values()) == 1
    assert len(warnings_of(caplog)) == 1
    world.cache.close()


def test_pages_under_foreign_names_are_not_served(tmp_path: Path) -> None:
    fill_store(tmp_path)
    files = page_files(tmp_path)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    world = World(pages=32, folder=tmp_path)
    assert world.serve(PROMPT) == 0
    assert world.store_stats.drops[StoreDrop.FOREIGN] == 1  # the first page; without it nobody asks for the others


def test_pages_of_another_model_under_this_ones_folder_are_not_served(tmp_path: Path) -> None:
    fill_store(tmp_path, fingerprint=b"other")
    (theirs,) = tmp_path.iterdir()
    fill_store(tmp_path, fingerprint=b"model")
    (ours,) = set(tmp_path.iterdir()) - {theirs}
    key = page_files(ours)[0]
    key.write_bytes(page_files(theirs)[0].read_bytes())
    store = PageStore(tmp_path, 2**20)
    store.open(bytes.fromhex(ours.name) * 2, [key.stat().st_size - HEADER_BYTES])
    assert store.read((0, bytes.fromhex(key.stem))) is None
    assert store.stats().drops[StoreDrop.FOREIGN] == 1


@pytest.mark.parametrize("other", [{"fingerprint": b"other"}, {"layers": 3}], ids=["other weights", "other layout"])
def test_a_store_made_by_another_model_is_not_used_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, object]
) -> None:
    fill_store(tmp_path, **other)  # type: ignore[arg-type]
    for visit in range(2):
        world = World(pages=32, folder=tmp_path)
        assert world.serve(PROMPT) == (0 if visit == 0 else 20 * PAGE_SIZE)
        assert world.store_stats.foreign_bytes > 0
        world.cache.close()
    (warning,) = warnings_of(caplog)
    assert "was made by another model: its 20 pages are not used" in warning
    assert len(page_files(tmp_path)) == 40


def test_another_version_of_the_format_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "VERSION", 2)
    fill_store(tmp_path)
    monkeypatch.undo()
    world = World(pages=32, folder=tmp_path)
    assert world.serve(PROMPT) == 0
    assert world.store_stats.drops[StoreDrop.VERSION] == 1
    world.cache.close()


def test_another_version_with_another_size_is_told_from_half_written(tmp_path: Path) -> None:
    fill_store(tmp_path)
    newer, shorter, *_ = page_files(tmp_path)
    data = bytearray(newer.read_bytes())
    data[8] = 9
    newer.write_bytes(data + b"more")
    shorter.write_bytes(shorter.read_bytes()[:-5])
    drops = World(folder=tmp_path).store_stats.drops
    assert (drops[StoreDrop.VERSION], drops[StoreDrop.HALF_WRITTEN]) == (1, 1)


def test_leftovers_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    fill_store(tmp_path)
    (own,) = tmp_path.iterdir()
    (own / f"123-{'a' * 64}.part").write_bytes(b"half a page")
    (own / f"{'b' * 64}.page").write_bytes(b"")
    (own / "notes.txt").write_text("not ours to remove")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.page").write_text("nor this")
    world = World(pages=32, folder=tmp_path)
    assert world.store_stats.drops[StoreDrop.HALF_WRITTEN] == 2
    assert world.store_stats.foreign_bytes == 0
    assert sorted(path.name for path in own.iterdir() if path.suffix != ".page") == ["notes.txt"]
    assert (tmp_path / "photos" / "cat.page").exists()
    assert world.serve(PROMPT) == 20 * PAGE_SIZE


def test_bytes_are_bounded_and_the_least_recently_used_go(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10.5)
    for number in range(100):
        assert store.write((0, key_of(number)), payload_of(number), stamp_ns=10**9 * (number + 1))
        store.touch((0, key_of(0)), 10**9 * (number + 1) + 1)
        store.check()
        assert sum(path.stat().st_size for path in page_files(tmp_path)) <= store.max_bytes
    assert [number for number in range(100) if store.contains((0, key_of(number)))] == [0, *range(91, 100)]
    assert store.stats().drops[StoreDrop.ROOM] == 90
    reopened = open_store(tmp_path, 3.5)  # a smaller bound holds from the start
    assert reopened.stats().entries == len(page_files(tmp_path)) <= 3
    assert reopened.contains((0, key_of(0)))
    assert reopened.contains((0, key_of(99)))


def test_pages_of_other_models_count_and_make_room(tmp_path: Path) -> None:
    other = open_store(tmp_path, 10, model=b"o" * 32)
    for number in range(8):
        other.write((0, key_of(number)), payload_of(number), stamp_ns=number + 1)
    store = open_store(tmp_path, 10)
    for number in range(6):
        assert store.write((0, key_of(number)), payload_of(number), stamp_ns=100 + number)
        store.check()
        assert sum(path.stat().st_size for path in page_files(tmp_path)) <= store.max_bytes
    assert store.stats().entries == 6
    assert not holds(other, 0)  # gone behind its back
    assert holds(other, 7)


def test_leaves_leave_the_disk_before_roots(tmp_path: Path) -> None:
    page_bytes = World().arena.page_bytes
    world = World(pages=32, folder=tmp_path, max_bytes=10 * (page_bytes + HEADER_BYTES))
    world.serve(PROMPT[: 10 * PAGE_SIZE + 1])
    world.flush()
    world.serve([7] * PAGE_SIZE + [1])
    world.cache.close()
    again = World(pages=32, folder=tmp_path, max_bytes=10 * (page_bytes + HEADER_BYTES))
    assert 8 * PAGE_SIZE <= again.lookup(PROMPT, 10**6) < 10 * PAGE_SIZE
    assert again.store_stats.entries == again.lookup(PROMPT, 10**6) // PAGE_SIZE + 1


def test_leaves_leave_before_roots_while_a_sequence_grows(tmp_path: Path) -> None:
    """Its pages are written one after the other, the first of them by a sequence that ended long before."""
    max_bytes = 10 * (World().arena.page_bytes + HEADER_BYTES)
    world = World(pages=32, folder=tmp_path, max_bytes=max_bytes)
    world.serve(PROMPT[: 3 * PAGE_SIZE])
    world.flush()
    table = world.open(PROMPT)
    while table.length_tokens < 9 * PAGE_SIZE:
        world.write(table, PROMPT, PAGE_SIZE)
        world.flush()
    for token in (7, 8):
        other = world.open([token] * PAGE_SIZE)
        world.write(other, [token] * PAGE_SIZE)
        world.cache.release(other)
        world.flush()
    again = World(pages=32, folder=tmp_path, max_bytes=max_bytes)
    assert 7 * PAGE_SIZE <= again.lookup(PROMPT, 10**6) < 9 * PAGE_SIZE
    assert again.store_stats.entries == again.lookup(PROMPT, 10**6) // PAGE_SIZE + 2
    world.cache.release(table)
    world.cache.close()


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Neither sees what the other writes meanwhile, both stay right, and later ones see both."""
    first, second = World(pages=32, folder=tmp_path), World(pages=32, folder=tmp_path)
    for world in (first, second):
        world.serve(PROMPT)
        world.flush()
    assert second.store_stats.written_pages == 20
    for path in page_files(tmp_path):  # one makes room
        path.unlink()
    for world, cached_pages in ((first, 0), (second, 20)):
        world.serve([7] * (32 * PAGE_SIZE))  # takes the whole arena
        world.flush()
        for pages in (cached_pages, 20):  # noticed at the first visit, written again after the second
            assert world.serve(PROMPT) == pages * PAGE_SIZE
            world.flush()
        assert sum(world.store_stats.drops.values()) == 0
        world.cache.close()
    assert World(pages=32, folder=tmp_path).serve(PROMPT) == 20 * PAGE_SIZE


def test_a_store_too_small_for_a_page_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(folder=tmp_path, max_bytes=100)
    world.serve(PROMPT[: 2 * PAGE_SIZE])
    world.cache.close()
    (warning,) = warnings_of(caplog)
    assert "100 bytes hold no page" in warning
    assert not world.store_stats.writable
    assert page_files(tmp_path) == []


def test_no_bytes_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 0"):
        PageStore(tmp_path, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS])
def test_writing_stops_with_one_warning_when_the_system_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """After four pages, in the middle of the fifth, the disk has had enough."""
    fill_store(tmp_path, [9] * (2 * PAGE_SIZE + 1))
    world = World(pages=64, folder=tmp_path)
    written, write = [], os.write

    def refuse_sometimes(descriptor: int, data: memoryview) -> int:
        written.append(len(data))
        if len(written) == 10:  # each page takes two calls
            write(descriptor, data[:10])
            raise OSError(code, os.strerror(code))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", refuse_sometimes)
    assert world.serve(PROMPT) == 0
    world.flush()
    monkeypatch.undo()
    assert world.serve([5] * 30) == 0
    assert world.serve(PROMPT) == 20 * PAGE_SIZE
    assert world.serve([9] * (2 * PAGE_SIZE + 1)) == 2 * PAGE_SIZE  # reading goes on
    world.cache.close()
    stats = world.store_stats
    assert (stats.writable, stats.written_pages) == (False, 4)
    # One more if the page that failed had been offered again, by its sequence that ended meanwhile.
    assert stats.drops[StoreDrop.UNWRITABLE] in (16, 17)
    (warning,) = warnings_of(caplog)
    assert f"pages are no longer stored in {tmp_path}" in warning
    assert os.strerror(code) in warning
    assert "answers are not affected" in warning
    assert len(page_files(tmp_path)) == 6
    assert list(tmp_path.rglob("*.part")) == []


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    store = open_store(folder, 100)
    for number in range(5):
        assert store.write((0, key_of(number)), payload_of(number), number)
    shutil.rmtree(folder)
    assert store.write((0, key_of(7)), payload_of(7), 7)
    assert [holds(store, number) for number in (0, 4, 7)] == [False, False, True]
    stats = store.stats()
    assert (stats.writable, stats.entries, stats.bytes) == (True, 1, HEADER_BYTES + PAYLOAD_BYTES)
    assert warnings_of(caplog) == []
    assert holds(open_store(folder, 100), 7)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(pages=64, folder=tiny_disk)
    prompts = [[index] * (3 * PAGE_SIZE) + [1] for index in range(20)]
    assert [world.serve(prompt) for prompt in prompts] == [0] * 20
    world.cache.close()
    (warning,) = warnings_of(caplog)
    assert os.strerror(errno.ENOSPC) in warning
    stored_pages = world.store_stats.written_pages
    assert 0 < stored_pages < 60
    again = World(pages=64, folder=tiny_disk)
    assert sum(again.serve(prompt) for prompt in prompts) == stored_pages * PAGE_SIZE
    again.cache.close()
    assert sum(again.store_stats.drops[cause] for cause in (StoreDrop.DAMAGED, StoreDrop.HALF_WRITTEN)) == 0


def test_folder_below_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even the superuser, whom no permission stops, can make a folder below a file."""
    (tmp_path / "file").write_text("")
    world = World(folder=tmp_path / "file" / "store")
    for _ in range(2):
        world.serve(PROMPT[: 3 * PAGE_SIZE])
    world.cache.close()
    assert len(warnings_of(caplog)) == 1
    assert not world.store_stats.writable


@contextmanager
def as_nobody() -> Iterator[None]:
    """Drop the rights of the superuser, whom no permission stops; other users stay themselves."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("place", ["store", "model"])
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_folder_without_permission(caplog: pytest.LogCaptureFixture, mode: int, place: str) -> None:
    """The store's folder, or this model's folder in it, cannot be written, or not even read."""
    with as_nobody(), tempfile.TemporaryDirectory() as name:
        fill_store(Path(name))
        (own,) = Path(name).iterdir()
        folder = own if place == "model" else Path(name)
        folder.chmod(mode)
        try:
            world = World(pages=32, folder=Path(name))
            assert world.serve(PROMPT) == (20 * PAGE_SIZE if mode else 0)
            world.serve([5] * 30)
            world.cache.close()
        finally:
            folder.chmod(0o700)
        written_pages = world.store_stats.written_pages
    may_write = place == "store" and mode == 0o500  # its folder in there is there already, and writable
    assert written_pages == (7 if may_write else 0)
    assert len(warnings_of(caplog)) == (0 if may_write else 1)


def test_read_only_disk(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill_store(tiny_disk, PROMPT[: 3 * PAGE_SIZE + 1])
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for fingerprint, cached_pages in ((b"model", 3), (b"other", 0)):
        caplog.clear()
        world = World(folder=tiny_disk, fingerprint=fingerprint)
        assert world.serve(PROMPT[: 3 * PAGE_SIZE + 1]) == cached_pages * PAGE_SIZE
        world.serve([9] * 20)
        world.cache.close()
        assert len(warnings_of(caplog)) == 1
