"""Ollama's own client against the running server: listing, pulling, creating, copying, deleting, uploading."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
from running_server import MakeServer, RunningServer, start_server, wait_until

from mlxr.conversion import plan_tensors, write_model
from mlxr.loading import ASSETS, open_source
from mlxr.registry import Registry

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_hub import Behaviour, FakeHub, Repository

DRAFT = ASSETS / "demo-draft.gguf"
REPO, NAME = "me/draft-GGUF", "hf.co/me/draft-GGUF"
FILE = "draft.Q8_0.gguf"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        yield fake


@pytest.fixture(scope="module")
def here(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of this module's own, as its models change, which pulls from our hub."""
    running = start_server(tmp_path_factory.mktemp("ollama"), hub_url=hub.url)
    yield running
    running.stop()


@pytest.fixture
def registry(here: RunningServer) -> Iterator[Registry]:
    """The server's registry, emptied afterwards."""
    registry: Registry = here.app.state.parts.registry
    yield registry
    for record in registry.list():
        if not record.name.startswith("demo"):
            registry.remove(record.name)
    here.app.state.parts.pool.refresh()


@pytest.fixture
def api(here: RunningServer, registry: Registry) -> Iterator[ollama.Client]:
    with ollama.Client(here.url) as client:
        yield client


@pytest.fixture
def http(here: RunningServer, registry: Registry) -> Iterator[httpx.Client]:
    with here.client() as client:
        yield client


@pytest.fixture
def repository(hub: FakeHub) -> Repository:
    """The draft model on the hub, which serves it honestly unless the test changes that."""
    return hub.add(REPO, {FILE: DRAFT.read_bytes()})


def names(api: ollama.Client) -> list[str | None]:
    return [model.model for model in api.list().models]


def test_the_server_is_there(http: httpx.Client) -> None:
    assert http.get("/").text == "Ollama is running"
    for path in ("/", "/api/version", "/api/tags"):
        reply = http.head(path)
        assert (reply.status_code, reply.content) == (200, b"")
    assert http.get("/api/version").json()["version"].count(".") == 2


def test_list(http: httpx.Client, api: ollama.Client) -> None:
    assert names(api) == ["demo:latest", "demo-draft:latest"]
    (demo, _) = http.get("/api/tags").json()["models"]
    assert demo["name"] == demo["model"] == "demo:latest"
    assert demo["size"] == (ASSETS / "demo.gguf").stat().st_size
    assert len(demo["digest"]) == 64
    assert demo["capabilities"] == ["completion", "tools"]
    assert demo["has_chat_template"] is True
    assert demo["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "19.9M",
        "quantization_level": "Q8_0",
        "context_length": 2048,
        "embedding_length": 512,
    }


def test_show(http: httpx.Client, api: ollama.Client) -> None:
    shown = api.show("demo")
    assert shown.details is not None
    assert shown.details.quantization_level == "Q8_0"
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.modelinfo["general.parameter_count"] == 19_929_600
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert "<|im_start|>" in (shown.template or "")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelfile or "").splitlines()[1].startswith("FROM /")
    verbose = http.post("/api/show", json={"name": "demo", "verbose": True}).json()
    assert len(verbose["model_info"]["tokenizer.ggml.tokens"]) > 1000
    assert verbose["tensors"][0].keys() == {"name", "type", "shape"}
    options = http.post("/api/show", json={"model": "demo", "options": {"stop": ["a"], "top_k": 1}}).json()
    assert options["parameters"] == 'stop "a"\ntop_k 1'


def test_ps(api: ollama.Client) -> None:
    api.generate("demo", "x", options={"num_predict": 1})
    (model,) = [model for model in api.ps().models if model.name == "demo:latest"]
    assert (model.context_length, model.size_vram) == (2048, 0)
    assert model.expires_at is not None


def test_create_from_a_model(api: ollama.Client) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    reply = api.create(
        "mine:v1",
        from_="demo",
        template=template,
        system="Be brief.",
        parameters={"temperature": 0, "num_predict": 2, "stop": ["x"]},
        messages=[{"role": "user", "content": "Hi"}],
        license=["MIT", "and more"],
    )
    assert reply.status == "success"
    shown = api.show("MINE:v1")
    assert (shown.template, shown.license) == (template, "MIT\n\nand more")
    assert shown.parameters == 'num_predict 2\nstop "x"\ntemperature 0'
    assert shown.details is not None
    assert shown.details.parent_model == "demo"
    assert 'SYSTEM "Be brief."' in (shown.modelfile or "")
    assert api.chat("mine:v1", HELLO).eval_count == 2
    assert names(api)[0] == "mine:v1"


