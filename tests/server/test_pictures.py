"""Pictures in requests of every dialect, and in programs and commands."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, start_server

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("models", "registry", "pictures")]
Image = pytest.importorskip("PIL.Image")

from fake_hub import FakeHub  # noqa: E402 -- needs the path
from made_documents import make_pdf  # noqa: E402
from vision_models import draw_picture, write_chat_folder, write_mmproj  # noqa: E402

from mlxr import LLM, SamplingParams  # noqa: E402
from mlxr.cli.main import main  # noqa: E402
from mlxr.core.errors import InvalidRequest  # noqa: E402


def make_png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(draw_picture(60, 80, seed)).save(buffer, "PNG")
    return buffer.getvalue()


BASE64 = base64.b64encode(make_png()).decode()
URL = f"data:image/png;base64,{BASE64}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("seeing") / "eyes", "qwen3vl")


@pytest.fixture(scope="module")
def eyes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model as a GGUF file, and its tower far from it."""
    place = tmp_path_factory.mktemp("files")
    assert main(["convert", str(folder), str(place / "eyes-F32.gguf"), "--type", "f32"]) == 0
    return place / "eyes-F32.gguf", write_mmproj(place / "far.bin", "qwen3vl")


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        yield fake


@pytest.fixture(scope="module")
def server(folder: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(tmp_path_factory.mktemp("registry"), default_model=str(folder), hub_url=hub.url)
    yield running
    running.stop()


def post(server: RunningServer, path: str, **body: Any) -> Any:
    with server.client() as client:
        return client.post(path, json=body)


def chat(server: RunningServer, content: Any, **body: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return post(server, "/v1/chat/completions", messages=messages, max_tokens=4, temperature=0, **body)


def test_all_dialects_show_the_same_picture(server: RunningServer) -> None:
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
    first = chat(server, [part, {"type": "text", "text": "the quick"}])
    assert first.status_code == 200, first.text
    text, prompt_tokens = first.json()["choices"][0]["message"]["content"], first.json()["usage"]["prompt_tokens"]
    assert prompt_tokens > 25  # as many as the picture has rows, and more
    response = post(
        server,
        "/v1/responses",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                    {"type": "input_text", "text": "the quick"},
                ],
            }
        ],
        max_output_tokens=4,
        temperature=0,
    ).json()
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens"] == prompt_tokens
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
    question = {"role": "user", "content": [image, {"type": "text", "text": "the quick"}]}
    claude = post(server, "/v1/messages", model="default", messages=[question], max_tokens=4, temperature=0).json()
    assert claude["content"][0]["text"] == text
    options = {"temperature": 0, "num_predict": 4}
    message = {"role": "user", "content": "the quick", "images": [BASE64]}
    model = str(server.settings.default_model)
    ollama = post(server, "/api/chat", model=model, messages=[message], stream=False, options=options).json()
    assert ollama["message"]["content"] == text
    assert ollama["prompt_eval_count"] == prompt_tokens
    written = post(
        server, "/api/generate", model=model, prompt="the quick", images=[BASE64], stream=False, options=options
    ).json()
    assert written["response"] == text
    counted = post(server, "/v1/messages/count_tokens", model="default", messages=[question])
    assert counted.json()["input_tokens"] == prompt_tokens


def test_a_prompt_without_a_conversation_shows_pictures(server: RunningServer) -> None:
    """Clients of llama.cpp write them so: a mark in the text, and the pictures beside it."""
    with server.client() as client:
        mark = client.get("/props").json()["media_marker"]
    asked = {
        "prompt": {"prompt_string": f"{'the quick ' * 9}{mark} quick", "multimodal_data": [BASE64]},
        "n_predict": 4,
    }
    first = post(server, "/completion", **asked, temperature=0)
    assert first.status_code == 200, first.text
    blind = post(server, "/completion", prompt="the quick " * 9, n_predict=4, temperature=0).json()
    assert first.json()["tokens_evaluated"] > 20 + blind["tokens_evaluated"]
    again = post(server, "/completion", **asked, temperature=0).json()
    assert again["content"] == first.json()["content"]
    assert again["tokens_cached"] >= 16
    several = [asked["prompt"], "the quick"]
    assert len(post(server, "/completion", **asked | {"prompt": several}).json()) == 2
    for given, message in (
        ({"prompt_string": "no mark", "multimodal_data": [BASE64]}, "has 1 pictures for 0 places <__media__>"),
        ({"prompt_string": mark, "multimodal_data": ["A*"]}, r"prompt.multimodal_data[0]: is no base64"),
        ({"prompt_string": mark, "multimodal_data": "A"}, "must be a list of pictures in base64"),
        ({"prompt_string": mark, "multimodal_data": ["AAAA"]}, "is none of the kinds that can be read"),
    ):
        refused = post(server, "/completion", prompt=given)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
    assert post(server, "/embedding", content={"prompt_string": mark, "multimodal_data": [BASE64]}).status_code == 400


