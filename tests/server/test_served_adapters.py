"""Adapters in the server: chosen by name in every dialect, loaded and unloaded during answers to others."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from demo_adapters import write_gguf_adapter, write_peft_adapter
from running_server import MakeServer, RunningServer, start_server, wait_until

from mlxr import LLM, SamplingParams
from mlxr.core.errors import SettingError
from mlxr.core.settings import resolve
from mlxr.loading import ASSETS
from mlxr.server.model_names import ServedModels
from mlxr.service.catalogue import open_registry

GREEDY = {"max_tokens": 12, "temperature": 0}
PROMPT = "import os"
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three"), 1):
        write_gguf_adapter(folder / f"{name}.gguf", seed)
    write_peft_adapter(folder / "folder", 4)
    return folder


@pytest.fixture(scope="module")
def running(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    given = {"adapters": f"one={files / 'one.gguf'},demo:folder={files / 'folder'}", "import_folders": str(files)}
    server = start_server(tmp_path_factory.mktemp("registry"), strict_model_names=True, **given)
    yield server
    server.stop()


@pytest.fixture
def client(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.fixture(scope="module")
def wanted(files: Path) -> dict[str | None, str]:
    """The demo's text with each adapter, computed without a server."""
    texts: dict[str | None, str] = {}
    paths = {"one": files / "one.gguf", "two": files / "two.gguf", "three": files / "three.gguf"}
    params = SamplingParams(max_tokens=12, temperature=0.0)
    with LLM("demo", device="cpu", threads=1) as llm:
        texts[None] = llm.generate(PROMPT, params)[0].text
        for name, path in {**paths, "folder": files / "folder"}.items():
            llm.load_adapter(path, name)
            texts[name] = llm.generate(PROMPT, params, adapter=name)[0].text
        mixed = llm.generate([PROMPT] * 3, params, adapter=["two", {"one": 0.5, "folder": -1.5}, None])
        assert [mixed[0].text, mixed[2].text] == [texts["two"], texts[None]]
        texts["sum"] = mixed[1].text
    assert len(set(texts.values())) == len(texts)
    return texts


