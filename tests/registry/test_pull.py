"""Pulling from a hub that is sometimes honest: choice of files, resuming, checksums, and files kept after a failure."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator

import pytest
from fake_hub import Behaviour, FakeHub, SlowHub
from paper_models import TOWER, make_model

from mlxr.core.errors import HubError, InvalidRequest, ModelError, NotFound, RegistryError
from mlxr.core.work_threads import Stop
from mlxr.registry import ModelRecord, Registry
from mlxr.registry.hub import (
    HubClient,
    PullStopped,
    RemoteFile,
    choose_files,
    explain_choice,
    list_files,
    parse_reference,
)
from mlxr.registry.pull import PullProgress, pull

REPO = "someone/Tiny-GGUF"
MODEL = make_model(1, 300_000)
FILE = "Tiny.Q4_K_M.gguf"


def fetch(registry: Registry, hub: FakeHub, reference: str = f"hf.co/{REPO}", **more: object) -> ModelRecord:
    return pull(registry, reference, endpoint=hub.url, retry_delay_s=0.001, **more)  # type: ignore[arg-type]


def downloads(hub: FakeHub) -> list[str | None]:
    """The Range headers of the requests for files."""
    return [asked for path, asked in hub.requests if "/resolve/" in path]


def assert_nothing_kept(registry: Registry) -> None:
    assert registry.list() == ()
    assert list(registry.blobs.digests()) == []


def test_pull_a_model(registry: Registry, hub: FakeHub) -> None:
    hub.add(REPO, {FILE: MODEL, "README.md": b"hello"}, plain={"README.md"})
    seen: list[PullProgress] = []
    record = fetch(registry, hub, report=seen.append)
    assert (record.name, record.is_owned) == (f"hf.co/{REPO}:latest", True)
    assert registry.get(f"hf.co/{REPO}") == record
    assert record.path.read_bytes() == MODEL
    stages = [progress.stage for progress in seen]
    assert list(dict.fromkeys(stages)) == ["listing", "fetching", "checking", "adding"]
    fetching = [progress for progress in seen if progress.stage == "fetching"]
    assert [progress.done_bytes for progress in fetching] == sorted(progress.done_bytes for progress in fetching)
    assert (fetching[-1].done_bytes, fetching[-1].total_bytes) == (len(MODEL), len(MODEL))
    assert fetching[-1].digest == hashlib.sha256(MODEL).hexdigest()
    assert list(registry.downloads.iterdir()) == []
    assert any("mlxr" in str(headers) for headers in hub.headers)
    asked = len(downloads(hub))
    assert fetch(registry, hub, name="again").path == record.path
    assert len(downloads(hub)) == asked, "it was here already"


@pytest.mark.parametrize("name", ["../x", "a b"])
def test_nothing_is_fetched_for_a_name_that_no_model_can_have(registry: Registry, hub: FakeHub, name: str) -> None:
    asked = len(hub.requests)
    with pytest.raises(InvalidRequest):
        pull(registry, "hf.co/me/none", endpoint=hub.url, name=name)
    assert len(hub.requests) == asked


def test_quants_and_files_are_chosen(registry: Registry, hub: FakeHub) -> None:
    files = {f"Tiny.{quant}.gguf": make_model(n) for n, quant in enumerate(("Q2_K", "Q4_K_M", "Q8_0"))}
    hub.add(REPO, {**files, "mmproj-f16.gguf": b"x", "sub/Tiny-F16.gguf": make_model(9)})
    for selector, seed, tag in (("", 1, "latest"), (":q8_0", 2, "q8_0"), (":sub/Tiny-F16.gguf", 9, "Tiny-F16")):
        record = fetch(registry, hub, f"https://huggingface.co/{REPO}{selector}")
        assert record.path.read_bytes() == make_model(seed)
        assert record.name == f"hf.co/{REPO}:{tag}"
    with pytest.raises(NotFound, match=r"no model for 'Q5_1'.*Tiny\.Q2_K, Tiny\.Q4_K_M"):
        fetch(registry, hub, f"hf.co/{REPO}:Q5_1")


SEEING = make_model(3, 200_000, sees=True)
TOWERS = {"mmproj-F32.gguf": b"not this", "mmproj-BF16.gguf": TOWER, "mmproj-Q8_0.gguf": b"nor this"}


def test_a_model_that_can_see_brings_its_tower(registry: Registry, hub: FakeHub) -> None:
    repository = hub.add(REPO, {FILE: SEEING, **TOWERS, "Tiny.Q8_0.gguf": make_model(4, sees=True)})
    repository.behaviour["mmproj-BF16.gguf"] = Behaviour(drop_after=900, drops=1)
    stop = Stop()

    def interrupt(progress: PullProgress) -> None:
        if progress.file.startswith("mmproj") and progress.done_bytes:
            stop.set()

    with pytest.raises(PullStopped):
        fetch(registry, hub, stop=stop, report=interrupt)
    assert registry.list() == ()
    hub.requests.clear()
    seen: list[PullProgress] = []
    record = fetch(registry, hub, report=seen.append)
    assert downloads(hub) == ["bytes=900-"], "the model and the beginning of its tower are kept"
    assert list(dict.fromkeys(progress.file for progress in seen)) == ["", FILE, "mmproj-BF16.gguf"]
    assert record.tower is not None
    assert (record.path.name, record.path.read_bytes(), record.tower.read_bytes()) == (FILE, SEEING, TOWER)
    assert (record.size_bytes, "vision" in record.capabilities) == (len(SEEING) + len(TOWER), True)
    again = registry.copy(record, "again")
    other = fetch(registry, hub, f"hf.co/{REPO}:q8_0")
    digest = hashlib.sha256(TOWER).hexdigest()
    for removed in (record, again):
        registry.remove(removed.name)
        assert registry.get(other.name).tower is not None
    assert not registry.blobs.has(hashlib.sha256(SEEING).hexdigest())
    registry.sweep(0.0)
    assert registry.blobs.has(digest)
    registry.remove(other.name)
    assert_nothing_kept(registry)
    assert list((registry.folder / "bundles").iterdir()) == []


def test_towers_of_others_are_left_out_and_old_models_get_theirs(registry: Registry, hub: FakeHub) -> None:
    repository = hub.add(REPO, {FILE: MODEL, **TOWERS})
    assert fetch(registry, hub).tower is None
    assert len(downloads(hub)) == 1, "a model that reads text only asks for none"
    repository.files[FILE], repository.files["mmproj-BF16.gguf"] = SEEING, b"of another model"
    record = fetch(registry, hub)
    assert (record.tower, record.path.read_bytes(), len(list(registry.blobs.digests()))) == (None, SEEING, 1)
    repository.files["mmproj-BF16.gguf"] = TOWER
    assert fetch(registry, hub).tower is not None, "what was pulled before gets it"
    assert len(list(registry.blobs.digests())) == 2
    repository.files["mmproj-BF16.gguf"] = TOWER + b"newer"
    repository.behaviour["mmproj-BF16.gguf"] = Behaviour(refusals=99, status=403)
    with pytest.raises(HubError, match=r"mmproj-BF16\.gguf: the hub answered 403"):
        fetch(registry, hub)
    assert registry.get(record.name).tower is not None
    parts = {f"q4/Big-0000{n}-of-00002.gguf": make_model(4 + n, sees=True) for n in (1, 2)}
    hub.add("me/Split", {**parts, "mmproj-F16.gguf": b"for others", "q4/mmproj-F32.gguf": TOWER})
    split = fetch(registry, hub, "hf.co/me/Split")
    assert split.tower is not None
    assert (split.path.name, split.tower.name) == ("Big-00001-of-00002.gguf", "mmproj-F32.gguf")


def remote(*paths: str) -> list[RemoteFile]:
    return [RemoteFile(path, "http://x", 1, "0" * 64, None) for path in paths]


@pytest.mark.parametrize(
    ("paths", "selector", "chosen"),
    [
        (("a-Q8_0.gguf", "a-Q4_0.gguf"), "", ["a-Q4_0.gguf"]),
        (("a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf"), "q4_k_m", ["a-Q4_K_M.gguf"]),
        (("odd.gguf",), "", ["odd.gguf"]),
        (("Q4_0/a-00001-of-00002.gguf", "Q4_0/a-00002-of-00002.gguf"), "Q4_0", None),
        (("config.json", "model.safetensors", "tokenizer.json", "x/y.json", "pytorch_model.bin"), "", None),
    ],
)
def test_choice(paths: tuple[str, ...], selector: str, chosen: list[str] | None) -> None:
    found = choose_files(parse_reference(f"hf.co/a/b{':' if selector else ''}{selector}"), remote(*paths))
    expected = chosen or [path for path in paths if path not in {"x/y.json", "pytorch_model.bin"}]
    assert sorted(file.path for file in found) == sorted(expected)


def test_memory_chooses_among_quantisations_and_says_why() -> None:
    sizes = {"Q8_0": 8, "Q4_K_M": 5, "Q3_K_M": 4, "IQ2_XXS": 2, "PTQ1_0": 1.5, "F16": 16}
    reference = parse_reference("hf.co/a/b")
    files = [RemoteFile(f"m-{quant}.gguf", "", int(size * 1e9), "0" * 64, None) for quant, size in sizes.items()]

    def choose(room_bytes: float | None) -> tuple[str, str]:
        room = None if room_bytes is None else int(room_bytes)
        chosen = choose_files(reference, files, room)
        return chosen[0].path, explain_choice(reference, files, chosen, room)

    assert choose(32e9) == (
        "m-Q4_K_M.gguf",
        "m-Q4_K_M.gguf of 6 models: the usual choice, 5.0 GB, fits 32.0 GB of memory",
    )
    path, why = choose(5e9)
    assert path == "m-Q3_K_M.gguf"
    assert why.endswith("m-Q4_K_M.gguf of 5.0 GB, does not fit 5.0 GB of memory; this is the best that does, 4.0 GB")
    assert choose(2.3e9)[0] == "m-PTQ1_0.gguf"
    path, why = choose(1e9)
    assert path == "m-PTQ1_0.gguf"
    assert why.endswith("this is the smallest, 1.5 GB")
    assert choose(None)[1].endswith("the usual choice; how much memory there is nobody tells")
    asked = parse_reference("hf.co/a/b:q8_0")
    assert explain_choice(asked, files, choose_files(asked, files, 1), 1) == ""


@pytest.mark.parametrize(
    ("paths", "selector", "message"),
    [
        (("one-Q4_0.gguf", "two-Q4_0.gguf"), "Q4_0", "has 2 models for 'Q4_0'"),
        (("a.gguf", "b.gguf"), "", "no model that is the usual choice"),
        (("README.md",), "", "neither GGUF files"),
        (("model.safetensors",), "Q4_0", "no GGUF files"),
        (("a-Q4_0-00001-of-00003.gguf", "a-Q4_0-00003-of-00003.gguf"), "", "of 3 parts"),
    ],
)
def test_no_choice(paths: tuple[str, ...], selector: str, message: str) -> None:
    with pytest.raises((NotFound, HubError), match=message):
        choose_files(parse_reference(f"hf.co/a/b{':' if selector else ''}{selector}"), remote(*paths))


@pytest.mark.parametrize(
    "text",
    [
        "lama3.2",
        "a/b",
        "hf.co/a",
        "hf.co/../b",
        "hf.co/a/../../b",
        "hf.co/a/b:..",
        "https://evil.example/a/b",
        "hf.co//",
        "",
    ],
)
def test_what_cannot_be_pulled(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_reference(text)


def test_a_hub_that_drops_every_connection(registry: Registry, hub: FakeHub) -> None:
    hub.add(REPO, {FILE: MODEL}).behaviour[FILE] = Behaviour(drop_after=40_000)
    record = fetch(registry, hub)
    assert record.path.read_bytes() == MODEL
    ranges = downloads(hub)
    assert len(ranges) == 8
    assert ranges[:3] == [None, "bytes=40000-", "bytes=80000-"]


def test_the_next_pull_goes_on(registry: Registry, hub: FakeHub) -> None:
    behaviour = Behaviour(drop_after=0)
    repository = hub.add(REPO, {FILE: MODEL})
    repository.behaviour[FILE] = Behaviour(drop_after=100_000, drops=1)
    stop = Stop()
    with pytest.raises(PullStopped):
        fetch(registry, hub, stop=stop, report=lambda progress: stop.set() if progress.done_bytes else None)
    assert_nothing_kept(registry)
    repository.behaviour[FILE] = behaviour
    with pytest.raises(HubError, match="stuck at"):
        fetch(registry, hub)
    kept = next(registry.downloads.iterdir()).stat().st_size
    assert 0 < kept < len(MODEL)
    del repository.behaviour[FILE]
    hub.requests.clear()
    assert fetch(registry, hub).path.read_bytes() == MODEL
    assert downloads(hub) == [f"bytes={kept}-"]


@pytest.mark.parametrize(
    "behaviour", [Behaviour(ignores_ranges=True), Behaviour(refusals=2), Behaviour(refusals=3, status=429)]
)
def test_a_clumsy_hub(registry: Registry, hub: FakeHub, behaviour: Behaviour) -> None:
    behaviour.drop_after, behaviour.drops = 100_000, 1
    hub.add(REPO, {FILE: MODEL}).behaviour[FILE] = behaviour
    assert fetch(registry, hub).path.read_bytes() == MODEL


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(listed_sha256="ab" * 32), "the hub listed the SHA-256 abab"),
        (Behaviour(served=MODEL[:-1] + b"!"), "what came has"),
        (Behaviour(listed_size=len(MODEL) - 1), r"listed \d+ bytes and now sends"),
        (Behaviour(listed_size=len(MODEL) + 1), "and now sends"),
        (Behaviour(served=MODEL[:-5], sent_length=len(MODEL)), "stuck at"),
        (Behaviour(listed_size=-5), "no size that could be"),
        (Behaviour(listed_sha256="../../evil"), "which is none"),
        (Behaviour(refusals=99, status=500), "stuck at 0 of .*answered 500"),
        (Behaviour(refusals=999, status=302), "stuck at 0 .*redirect.* pull again"),
        (Behaviour(refusals=99, status=403), "answered 403 .*terms accepted, or another token .* HF_TOKEN"),
        (Behaviour(refusals=99, status=404), "answered 404 .*try again"),
        (Behaviour(drop_after=1000, wrong_range=True), "stuck at 1000 .*(another|closed) range"),
    ],
)
def test_a_hub_that_lies_or_refuses(registry: Registry, hub: FakeHub, behaviour: Behaviour, message: str) -> None:
    hub.add(REPO, {FILE: MODEL}).behaviour[FILE] = behaviour
    with pytest.raises(HubError, match=message):
        fetch(registry, hub)
    assert_nothing_kept(registry)


def test_bytes_that_were_wrong_are_not_kept(registry: Registry, hub: FakeHub) -> None:
    repository = hub.add(REPO, {FILE: MODEL})
    repository.behaviour[FILE] = Behaviour(served=MODEL[:-1] + b"!")
    with pytest.raises(HubError):
        fetch(registry, hub)
    del repository.behaviour[FILE]
    assert fetch(registry, hub).path.read_bytes() == MODEL


def test_small_files_are_checked_by_their_git_id(registry: Registry, hub: FakeHub) -> None:
    files = {"config.json": b"{}\n", "model.safetensors": MODEL, "tokenizer.json": b"{}\n[]"}
    repository = hub.add(REPO, files, plain={"config.json", "tokenizer.json"})
    record = fetch(registry, hub)
    assert {path.name: path.read_bytes() for path in record.path.iterdir()} == files
    registry.remove(record.name)
    repository.behaviour["config.json"] = Behaviour(served=b"{} ")
    with pytest.raises(HubError, match="Git object id"):
        fetch(registry, hub)
    assert registry.list() == ()


def test_a_model_that_cannot_run_is_not_kept(registry: Registry, hub: FakeHub) -> None:
    hub.add(REPO, {FILE: b"unknown\n" + MODEL})
    with pytest.raises(ModelError, match="not supported"):
        fetch(registry, hub)
    assert_nothing_kept(registry)


def test_missing_repositories_and_hubs(registry: Registry, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match=r"no repository of that name .* private and wants a token .* HF_TOKEN"):
        fetch(registry, hub)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with pytest.raises(NotFound, match=r"no repository of that name .* private and this token may not see it"):
        fetch(registry, hub)
    for endpoint in ("http://127.0.0.1:9", "http://no-such-host.invalid", "nonsense", "http://["):
        with pytest.raises(HubError, match=r"cannot be asked: .+; check the network .* hub_url"):
            pull(registry, f"hf.co/{REPO}", endpoint=endpoint)
    hub.add(REPO, {"..\\x.gguf": MODEL})
    with pytest.raises(HubError, match="cannot be stored"):
        fetch(registry, hub)
    assert not registry.folder.exists()


def test_no_room(registry: Registry, hub: FakeHub) -> None:
    hub.add(REPO, {FILE: MODEL}).behaviour[FILE] = Behaviour(listed_size=1 << 49)
    with pytest.raises(RegistryError, match="are free"):
        fetch(registry, hub)


def test_two_pulls_of_one_file_fetch_it_once(registry: Registry, hub: FakeHub) -> None:
    release = threading.Event()
    hub.add(REPO, {FILE: MODEL}).behaviour[FILE] = Behaviour(pause=release)
    records: list[ModelRecord] = []
    threads = [
        threading.Thread(target=lambda n=n: records.append(fetch(registry, hub, name=f"m{n}"))) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    while sum(path.startswith("/api/") for path, _ in hub.requests) < 3:
        time.sleep(0.01)
    release.set()
    for thread in threads:
        thread.join()
    assert len(records) == 3
    assert len(downloads(hub)) == 1
    assert {record.path.read_bytes() for record in records} == {MODEL}


@pytest.fixture
def slow_hub() -> Iterator[SlowHub]:
    slow = SlowHub()
    yield slow
    slow.close()


def test_a_pull_that_waits_for_a_slow_head_ends_when_it_is_told(registry: Registry, slow_hub: SlowHub) -> None:
    stop, errors = Stop(), list[Exception]()

    def run() -> None:
        try:
            pull(registry, f"hf.co/{REPO}", endpoint=slow_hub.url, stop=stop)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert slow_hub.asked.acquire(timeout=10)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [PullStopped]
    assert slow_hub.left.acquire(timeout=10)


def test_the_head_of_an_answer_has_a_time_in_all(slow_hub: SlowHub) -> None:
    """Each byte comes within the time for one read, but the head never ends."""
    with (
        HubClient(Stop(), head_timeout_s=0.1) as client,
        pytest.raises(HubError, match=r"no whole head of an answer came within 0\.1 s"),
    ):
        list_files(parse_reference(f"hf.co/{REPO}"), slow_hub.url, client)


@pytest.mark.parametrize(
    "listing", [b"[" * 500_000, b'{"siblings": [' + b"[]," * 500_000, b'{"sha": "x", "siblings": [5]}', b"[]", b"nul"]
)
def test_a_listing_that_is_none_is_refused(registry: Registry, listing: bytes) -> None:
    with FakeHub() as hub:
        hub.listing = listing
        with pytest.raises(HubError, match="Tiny-GGUF"):
            fetch(registry, hub)


def test_a_file_that_comes_too_slowly_is_stuck(
    registry: Registry, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that trickle in are no progress once fewer than `SLOW_BYTES` came in `SLOW_S`."""
    monkeypatch.setattr("mlxr.registry.pull.SLOW_S", -1.0)
    monkeypatch.setattr("mlxr.registry.pull.SLOW_BYTES", 1 << 30)
    hub.add(REPO, {FILE: MODEL})
    with pytest.raises(HubError, match=r"stuck at .*: only \d+ bytes came in"):
        fetch(registry, hub)