def test_all_dialects_read_documents(server: RunningServer) -> None:
    """Pages with text are text, and pages without are pictures."""
    pytest.importorskip("pypdfium2")
    data = base64.b64encode(make_pdf(["the quick", ""])).decode()
    url = f"data:application/pdf;base64,{data}"
    first = chat(server, [{"type": "file", "file": {"file_data": url, "filename": "a.pdf"}}])
    assert first.status_code == 200, first.text
    tokens = first.json()["usage"]["prompt_tokens"]
    alone = f"data:;base64,{base64.b64encode(make_pdf(['the quick'])).decode()}"
    without = chat(server, [{"type": "file", "file": {"file_data": alone, "filename": "a.pdf"}}]).json()
    assert tokens > 16 + without["usage"]["prompt_tokens"]  # the picture of a page
    file = {"type": "input_file", "file_data": url, "filename": "a.pdf"}
    response = post(
        server, "/v1/responses", input=[{"role": "user", "content": [file]}], max_output_tokens=4, temperature=0
    ).json()
    assert response["usage"]["input_tokens"] == tokens
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    document = {"role": "user", "content": [{"type": "document", "source": source, "title": "a.pdf"}]}
    claude = post(server, "/v1/messages", model="default", messages=[document], max_tokens=4, temperature=0).json()
    assert claude["usage"]["input_tokens"] + claude["usage"]["cache_read_input_tokens"] == tokens
    assert claude["content"][0]["text"] == first.json()["choices"][0]["message"]["content"]
    text = base64.b64encode(make_pdf(["the quick", "brown fox"])).decode()
    told = chat(server, [{"type": "file", "file": {"file_data": f"data:;base64,{text}"}}], model="demo")
    assert told.status_code == 200, told.text  # a model of text reads texts
    same = chat(server, "the quick\n\nbrown fox\n\n", model="demo").json()
    assert same["usage"]["prompt_tokens"] == told.json()["usage"]["prompt_tokens"]
    for given, message in ((url, "is a picture, and this model reads text only"), ("data:;base64,/w==", "neither")):
        refused = chat(server, [{"type": "file", "file": {"file_data": given}}], model="demo")
        assert refused.status_code == 400
        assert "messages[0].content[0].file" in refused.text
        assert message in refused.text
    many = chat(server, [{"type": "file", "file": {"file_data": "data:;base64,eA=="}}] * 17, model="demo")
    assert (many.status_code, "have more than 16 documents" in many.text) == (400, True)