def test_create_with_a_go_template(api: ollama.Client) -> None:
    jinja = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    api.create("jinja", from_="demo", template=jinja)
    api.create("go", from_="demo", template="{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}{{ end }}<|assistant|>")
    options = {"num_predict": 8, "temperature": 0}
    assert api.chat("go", HELLO, options=options).message == api.chat("jinja", HELLO, options=options).message
    assert "{% for" in api.show("go").template.replace("{%+", "{%")
    with pytest.raises(ollama.ResponseError, match="the function printf is not supported"):
        api.create("go", from_="demo", template='{{ printf "%s" .Prompt }}')


def test_create_streams_its_status(api: ollama.Client) -> None:
    statuses = [line.status for line in api.create("mine", from_="demo", system="x", stream=True)]
    assert statuses[0] == "parsing model"
    assert (statuses[1] or "").startswith("using existing layer sha256:")
    assert statuses[-2:] == ["writing manifest", "success"]


def test_a_model_made_anew_is_the_one_that_answers(api: ollama.Client) -> None:
    for system in ("Be brief.", "Be very, very, very brief indeed."):
        api.create("mine", from_="demo", system=system)
        counts = [api.chat("mine", HELLO, options={"num_predict": 1}).prompt_eval_count for _ in range(2)]
        alone = api.chat("demo", [{"role": "system", "content": system}, *HELLO], options={"num_predict": 1})
        assert counts == [alone.prompt_eval_count] * 2


def test_upload_and_create(api: ollama.Client, http: httpx.Client, registry: Registry, tmp_path: Path) -> None:
    digest = f"sha256:{hashlib.sha256(DRAFT.read_bytes()).hexdigest()}"
    assert http.head(f"/api/blobs/{digest}").status_code == 404
    assert api.create_blob(DRAFT) == digest
    assert http.head(f"/api/blobs/{digest}").status_code == 200
    assert api.create("up", files={"draft.gguf": digest}).status == "success"
    assert registry.get("up").is_owned
    expected = api.generate("demo-draft", "import", raw=True, options={"temperature": 0, "num_predict": 5}).response
    reply = api.generate("up", "import", raw=True, options={"temperature": 0, "num_predict": 5})
    assert reply.response == expected
    api.delete("up")
    assert http.head(f"/api/blobs/{digest}").status_code == 404


def test_create_quantises_an_upload(api: ollama.Client, registry: Registry, tmp_path: Path) -> None:
    whole, small = tmp_path / "whole.gguf", tmp_path / "small.gguf"
    for source, target, recipe in ((DRAFT, whole, "f16"), (whole, small, "q4_0")):
        model = open_source(source)
        with model.file:
            write_model(model, plan_tensors(model, recipe), recipe, target)
    digest = api.create_blob(whole)
    lines = list(api.create("small", files={"whole.gguf": digest}, quantize="Q4_0", stream=True))
    written = [line for line in lines if line.status == "quantizing model to Q4_0"]
    assert written[-1].completed == written[-1].total
    assert lines[-1].status == "success"
    (file,) = registry.get("small").files
    assert file.sha256 == hashlib.sha256(small.read_bytes()).hexdigest()
    assert api.show("small").details.quantization_level == "Q4_0"  # type: ignore[union-attr]
    with pytest.raises(ollama.ResponseError, match="quantised already"):
        api.create("smaller", from_="small", quantize="q8_0")
    api.delete("small")
    registry.discard([digest])  # an upload may be used again for a day
    assert list(registry.blobs.folder.iterdir()) == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("system", "\ud83d"),
        ("license", ["MIT", "\ud83d"]),
        ("template", "{{ messages }}\ude00"),
        ("parameters", {"stop": ["\ud83d"]}),
        ("messages", [{"role": "user", "content": "\ud83d"}]),
        ("parameters", {"temperature": "hot"}),
        ("messages", [{"role": "nobody", "content": "a"}]),
        ("template", "{% if %}"),
        ("adapters", {"a.gguf": "sha256:" + "0" * 64}),
    ],
)
def test_a_creation_that_is_refused_makes_nothing(
    api: ollama.Client, http: httpx.Client, registry: Registry, field: str, value: object, stream: bool
) -> None:
    body = {"model": "made", "from": "demo", field: value, "stream": stream}
    reply = http.post("/api/create", content=json.dumps(body))
    assert "error" in json.loads(reply.text.splitlines()[-1])
    assert names(api) == ["demo:latest", "demo-draft:latest"]
    assert list(registry.blobs.digests()) == []