def complete(client: httpx.Client, model: str, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": PROMPT, **GREEDY, **fields})


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.parametrize("model", ["one", "demo:one", "DEMO:ONE", "demo:latest:one", "folder", "demo:folder", "demo"])
def test_a_model_name_chooses_the_adapter(model: str, client: httpx.Client, wanted: dict[str | None, str]) -> None:
    name = model.lower().rpartition(":")[2]
    assert text_of(complete(client, model)) == wanted[name if name in wanted else None]
    assert complete(client, model).json()["model"] == model


def test_every_dialect_takes_the_name(client: httpx.Client) -> None:
    """Asked twice with the adapter, each dialect gives the same answer; without it another one."""
    asked = {
        "/v1/chat/completions": {"messages": SAID, **GREEDY},
        "/v1/completions": {"prompt": PROMPT, **GREEDY},
        "/v1/responses": {"input": "hi", "max_output_tokens": 12, "temperature": 0},
        "/v1/messages": {"messages": SAID, **GREEDY},
        "/api/chat": {"messages": SAID, "stream": False, "options": {"num_predict": 12, "temperature": 0}},
        "/api/generate": {"prompt": PROMPT, "stream": False, "options": {"num_predict": 12, "temperature": 0}},
        "/completion": {"prompt": PROMPT, "n_predict": 12, "temperature": 0},
        "/chat/completions": {"messages": SAID, **GREEDY},
    }
    for path, body in asked.items():
        said = {}
        for model in ("demo", "demo:one", "one"):
            reply = client.post(path, json={**body, "model": model})
            assert reply.status_code == 200, (path, reply.text)
            said[model] = find_text(path, reply.json())
        assert said["demo"] != said["demo:one"] == said["one"], path


def find_text(path: str, reply: dict) -> str:
    match path:
        case "/v1/responses":
            return "".join(part["text"] for item in reply["output"] for part in item.get("content", ()))
        case "/v1/messages":
            return "".join(block.get("text", "") for block in reply["content"])
        case "/api/chat":
            return str(reply["message"]["content"])
        case "/api/generate":
            return str(reply["response"])
        case "/completion":
            return str(reply["content"])
    choice = reply["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_vectors_have_the_adapter_too(client: httpx.Client) -> None:
    vectors = [
        client.post("/v1/embeddings", json={"model": model, "input": "a"}).json()["data"][0]["embedding"]
        for model in ("demo", "demo:one", "one")
    ]
    assert vectors[0] != vectors[1] == vectors[2]


def test_models_list_adapters_with_their_base(client: httpx.Client) -> None:
    listed = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert (listed["one"]["parent"], listed["one"]["root"]) == ("demo", "one")
    assert (listed["demo"]["parent"], listed["demo"]["root"]) == (None, "demo")
    assert client.get("/v1/models/demo:one").json()["id"] == "demo:one"
    assert client.get("/v1/models/one").json()["parent"] == "demo"
    assert client.post("/api/show", json={"model": "one"}).json()["details"]["family"] == "llama"
    assert client.get("/v1/admin/models/demo:one/memory").json()["model"] == "demo"


@pytest.mark.parametrize(
    "model", ["demo:nothing", "nothing", "nothing:one", "demo-draft:one", "one:one", ":one", "demo:"]
)
def test_other_names_are_refused(model: str, client: httpx.Client) -> None:
    reply = complete(client, model)
    assert reply.status_code in (400, 404)
    assert "\n" not in reply.json()["error"]["message"]


def test_llamacpp_chooses_by_id_and_scale(client: httpx.Client, wanted: dict[str | None, str]) -> None:
    listed = client.get("/lora-adapters").json()
    ids = {row["path"]: row["id"] for row in listed}
    assert {row["scale"] for row in listed} == {0.0}
    one, folder = ids["one"], ids["folder"]

    def say(**fields: object) -> str:
        body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, **fields}
        return str(client.post("/completion", json=body).json()["content"])

    assert say(lora=[{"id": one, "scale": 1.0}]) == wanted["one"]
    assert say(lora=[{"id": one, "scale": 0.0}, {"id": 99, "scale": 1.0}]) == wanted[None]
    half = say(lora=[{"id": one, "scale": -0.5}])
    assert half != wanted["one"]
    assert half == say(lora=[{"id": folder, "scale": 0.0}, {"id": one, "scale": -0.5}])
    both = [{"id": one, "scale": 0.5}, {"id": folder, "scale": -1.5}]
    assert one < folder
    assert say(lora=both) == say(lora=both[::-1]) == wanted["sum"]
    assert client.post("/lora-adapters", json=both).json() == {"success": True}
    assert say() == wanted["sum"] == text_of(complete(client, "demo"))
    assert text_of(complete(client, "one", lora=[])) == wanted[None]
    assert client.post("/lora-adapters", json=[{"id": one, "scale": 1.0}]).json() == {"success": True}
    assert say() == wanted["one"] == text_of(complete(client, "demo"))
    assert say(lora=[]) == wanted[None]
    assert text_of(complete(client, "folder")) == wanted["folder"]
    assert next(row for row in client.get("/lora-adapters").json() if row["id"] == one)["scale"] == 1.0
    assert client.post("/lora-adapters", json=[]).status_code == 200
    assert say() == wanted[None]
    for wrong in ({"id": 1}, "x", [{"id": -1, "scale": 1}], [{"id": 0, "scale": "1"}], [{"id": 0}]):
        assert client.post("/lora-adapters", json=wrong).status_code == 400
    assert client.post("/completion", json={"prompt": "a", "lora": {"id": 0, "scale": 1}}).status_code == 400


def test_vllm_loads_and_unloads(client: httpx.Client, wanted: dict[str | None, str]) -> None:
    given = {"lora_name": "fresh", "lora_path": "two.gguf"}
    reply = client.post("/v1/load_lora_adapter", json=given)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'fresh' added successfully.")
    assert text_of(complete(client, "fresh")) == wanted["two"]
    again = client.post("/v1/load_lora_adapter", json=given)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "name")
    other = client.post("/v1/load_lora_adapter", json={**given, "lora_path": "three.gguf", "load_inplace": True})
    assert other.status_code == 200
    assert text_of(complete(client, "fresh")) == wanted["three"]
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "fresh"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'fresh' removed successfully.")
    assert complete(client, "fresh").status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "fresh"}).status_code == 404


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.gguf", "nothing.gguf", "a\x00b", "x" * 4000])
def test_paths_outside_are_not_looked_at(path: str, client: httpx.Client) -> None:
    reply = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": path})
    assert reply.status_code in (400, 403, 404)
    assert "\n" not in reply.json()["error"]["message"]
    assert "bad" not in {row["id"] for row in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("name", ["", "demo", "a/b", "../x", "a:b", ".hidden", "x" * 200, "né", "a b", "a\nb", "@part"])
def test_hostile_names_are_refused(name: str, client: httpx.Client) -> None:
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "two.gguf"}),
        ("/v1/admin/adapters", {"name": name, "path": "two.gguf"}),
    ):
        reply = client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert "\n" not in reply.json()["error"]["message"]