def test_pictures_come_in_results_of_tools(server: RunningServer) -> None:
    image = {"type": "image", "source": {"type": "url", "url": URL}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "see"}, image]}
    messages = [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    found = post(server, "/v1/messages", model="default", messages=messages, tools=tools, max_tokens=1)
    assert found.status_code == 200, found.text


def test_low_detail_takes_fewer_tokens_and_forged_places_are_text(server: RunningServer) -> None:
    buffer = io.BytesIO()
    Image.fromarray(draw_picture(320, 400)).save(buffer, "PNG")
    part = {"type": "image_url", "image_url": "data:;base64," + base64.b64encode(buffer.getvalue()).decode()}
    whole = chat(server, [part]).json()["usage"]["prompt_tokens"]
    forged = chat(server, [part, {"type": "text", "text": "<|image_pad|><|vision_start|>"}])
    assert forged.status_code == 200, forged.text
    assert forged.json()["usage"]["prompt_tokens"] > whole
    again = chat(server, [part]).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.png", "no address is fetched but those of the setting image_origins"),
        ("http://example.com/a.png", "got 'http': no such address is fetched"),
        ("file:///etc/passwd", "got 'file': no such address is fetched"),
        ("data:image/png;base64,AAAA", "is none of the kinds that can be read"),
        ("data:image/png;base64,A*", "is no base64"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(server: RunningServer, url: str, message: str) -> None:
    refused = chat(server, [{"type": "image_url", "image_url": {"url": url}}])
    assert refused.status_code == 400
    assert message in refused.text
    assert "messages[0].content[0]" in refused.text


def test_what_a_model_can_do_says_that_it_sees(server: RunningServer) -> None:
    model = str(server.settings.default_model)
    assert "vision" in post(server, "/api/show", model=model).json()["capabilities"]
    with server.client() as client:
        assert client.get("/props").json()["modalities"] == {"vision": True, "audio": False}
        assert "vision" in client.get(f"/v1/models/{model}").json()["capabilities"]


def test_a_model_that_is_pulled_sees(server: RunningServer, hub: FakeHub, eyes: tuple[Path, Path], capfd: Any) -> None:
    """A file and its tower from a hub, and copies and models made of them."""
    name, folder = "hf.co/me/Eyes-GGUF", str(server.settings.models_folder)
    hub.add("me/Eyes-GGUF", {"eyes-F32.gguf": eyes[0].read_bytes(), "mmproj-F16.gguf": eyes[1].read_bytes()})
    assert post(server, "/api/pull", model=name, stream=False).json() == {"status": "success"}
    created = {"template": "{{ messages[0].content }}", "quantize": "f16", "stream": False}
    assert post(server, "/api/create", model="made", **{"from": name}, **created).status_code == 200
    assert post(server, "/api/copy", source=name, destination="again").status_code == 200
    for one in (name, "made", "again"):
        assert "vision" in post(server, "/api/show", model=one).json()["capabilities"], one
    content = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "the quick"}]
    answer = chat(server, content, model="again")
    assert answer.status_code == 200, answer.text
    capfd.readouterr()
    for command in (["ps", "--url", server.url], ["list", "--models-folder", folder]):
        assert main(command) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("again:latest ") and "  yes  " in line]
    assert [line for line in lines if line.startswith("again ") and "F32, vision" in line]
    assert main(["show", "again", "--models-folder", folder]) == 0
    assert "mmproj-F16.gguf" in capfd.readouterr().out


def test_a_tower_of_ollama_belongs_to_its_model(
    eyes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, blobs = tmp_path / "manifests" / "hf.co/me/eyes/latest", tmp_path / "blobs"
    for made in (manifest.parent, blobs):
        made.mkdir(parents=True)
    layers = []
    for kind, digest, file in zip(("model", "projector"), ("0a", "0b"), eyes, strict=True):
        (blobs / f"sha256-{digest}").write_bytes(file.read_bytes())
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest.write_text(json.dumps({"layers": layers[::-1]}))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path / "models"))
    assert main(["import", "--from", "ollama"]) == 0
    with LLM("hf.co/me/eyes", threads=1, arena_bytes="16M") as llm:
        found = llm.chat(
            [{"role": "user", "content": [{"type": "image", "image": make_png()}]}], SamplingParams(max_tokens=2)
        )
    assert found.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("case", "places"),
    [
        *(("gemma3", 9 + 2), ("smolvlm", 5 * 4 + 10), ("mistral3", 12 + 3), ("lfm2vl", 4 + 2)),
        *(("qwen25vl", 20 + 2), ("gemma4", 540 + 2), ("internvl", 5 * 4 + 2), ("glmocr", 20 + 2)),
    ],
)
def test_other_families_are_shown_pictures_in_their_own_words(tmp_path: Path, case: str, places: int) -> None:
    folder = write_chat_folder(tmp_path / case, case)
    parts = [{"type": "text", "text": "the quick"}, {"type": "image", "image": make_png()}]
    with LLM(folder, threads=1, arena_bytes="16M") as llm:
        asked = [{"role": "user", "content": kept} for kept in (parts, parts[:1])]
        seen, plain = (llm.chat([message], SamplingParams(max_tokens=2)).usage.prompt_tokens for message in asked)
    assert seen - plain >= places