def test_uploads_that_lie_leave_nothing(http: httpx.Client, registry: Registry) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    reply = http.post(f"/api/blobs/sha256:{digest}", content=b"wrong")
    assert reply.status_code == 400
    assert "the contents are sha256:" in reply.json()["error"]
    for bad in ("sha256:..%2f..%2fetc%2fpasswd", "sha256:zz", "md5:" + "0" * 32, "..%2f" + digest, digest[:-1]):
        for method in ("HEAD", "POST"):
            assert http.request(method, f"/api/blobs/{bad}", content=b"x").status_code in (400, 404, 405)
    assert list(registry.blobs.folder.iterdir()) == []


def test_an_upload_that_ends_early_leaves_nothing(here: RunningServer, registry: Registry) -> None:
    digest = hashlib.sha256(b"0123456789").hexdigest()

    def half() -> Iterator[bytes]:
        yield b"01234"
        raise RuntimeError("the client dies")

    with here.client() as client, pytest.raises(RuntimeError):
        client.post(f"/api/blobs/sha256:{digest}", content=half(), headers={"Content-Length": "10"})
    wait_until(lambda: not registry.blobs.folder.exists() or not list(registry.blobs.folder.iterdir()))


def test_copy_and_delete(api: ollama.Client) -> None:
    assert api.copy("demo", "second").status == "success"
    assert api.chat("second", HELLO, options={"num_predict": 1}).done
    assert "second:latest" in [model.name for model in api.ps().models]
    assert api.delete("second").status == "success"
    assert "second:latest" not in [model.name for model in api.ps().models]
    assert names(api) == ["demo:latest", "demo-draft:latest"]
    for call in (lambda: api.delete("second"), lambda: api.chat("second", HELLO), lambda: api.copy("second", "x")):
        with pytest.raises(ollama.ResponseError, match="'second' not found") as caught:
            call()
        assert caught.value.status_code == 404


def test_a_renderer_of_ollama_is_a_hint(http: httpx.Client, registry: Registry) -> None:
    body = {"model": "rendered", "from": "demo", "renderer": "qwen3-coder", "parser": "qwen3-coder", "stream": False}
    reply = http.post("/api/create", json=body)
    assert (reply.status_code, set(reply.headers["x-mlxr-ignored"].split(", "))) == (200, {"renderer", "parser"})
    assert registry.get("rendered").template is None


def test_no_model_is_lost_by_a_copy(api: ollama.Client, http: httpx.Client, registry: Registry) -> None:
    api.copy("demo-draft", "first")
    api.create("owned", from_="demo", system="Be brief.", stream=False)
    kept = registry.get("owned")
    with pytest.raises(ollama.ResponseError, match="owned exists") as taken:
        api.copy("first", "owned")
    assert taken.value.status_code == 409
    assert registry.get("owned") == kept
    assert http.post("/api/copy", json={"source": "first", "destination": "owned", "replace": True}).is_success
    assert registry.get("owned").system is None


def test_a_creation_says_what_it_replaces(api: ollama.Client, http: httpx.Client, registry: Registry) -> None:
    assert [line.status for line in api.create("owned", from_="demo", stream=True)][1] != "replacing the model owned"
    again = list(api.create("owned", from_="demo-draft", system="x", stream=True))
    assert [line.status for line in again][1] == "replacing the model owned"
    body = {"model": "owned", "from": "demo", "stream": False}
    refused = http.post("/api/create", json={**body, "replace": False})
    assert (refused.status_code, registry.get("owned").system) == (409, "x")
    assert http.post("/api/create", json=body).json() == {"status": "success", "replaced": "owned"}


def test_pull(api: ollama.Client, repository: Repository, registry: Registry) -> None:
    assert api.pull(NAME).status == "success"
    assert names(api)[0] == f"{NAME}:latest"
    assert registry.get(NAME).path.read_bytes() == DRAFT.read_bytes()
    assert api.generate(NAME, "import", options={"num_predict": 2}).eval_count == 2


def test_pull_tells_how_far_it_is(api: ollama.Client, repository: Repository) -> None:
    lines = list(api.pull(f"{NAME}:q8_0", stream=True))
    statuses = [line.status or "" for line in lines]
    assert (statuses[0], statuses[-3:]) == (
        "pulling manifest",
        ["verifying sha256 digest", "writing manifest", "success"],
    )
    pieces = [line for line in lines if line.digest]
    digest = hashlib.sha256(DRAFT.read_bytes()).hexdigest()
    assert {line.status for line in pieces} == {f"pulling {digest[:12]}"}
    assert {line.digest for line in pieces} == {f"sha256:{digest}"}
    counts = [line.completed for line in pieces]
    assert counts == sorted(counts)  # type: ignore[type-var]
    assert (pieces[-1].completed, pieces[-1].total) == (DRAFT.stat().st_size, DRAFT.stat().st_size)
    assert names(api)[0] == f"{NAME}:q8_0"


