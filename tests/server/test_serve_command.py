"""`mlxr serve` as a process of its own: its output, its end; `mlxr settings`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlxr.server.page_files import FOLDER, INDEX

WAIT_S = 60


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    own = {"MLXR_MODELS_FOLDER": str(folder / "models"), "MLXR_ARENA_BYTES": "64M", "HOME": str(folder)}
    command = [sys.executable, "-m", "mlxr", "serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **own, **environment})


def read_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Lines of stderr up to one that begins so."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"ended without {beginning!r}: {lines}")


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start(tmp_path, "--port", "0", "--log-format", "json")
    assert process.stderr is not None
    messages = []
    while not messages or not messages[-1].startswith("ready"):  # all lines are JSON, the first ones too
        messages.append(json.loads(process.stderr.readline())["message"])
    match = re.search(r"http://127\.0\.0\.1:\d+", messages[0])
    assert match
    assert messages[-1] == "ready: demo"
    yield process, match[0]
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_and_ends_in_order(number: signal.Signals, serving: tuple[subprocess.Popen[str], str]) -> None:
    process, url = serving
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(number)
        rest = "".join(lines)
    assert rest.endswith("[DONE]")  # the running answer is finished
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    records = [json.loads(line) for line in errors.splitlines()]
    (request,) = [record for record in records if record["message"] == "request"]
    assert request["tokens"] == 300
    assert records[-1]["message"] == "the server has ended"
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(serving: tuple[subprocess.Popen[str], str]) -> None:
    process, url = serving
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # letting go of it would close the connection
        next(lines)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):
            while True:  # two signals that come together would count as one
                httpx.get(f"{url}/health/live", timeout=60)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):  # the last event may or may not arrive
            list(lines)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "Traceback" not in errors
    (request,) = [record for record in map(json.loads, errors.splitlines()) if record["message"] == "request"]
    assert request["tokens"] < 1500


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no-such-model is not here; `mlxr list` shows"),
        (["--port", "taken"], "port: must be"),
        (["--port", "TAKEN"], "another program listens on"),
        (["--api-keys-file", "/no/such/file"], "api_keys_file: /no/such/file"),
        (["--unix-socket", "/no/such/folder/socket"], "unix_socket: /no/such/folder/socket"),
        (["--open", "--page", "false"], "--open: the page is turned off; leave out --page false"),
        (["--open", "--unix-socket", "socket"], "--open: no browser reaches a Unix socket"),
        (["--page-tool-origins", "localhost:9000"], "page_tool_origins: 'localhost:9000' is no origin"),
        (["--tracing", "perhaps"], "tracing: must be true or false"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in arguments]
        process = start(tmp_path, *given)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert message in errors


@pytest.mark.slow
def test_a_unix_socket_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "mlxr.sock"
    process = start(tmp_path, "--unix-socket", str(path))
    try:
        read_until(process, "ready")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://mlxr") as client:
            assert client.get("/health").json() == {"status": "ok"}
        process.terminate()
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert not path.exists()


def test_an_open_address_without_keys_is_warned_of(tmp_path: Path) -> None:
    process = start(tmp_path, "--host", "0.0.0.0", "--port", "0")
    try:
        lines = read_until(process, "ready")
    finally:
        process.kill()
        process.communicate()
    assert any("everybody who reaches this address may ask" in line for line in lines)


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """The file to which the program `browser` in the same folder writes the address that it is to open."""
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/part && mv {tmp_path}/part {tmp_path}/opened\n')
    program.chmod(0o755)
    return tmp_path / "opened"


needs_page = pytest.mark.skipif(not (FOLDER / INDEX).is_file(), reason="the page is not built; `make page` builds it")


@needs_page
@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
@pytest.mark.slow
def test_the_page_is_opened_in_a_browser(host: str, shown: str, opened: Path, tmp_path: Path) -> None:
    flags = ["--port", "0", "--host", host, "--open"]
    process = start(tmp_path, *flags, BROWSER=f"{opened.parent}/browser %s")
    try:
        port = re.findall(r"http://[\d.]+:(\d+)", read_until(process, "mlxr")[0])[0]
        read_until(process, "ready")
        end_s = time.monotonic() + WAIT_S
        while not opened.exists() and time.monotonic() < end_s:
            time.sleep(0.02)
        address = opened.read_text().strip()
        assert address == f"http://{shown}:{port}"
        assert "<!doctype html>" in httpx.get(address, headers={"accept": "text/html"}).text
    finally:
        process.kill()
        process.communicate()


@needs_page
@pytest.mark.slow
def test_without_a_browser_the_address_is_told(tmp_path: Path) -> None:
    process = start(tmp_path, "--port", "0", "--open", BROWSER=f"{tmp_path}/none %s", PATH=str(tmp_path))
    try:
        (*_, line) = read_until(process, "no browser")
        assert re.fullmatch(r"no browser was found; the page is at http://127\.0\.0\.1:\d+", line)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_settings_tell_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("port = 1234\nkeep_alive_s = -1\n")
    environment = {**os.environ, "MLXR_SETTINGS_FILE": str(file), "MLXR_API_KEYS": "hunter2", "MLXR_THREADS": "3"}
    command = [sys.executable, "-m", "mlxr", "settings"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "hunter2" not in text
    assert re.search(rf"port +1234 +file {re.escape(str(file))}", text)
    assert re.search(r"threads +3 +environment MLXR_THREADS", text)
    assert re.search(r"api_keys +\(1 set\) +environment", text)
    assert text.rstrip().endswith(str(file))
    found = json.loads(subprocess.run([*command, "--json"], env=environment, capture_output=True, check=True).stdout)
    assert found["keep_alive_s"] == {"value": -1.0, "source": "file", "place": str(file), "scope": "server"}
    assert found["api_keys"]["value"] == "(1 set)"


def test_a_start_imports_nothing_that_only_others_need() -> None:
    script = (
        "import sys, mlxr.cli.serve\n"
        "needless = {'fastapi', 'rich', 'jinja2', 'huggingface_hub', 'httpx', 'mlx.core', 'mlxr.kernels.linear.gpu',"
        " 'mlxr.kernels.gpu.device'} & set(sys.modules)\n"
        "assert not needless, needless"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
