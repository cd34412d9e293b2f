"""Sounds in requests, in programs and in commands, and the answers of a model that hears."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, start_server

sys.path[:0] = [str(Path(__file__).parents[1] / "models")]

from hearing_models import draw_sound, read_hearing, write_wav  # noqa: E402 -- needs the path
from vision_models import write_chat_folder  # noqa: E402

from mlxr import LLM, SamplingParams  # noqa: E402
from mlxr.cli.main import main  # noqa: E402
from mlxr.core.errors import InvalidRequest  # noqa: E402

SOUND = write_wav(draw_sound(24_000, 24_000), 24_000)  # a second
BASE64 = base64.b64encode(SOUND).decode()
PART = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
WORDS = "<|audio>", "<|audio|>", "<audio|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("hearing") / "ears", read_hearing("conformer")[0], 1024, WORDS)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(tmp_path_factory.mktemp("registry"), default_model=str(folder))
    yield running
    running.stop()


def chat(server: RunningServer, content: Any, **body: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **body}
    with server.client() as client:
        return client.post("/v1/chat/completions", json=asked)


def transcribe(server: RunningServer, data: bytes = SOUND, task: str = "transcriptions", **fields: str) -> Any:
    with server.client() as client:
        return client.post(f"/v1/audio/{task}", files={"file": ("a b.wav", data)}, data=fields)


def test_a_sound_takes_its_place_in_a_conversation(server: RunningServer) -> None:
    first = chat(server, [{"type": "text", "text": "the quick"}, PART])
    assert first.status_code == 200, first.text
    alone = chat(server, "the quick").json()["usage"]["prompt_tokens"]
    assert first.json()["usage"]["prompt_tokens"] - alone == 25 + 2  # a row of 40 ms, and words around them
    again = chat(server, [{"type": "text", "text": "the quick"}, PART]).json()
    assert again["choices"] == first.json()["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    model = str(server.settings.default_model)
    with server.client() as client:
        props = client.get("/props").json()
        assert props["modalities"] == {"vision": True, "audio": True}
        assert {"vision", "audio"} <= {*client.get(f"/v1/models/{model}").json()["capabilities"]}
        assert {"vision", "audio"} <= {*client.post("/api/show", json={"model": model}).json()["capabilities"]}
        prompt = {"prompt_string": f"the quick {props['media_marker']}", "multimodal_data": [BASE64]}
        told = client.post("/completion", json={"prompt": prompt, "n_predict": 2})
        assert told.status_code == 200, told.text


def test_what_is_said_is_told_in_all_shapes(server: RunningServer) -> None:
    found = transcribe(server, language="en", prompt="Zoë", unknown="x")
    assert found.status_code == 200, found.text
    assert found.headers["x-mlxr-ignored"] == "unknown"
    told = found.json()
    assert {*told} == {"text", "usage"}
    assert told["usage"]["total_tokens"] == told["usage"]["input_tokens"] + told["usage"]["output_tokens"] > 25
    plain = transcribe(server, response_format="text", language="en", prompt="Zoë")
    assert plain.headers["content-type"].startswith("text/plain")
    assert plain.text.strip() == told["text"]
    long = write_wav(draw_sound(31 * 16_000))
    verbose = transcribe(server, long, response_format="verbose_json", temperature="0.5").json()
    assert (verbose["task"], verbose["duration"], verbose["language"]) == ("transcribe", 31.0, "")
    assert [(one["start"], one["end"], one["temperature"]) for one in verbose["segments"]] == [
        (0, 30, 0.5),
        (30, 31, 0.5),
    ]
    assert verbose["text"] == " ".join(filter(None, (one["text"] for one in verbose["segments"])))
    assert transcribe(server, task="translations", response_format="verbose_json").json()["language"] == "english"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "srt"}, "response_format: Input should be 'json', 'text' or 'verbose_json'"),
        ({"temperature": "warm"}, "temperature: must be a number"),
        ({"stream": "true"}, "stream: Input should be 'false'"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"model": "demo"}, "demo does not hear: there is no file mmproj*.gguf beside"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: RunningServer, fields: dict[str, str], message: str) -> None:
    refused = transcribe(server, **fields)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]


def test_other_bodies_are_refused(server: RunningServer) -> None:
    kind = "multipart/form-data; boundary=x"
    with server.client() as client:
        for content, header, message in (
            (b"{}", "application/json", "body: must be a form, multipart/form-data with a boundary"),
            (b"--x\r\n", kind, "body: is a form that is cut off"),
            (b"--x--\r\n", kind, "file: Field required"),
            (
                b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\nabc\r\n--x--",
                kind,
                "file: is none of the kinds",
            ),
        ):
            refused = client.post("/v1/audio/transcriptions", content=content, headers={"content-type": header})
            assert refused.status_code == 400, refused.text
            assert message in refused.json()["error"]["message"]
    for given in ("A*", base64.b64encode(SOUND[:40]).decode()):
        refused = chat(server, [{"type": "input_audio", "input_audio": {"data": given, "format": "wav"}}])
        assert refused.status_code == 400
        assert "messages[0].content[0].input_audio.data" in refused.json()["error"]["message"]
    deaf = chat(server, [PART], model="demo")
    assert "is a sound, and this model does not hear" in deaf.json()["error"]["message"]


def test_programs_and_commands_take_files(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a b.wav"
    path.write_bytes(SOUND)
    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(folder, threads=1, arena_bytes="16M") as llm:
        texts = {
            llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "the quick"}]}], params).text
            for part in ({"type": "audio", "audio": str(path)}, {"type": "audio", "audio": SOUND}, PART)
        }
    assert len(texts) == 1
    words = ["run", str(folder), "the quick", str(path), "--max-tokens", "4", "--temperature", "0", "--threads", "1"]
    capfd.readouterr()
    assert main([*words, "--arena-bytes", "16M"]) == 0
    assert capfd.readouterr().out.strip() == texts.pop().strip()
    with LLM("demo", threads=1, arena_bytes="16M") as llm, pytest.raises(InvalidRequest, match="does not hear"):
        llm.chat([{"role": "user", "content": [PART]}], params)