def test_pulls_that_fail(api: ollama.Client, hub: FakeHub, repository: Repository, registry: Registry) -> None:
    repository.behaviour[FILE] = Behaviour(listed_sha256="ab" * 32)
    with pytest.raises(ollama.ResponseError, match="the hub listed the SHA-256 abab") as caught:
        api.pull(NAME)
    assert caught.value.status_code == 502
    with pytest.raises(ollama.ResponseError, match="the hub listed the SHA-256 abab"):
        list(api.pull(NAME, stream=True))
    for name, status, message in (
        ("hf.co/no/where", 404, "has no repository of that name"),
        ("lama3.2", 400, "did you mean llama3.2"),
        (f"{NAME}:Q2_K", 404, "no model for 'Q2_K'"),
        ("hf.co/a/../../etc", 400, "cannot be pulled"),
    ):
        with pytest.raises(ollama.ResponseError, match=message) as caught:
            api.pull(name)
        assert caught.value.status_code == status
    assert api.pull("demo").status == "success"
    hub.add("me/broken", {"x.gguf": b"GGUF and then nothing"})
    with pytest.raises(ollama.ResponseError, match="sha256"):
        api.pull("hf.co/me/broken")
    assert names(api) == ["demo:latest", "demo-draft:latest"]
    assert list(registry.blobs.digests()) == []


def test_a_pull_without_a_network(make_server: MakeServer) -> None:
    offline = make_server(hub_url="http://127.0.0.1:9")
    with ollama.Client(offline.url) as api:
        with pytest.raises(ollama.ResponseError, match=r"cannot be asked: .+; check the network") as caught:
            api.pull(NAME)
        assert caught.value.status_code == 502
        with pytest.raises(ollama.ResponseError, match="check the network"):
            list(api.pull(NAME, stream=True))


def test_a_pull_ends_with_its_client_and_goes_on_later(
    here: RunningServer, api: ollama.Client, hub: FakeHub, repository: Repository, registry: Registry
) -> None:
    release = threading.Event()
    repository.behaviour[FILE] = Behaviour(pause=release)
    with here.client() as client, client.stream("POST", "/api/pull", json={"model": NAME}) as reply:
        lines = reply.iter_lines()  # letting go of it would close the connection
        assert any("completed" in line for line in lines)
        wait_until(lambda: any(path.stat().st_size for path in registry.downloads.iterdir()))
    wait_until(lambda: not len(here.app.state.parts.activity))
    release.set()
    assert names(api) == ["demo:latest", "demo-draft:latest"]
    hub.requests.clear()
    assert api.pull(NAME).status == "success"
    (asked,) = [asked for path, asked in hub.requests if "/resolve/" in path]
    assert asked is not None
    assert int(asked.removeprefix("bytes=").removesuffix("-")) > 0


def test_others_are_answered_while_a_pull_goes_on(api: ollama.Client, repository: Repository) -> None:
    release = threading.Event()
    repository.behaviour[FILE] = Behaviour(pause=release)
    lines = api.pull(NAME, stream=True)
    assert next(lines).status == "pulling manifest"
    assert api.chat("demo", HELLO, options={"num_predict": 1}).done
    release.set()
    assert list(lines)[-1].status == "success"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append.__self__.__class__.__base__ }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{{ 'x' * 10**10 }}",
    ],
)
def test_templates_of_strangers_get_nowhere(api: ollama.Client, template: str) -> None:
    api.create("evil", from_="demo", template=template)
    with pytest.raises(ollama.ResponseError, match="chat template") as caught:
        api.chat("evil", HELLO)
    assert caught.value.status_code == 400
    assert api.generate("evil", "Hello", raw=True, options={"num_predict": 1}).done


def test_push_is_refused(api: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="push is not supported") as caught:
        api.push("demo")
    assert caught.value.status_code == 400


def test_a_server_with_keys(make_server: MakeServer) -> None:
    running = make_server(api_keys=["secret"])
    with ollama.Client(running.url) as client, pytest.raises(ollama.ResponseError) as caught:
        client.list()
    assert caught.value.status_code == 401
    with ollama.Client(running.url, headers={"Authorization": "Bearer secret"}) as client:
        assert client.list().models
    with running.client() as http:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("HEAD", "/api/tags"), ("GET", "/")):
            assert http.request(method, path).status_code == 401
