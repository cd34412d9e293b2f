"""`mlxr run` and `mlxr chat` with --url: the same answers as without, from a server in another thread."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from gated_model import Gate
from running_server import MakeServer, RunningServer

from mlxr.cli import top
from mlxr.cli.main import main
from mlxr.cli.remote import RemoteModel
from mlxr.core.errors import MlxrError
from mlxr.core.settings import Settings
from mlxr.core.types import Event, Finish, FinishReason, SamplingParams, TextDelta

QUESTION = "What does os.path.join do?"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line; exit code, stdout, stderr."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        code = main(arguments)
        output = capfd.readouterr()
        return code, output.out, output.err

    return run


def test_run_says_what_it_says_without_a_server(server: str, command: Command) -> None:
    local = command("run", QUESTION, "--max-tokens", "40")
    assert local[0] == 0
    assert len(local[1]) > 20
    assert command("run", QUESTION, "--max-tokens", "40", "--url", server) == local
    assert command("run", "demo", QUESTION, "--max-tokens", "40", "--url", f"{server}/v1/") == local


@pytest.mark.parametrize(
    "flags",
    [
        ["--raw", "--max-tokens", "9"],
        ["--temperature", "1", "--seed", "7", "--max-tokens", "20", "--top-k", "9", "--repetition-penalty", "1.2"],
        ["--stop", "path", "--stop", "join"],
        ["--system", "You are brief.", "--max-tokens", "12"],
    ],
)
def test_flags_reach_the_server(flags: list[str], server: str, command: Command) -> None:
    assert command("run", QUESTION, *flags, "--url", server) == command("run", QUESTION, *flags)


def test_numbers_come_along(server: str, command: Command) -> None:
    _, text, _ = command("run", QUESTION, "--max-tokens", "6", "--json", "--url", server)
    answer = json.loads(text)
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] > 6
    assert answer["text"]


def test_a_conversation(server: str, command: Command) -> None:
    lines = f"{QUESTION}\nAnd os.path.split?\n/reset\n{QUESTION}\n"
    remote = command("chat", "--max-tokens", "20", "--url", server, stdin=lines)
    assert remote == command("chat", "--max-tokens", "20", stdin=lines)
    assert remote[0] == 0
    assert len(remote[1].splitlines()) >= 3


def test_a_model_of_the_server_alone_answers_stdin(server: str, command: Command) -> None:
    expected = command("run", QUESTION, "--max-tokens", "6", "--url", server)
    assert command("run", "demo", "--max-tokens", "6", "--url", server, stdin=QUESTION) == expected
    assert command("run", "demos", "--max-tokens", "6", "--url", server, stdin=QUESTION)[1] != expected[1]


def test_texts_are_embedded_here_as_there(server: str, command: Command) -> None:
    here = command("embed", "demo", "one text", "another")
    assert command("embed", "demo", "--url", server, stdin="one text\nanother\n")[:2] == here[:2]
    vectors = [json.loads(line) for line in here[1].splitlines()]
    assert len(vectors) == 2
    assert vectors[0] != vectors[1]
    assert sum(value**2 for value in vectors[0]) == pytest.approx(1, abs=1e-4)
    assert json.loads(command("embed", "demo", "one text", "--json")[1])["embeddings"] == vectors[:1]
    last = json.loads(command("embed", "demo", "one text", "--last-token")[1])
    assert last != vectors[0]
    assert "TEXT: is missing" in command("embed", "demo")[2]


def test_a_chat_with_a_server_shows_and_saves(server: str, command: Command) -> None:
    lines = [
        "/show",
        "/show template",
        "/set system Be brief.",
        "/set parameter top_k 3",
        "/set parameter num_predict 4",
        '/set parameter stop "zz" yy',
    ]
    lines += [QUESTION, "/save kept", "/load kept", "/show system", "/show parameters", "/set format json", "Hello"]
    code, out, notes = command("chat", "demo", "--url", server, stdin="\n".join(lines))
    assert code == 0
    assert "mlxr:" not in notes
    assert "quantization  Q8_0" in out
    assert "{%" in out
    assert "Be brief." in out
    with httpx.Client(base_url=server) as client:
        kept = client.post("/api/show", json={"model": "kept"}).json()
        answer = json.loads(command("run", "kept", QUESTION, "--json", "--url", server)[1])
        client.request("DELETE", "/api/delete", json={"model": "kept"})
    assert kept["parameters"] == 'num_predict 4\nstop "zz"\nstop "yy"\ntop_k 3'
    assert answer["usage"]["completion_tokens"] <= 4
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"]
    code, _, notes = command("chat", "--url", server, stdin="/show\n/save x\n")
    assert (code, notes.count("MODEL: is needed for this")) == (0, 2)


def test_connect_asks_the_server_and_stop_tells_what_is_not_loaded(
    make_server: MakeServer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_server(api_keys=["right"], context_tokens=512).url
    code, _, errors = command("connect", "opencode", "--url", url)
    assert (code, "wants a valid API key" in errors) == (0, True)
    assert command("connect", "opencode", "--url", url, "--write")[0] == 2
    monkeypatch.setenv("MLXR_API_KEYS", "right")
    code, out, errors = command("connect", "opencode", "--url", url)
    assert (code, '"context": 512' in out, '"apiKey": "right"' in out) == (0, True, True)
    assert f"the server at {url} answers: default model demo, wants a key" in errors
    code, out, errors = command("stop", "demo-draft", "--port", url.rpartition(":")[2])
    assert (code, out) == (2, "")
    assert "demo-draft is not loaded; loaded: " in errors
    reply = httpx.get(f"{url}/v1/chat/completion", headers={"x-api-key": "right"})
    assert (reply.status_code, "near it: /v1/chat/completions" in reply.json()["error"]["message"]) == (404, True)


def test_top_tells_what_a_server_does(
    make_server: MakeServer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_server().url
    assert command("run", QUESTION, "--max-tokens", "5", "--url", url)[0] == 0
    settings = Settings()
    before = top.look(settings, url)
    assert command("run", QUESTION, "--max-tokens", "9", "--temperature", "0", "--url", url)[0] == 0
    now = top.look(settings, url)
    told = top.describe(now, before)
    assert told["tokens_per_s"] == pytest.approx(8 / (now.time_s - before.time_s), rel=0.2)
    (row,) = told["models"]
    assert (row["name"], row["running"], row["used_pages"]) == ("demo:latest", 0, 0)
    busy = {"path": "/v1/chat/completions", "model": "demo", "client": "\x1b[2J", "seconds": 2.0}
    busy |= {"prompt_tokens": 7, "read_tokens": 7, "generated_tokens": 1000}
    reading = {**busy, "prompt_tokens": 9000, "read_tokens": 2048, "generated_tokens": 0}
    lines = top.render(replace(now, requests=[reading, busy]), before, url, 100)
    assert "2,048/9,000       0" in lines[-2]
    assert "1,000  500.0" in lines[-1]
    assert "\x1b" not in "".join(lines)
    code, out, _ = command("top", "--url", url.removeprefix("http://"), "--interval", "0.1")
    assert (code, "no request is in flight" in out, "demo" in out) == (0, True, True)
    assert json.loads(command("top", "--url", url, "--interval", "0.1", "--json")[1])["requests"] == []


def test_top_renews_itself_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"version": "1", "device": "cpu", "models_memory_bytes": 1}
    looks = iter([top.Look(1.0, info, [], {}, [])])

    def take() -> top.Look:
        for one in looks:
            return one
        raise MlxrError("it went away")

    written: list[str] = []
    ends = iter([False, False, True])
    monkeypatch.setattr(top, "write_piece", written.append)
    monkeypatch.setattr(top, "_is_ended", lambda _: next(ends))
    top._follow(top.Look(0.0, info, [], {}, []), "here", 0.1, take)
    assert ["no model is loaded" in text for text in written] == [True, True]
    assert ["it went away" in text for text in written] == [False, True]


def test_stop_unloads(server: str, command: Command) -> None:
    command("run", QUESTION, "--max-tokens", "2", "--url", server)
    assert "demo" in command("ps", "--url", server)[1]
    assert command("stop", "demo", "--url", server)[:2] == (0, "stopped  demo\n")
    assert not any(row["name"] == "demo:latest" for row in json.loads(command("ps", "--json", "--url", server)[1]))
    code, _, errors = command("stop", "nothing", "--url", server)
    assert code == 2
    assert "nothing" in errors


def test_a_conversation_forgets_its_oldest_turns_when_the_servers_context_is_full(
    server: str, command: Command
) -> None:
    lines = "".join(f"{index}: {QUESTION * 90}\n" for index in range(4))
    code, out, notes = command("chat", "--max-tokens", "2", "--url", server, stdin=lines)
    assert (code, out.count("\n")) == (0, 4)
    assert notes.startswith("(the context is full: the oldest turn was forgotten)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no-such-model", QUESTION], "no-such-model"),
        (["run", "demmo", QUESTION], "near it: demo"),
        (["run", QUESTION, "--threads", "1"], "leave out --threads"),
        (["run", QUESTION, "--max-tokens", "-3"], "max_tokens: must be at least 0"),
        (["run", "one", "two", "three"], "put the prompt in quotes"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], message: str, server: str, command: Command) -> None:
    code, out, errors = command(*arguments, "--url", server)
    assert (code, out) == (2, "")
    assert message in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "unix:/no/such/socket", "ftp://x", "http://[", "nonsense"])
def test_a_server_that_is_not_there(url: str, command: Command) -> None:
    code, _, errors = command("run", QUESTION, "--url", url)
    assert code == 2
    assert url in errors
    assert len(errors.splitlines()) == 1


def test_keys_and_unix_sockets(
    make_server: MakeServer, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "socket"
    make_server(unix_socket=path, api_keys=["right"])
    asked = ("run", QUESTION, "--max-tokens", "5", "--url", f"unix:{path}")
    code, _, errors = command(*asked)
    assert code == 2
    assert "API key" in errors
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    assert command(*asked, "--stats")[0] == 2
    monkeypatch.setenv("MLXR_API_KEYS_FILE", str(keys))
    assert command(*asked)[0] == 0
    monkeypatch.setenv("MLXR_API_KEYS", "wrong")
    assert command(*asked)[0] == 2


def test_an_answer_that_is_no_longer_wanted(gate: Gate, gated: RunningServer) -> None:
    gate.let(4)
    events: list[Event] = []
    with (
        RemoteModel(gated.url, None, None) as model,
        model.stream("import os\n", SamplingParams(max_tokens=400)) as stream,
    ):
        for event in stream:
            events.append(event)
            if len(events) == 1:
                threading.Timer(0.05, stream.cancel).start()  # while the main thread reads, as a signal handler would
    assert isinstance(events[0], TextDelta)
    assert isinstance(events[-1], Finish)
    assert events[-1].reason is FinishReason.CANCELLED


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(gate: Gate, make_server: MakeServer) -> Iterator[RunningServer]:
    yield make_server(open_session=gate.open_session)
    gate.open()


class _Broken(BaseHTTPRequestHandler):
    """A server that stops in the middle of an answer, or answers with something else."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/completions":
            self.send_error(502, "no JSON here")
            return
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "half an"}}]}\n\n')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def broken() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Broken) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_a_stream_that_breaks_is_an_error(broken: str) -> None:
    with RemoteModel(broken, None, None) as model:
        with model.stream_chat([{"role": "user", "content": "x"}], SamplingParams()) as stream:
            first, last = list(stream)
        assert first == TextDelta("half an")
        assert isinstance(last, Finish)
        assert last.reason is FinishReason.ERROR
        assert last.error is not None
        assert "broke" in last.error
        with pytest.raises(MlxrError, match="HTTP status 502"):
            model.stream("x", SamplingParams())