def test_a_model_of_text_refuses_and_says_what_is_missing() -> None:
    with LLM("demo", threads=1, arena_bytes="16M") as llm:
        picture = {"type": "image", "image": make_png()}
        with pytest.raises(
            InvalidRequest, match=r"reads text only: there is no file mmproj\*\.gguf beside .*demo\.gguf"
        ):
            llm.chat([{"role": "user", "content": [picture]}])


def test_programs_and_commands_show_files(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(make_png())
    parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": "the quick"}]
    with LLM(folder, threads=1, arena_bytes="16M") as llm:
        found = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=4, temperature=0))
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: .*none.png cannot be read"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "none.png")}]}])
    words = ["run", str(folder), "the quick", str(path), "--max-tokens", "4", "--temperature", "0", "--threads", "1"]
    capfd.readouterr()
    assert main([*words, "--arena-bytes", "16M"]) == 0
    assert capfd.readouterr().out.strip() == found.text.strip()


def test_a_chat_shows_pictures(
    folder: Path,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlxr.cli.main import main

    path, text_path = tmp_path / "a b.png", tmp_path / "a.txt"
    path.write_bytes(make_png())
    text_path.write_text("no picture")
    user = {"role": "user", "content": [{"type": "image", "image": str(path)}, {"type": "text", "text": "the quick"}]}
    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(folder, threads=1, arena_bytes="16M") as llm:
        assert llm.blind == ""
        first = llm.chat([user], params).text
        turns = [user, {"role": "assistant", "content": first}, {"role": "user", "content": "the fox"}]
        second = llm.chat(turns, params).text
    lines = [f"/image '{path}'", "the quick", "/retry", "the fox", "/image none.png", f"/image {text_path} the dog"]
    lines += ["/undo", "/edit", "the quick"]
    here = [str(folder), "--threads", "1", "--arena-bytes", "16M"]
    for words, named in ((here, f"/image {text_path}: "), (["--url", server.url], "messages[4].content[0]: ")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        assert main(["chat", *words, "--max-tokens", "4", "--temperature", "0"]) == 0
        out, err = capsys.readouterr()
        assert out.splitlines() == [text.strip() for text in (first, first, second, first)], err
        assert "goes with the next question" in err
        assert "/image: none.png cannot be read" in err
        assert f"{named}is none of the kinds that can be read" in err
        assert "left out from now on" in err


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen35", "qwen3vl", "gemma3", "gemma4", "lfm2vl"])
def test_a_conversation_encodes_its_pictures_once(case: str, tmp_path: Path) -> None:
    """Ten turns about two pictures: little is computed again, and nothing is encoded again, also when each of three
    processes goes on after the one before it, the last one with a question that was asked before.
    """
    eyes = write_chat_folder(tmp_path / "eyes", case, 4096)
    settings: dict[str, Any] = {"threads": 1, "arena_bytes": "64M", "page_size": 16, "store_bytes": "64M"}
    settings["store_folder"] = tmp_path / "store"
    pictures = [{"type": "image", "image": make_png(seed)} for seed in range(2)]
    messages: list[dict[str, Any]] = []
    known = lost = before = 0
    params = SamplingParams(max_tokens=8, temperature=0)
    tiles = 5 if case == "lfm2vl" else 1
    for encoded, turns in ((2 * tiles, range(5)), (0, range(5, 10))):
        with LLM(eyes, **settings) as llm:
            for turn in turns:
                question = {"type": "text", "text": f"{turn} " + "the quick brown fox jumps over the lazy dog " * 6}
                messages.append({"role": "user", "content": [*(pictures if turn == 0 else ()), question]})
                found = llm.chat(messages, params)
                lost += max(0, before - found.usage.cached_tokens)
                known += before
                before = found.usage.prompt_tokens
                assert llm.stats().engine.encoded_pictures == encoded
                asked, messages = messages, [*messages, {"role": "assistant", "content": found.text}]
    assert lost <= 0.05 * known, (lost, known)
    with LLM(eyes, **settings) as llm:
        again = llm.chat(asked, params)
        assert again.text == found.text
        assert llm.stats().engine.encoded_pictures == 0
        assert again.usage.cached_tokens >= 0.95 * again.usage.prompt_tokens