@pytest.mark.parametrize("harm", ["model", "truncated", "random", "other shapes", "empty folder"])
def test_hostile_files_end_in_one_line(harm: str, files: Path, client: httpx.Client) -> None:
    path = files / "harm.gguf"
    match harm:
        case "model":
            path.write_bytes((ASSETS / "demo-draft.gguf").read_bytes())
        case "truncated":
            path.write_bytes((files / "one.gguf").read_bytes()[:5000])
        case "random":
            path.write_bytes(random.Random(1).randbytes(5000))
        case "other shapes":
            path.write_bytes((files / "one.gguf").read_bytes().replace(b"blk.1.ffn_down", b"blk.1.ffn_gate"))
        case "empty folder":
            path = files / "nothing"
            path.mkdir()
    reply = client.post("/v1/admin/adapters", json={"name": "harm", "path": path.name})
    assert reply.status_code in (400, 404), reply.text
    assert "\n" not in reply.json()["error"]["message"]
    assert complete(client, "harm").status_code == 404


def test_without_a_folder_no_path_is_read(make_server: MakeServer, files: Path) -> None:
    server = make_server()
    with server.client() as client:
        reply = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(files / "one.gguf")})
        assert (reply.status_code, "import-folders" in reply.text) == (403, True)
        added = server.app.state.parts.registry.adapters.add(
            "kept", files / "one.gguf", server.app.state.parts.registry.get("demo")
        )
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "kept"}).status_code == 200
        assert text_of(complete(client, "a")) == text_of(complete(client, "demo:kept"))
        assert added.rank == 4


@pytest.mark.parametrize("row", ["one", "=x", "one=", "a b=one.gguf", "one=/nothing/there", "nothing:one=FILE"])
def test_settings_that_are_wrong_are_told(row: str, files: Path, tmp_path: Path) -> None:
    settings = resolve({"models_folder": tmp_path, "adapters": row.replace("FILE", str(files / "one.gguf"))}, {})
    served = ServedModels(open_registry(settings), settings)
    with pytest.raises(SettingError) as caught:
        served.adapters.read_settings()
    assert "\n" not in str(caught.value)


def test_admin_tells_what_is_loaded(client: httpx.Client, running: RunningServer) -> None:
    assert complete(client, "one").status_code == 200
    rows = {row["name"]: row for row in client.get("/v1/admin/adapters").json()["adapters"]}
    one = rows["one"]
    assert (one["base"], one["rank"], one["loaded_in"], one["is_in_use"]) == ("demo", 4, ["demo"], False)
    assert one["requests"] > 0
    metrics = client.get("/metrics").text
    assert 'mlxr_adapter_requests_total{adapter="one",model="demo:latest"}' in metrics
    assert 'mlxr_adapters{model="demo:latest",state="loaded"}' in metrics
    held = client.get("/v1/admin/adapters").json()["held_bytes"]
    assert held >= one["loaded_bytes"] > 0
    assert f'mlxr_adapter_bytes{{kind="held",model="demo:latest"}} {float(held)}' in metrics
    assert client.delete("/v1/admin/adapters/one").json() == {"name": "one", "base": "demo"}
    assert complete(client, "one").status_code == 404
    assert client.delete("/v1/admin/adapters/one").status_code == 404
    adapters = running.app.state.parts.served.adapters
    record = adapters.describe("one", Path(running.settings.import_folders[0]) / "one.gguf")
    assert complete(client, "one").status_code == 404, "it is not given before all of it has been read"
    adapters.give(record)


def test_unloading_waits_for_answers_and_new_requests_are_refused(client: httpx.Client, running: RunningServer) -> None:
    client.post("/v1/load_lora_adapter", json={"lora_name": "busy", "lora_path": "two.gguf"})
    body = {"model": "busy", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    done: list[int] = []
    with running.client() as streaming, streaming.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)

        def unload() -> None:
            with running.client() as other:
                done.append(other.post("/v1/unload_lora_adapter", json={"lora_name": "busy"}).status_code)

        thread = threading.Thread(target=unload)
        thread.start()
        while complete(client, "busy").status_code != 404:
            pass
        held = running.app.state.parts.pool.running()[0].session.adapters.held_bytes
        assert not done or stream.is_closed
        assert held > 0
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in lines
            if line.startswith("data: {") and "choices" in line
        )
    thread.join(60)
    assert (done, len(text) > 100) == ([200], True)


def test_one_that_is_unloaded_while_it_is_read_does_not_stay(
    make_server: MakeServer, files: Path, wanted: dict[str | None, str]
) -> None:
    server = make_server(import_folders=str(files), adapter_bytes="1M", strict_model_names=True)
    adapters = server.app.state.parts.pool.running()[0].session.adapters
    provide, unloaded = adapters.provide, []

    def unload_and_provide(*arguments: object) -> object:
        with server.client() as other:
            unloaded.append(other.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code)
        return provide(*arguments)

    with server.client() as client:
        client.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "one.gguf"})
        adapters.forget(server.app.state.parts.served.adapters.get("one"))
        adapters.provide = unload_and_provide
        assert text_of(complete(client, "one")) == wanted["one"]
        assert unloaded == [200]
        wait_until(lambda: client.get("/v1/admin/adapters").json()["held_bytes"] == 0)


def test_the_cache_keeps_adapters_apart(client: httpx.Client) -> None:
    """A long prompt is found again only with the same adapter, by whatever name."""
    prompt = "def f(x):\n    return x\n" * 20

    def count_cached(model: str) -> int:
        reply = complete(client, model, prompt=prompt, max_tokens=1).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [count_cached(model) > 0 for model in ("demo", "folder", "demo:folder", "demo", "one")] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_an_adapter_beyond_the_memory_is_refused_and_idle_ones_make_room(make_server: MakeServer, files: Path) -> None:
    given = ",".join(f"{name}={files / name}.gguf" for name in ("one", "two", "three"))
    server = make_server(adapters=given, adapter_bytes=1)
    with server.client() as client:
        reply = complete(client, "one")
        assert (reply.status_code, "raise adapter_bytes" in reply.text) == (400, True)
    size_bytes = int(reply.json()["error"]["message"].split(" takes ")[1].split()[0])
    server = make_server(adapters=given, adapter_bytes=5 * size_bytes // 2)
    with server.client() as client:
        for name in ("one", "two", "three", "one"):
            assert complete(client, name).status_code == 200
            assert client.get("/v1/admin/adapters").json()["held_bytes"] <= 5 * size_bytes // 2


@pytest.mark.parametrize("seed", range(2))
def test_random_loads_and_unloads_under_load(
    seed: int, make_server: MakeServer, files: Path, wanted: dict[str | None, str]
) -> None:
    """Every answer is that of its adapter, or a refusal by name; nothing stays behind."""
    server = make_server(import_folders=str(files), adapter_bytes="1M", max_sequences=8, strict_model_names=True)
    wrong: list[object] = []

    def work(number: int) -> None:
        chance = random.Random((seed, number).__hash__())
        with server.client() as client:
            for _ in range(12):
                name = chance.choice(["one", "two", "three"])
                match chance.randrange(4):
                    case 0:
                        body = {"lora_name": name, "lora_path": f"{name}.gguf", "load_inplace": True}
                        reply = client.post("/v1/load_lora_adapter", json=body)
                        fine = reply.status_code in (200, 429)
                    case 1:
                        reply = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                        fine = reply.status_code in (200, 404)
                    case _:
                        model = chance.choice(["demo", f"demo:{name}", name])
                        reply = complete(client, model)
                        own = None if model == "demo" else name
                        fine = (
                            reply.status_code in (404, 429)
                            if reply.status_code != 200
                            else text_of(reply) == wanted[own]
                        )
                if not fine:
                    wrong.append((name, reply.status_code, reply.text))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    with server.client() as client:
        for name in ("one", "two", "three"):
            client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        state = client.get("/v1/admin/adapters").json()
        assert state["adapters"] == []
        # What was replaced while an answer had it is gone a moment after the answer.
        wait_until(lambda: client.get("/v1/admin/adapters").json()["held_bytes"] == 0)
