"""A pytest plugin: llama.cpp's `ServerProcess` starts `mlxr serve`, and what does not apply is skipped with its reason.

Its options become settings of mlxr: a slot is a place for an answer (`max_sequences`), the context is divided among
them as llama.cpp does, and what its flags set for every request (temperature, seed, length, chat template) is set on a
model made with `mlxr create`. `--verbose` and `--reasoning` become fields of each request.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from adapted import MODEL_TEXTS
from requests.structures import CaseInsensitiveDict

from models import make_model
from templates import BUILT_IN

sys.modules.setdefault("wget", types.ModuleType("wget"))  # the tests download with it, which none of ours does
import utils  # noqa: E402 -- llama.cpp's, beside its tests

WORK = Path(os.environ["LLAMACPP_TESTS"])
REASONS = Path(__file__).with_name("not_applicable.txt")
MLXR = [sys.executable, "-m", "mlxr"]
START_S = 300  # a machine that has other work, too, takes long to start a process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what `not_applicable.txt` lists; a line that fits no test of a collected module is an error."""
    names = {item.nodeid.partition("unit/")[2]: item for item in items}
    modules = {name.partition("::")[0] for name in names}
    whole = not any(name in " ".join(sys.argv) for name in ("::", " -k", "-k "))
    for wanted, reason in read_reasons():
        fitting = [item for name, item in names.items() if name == wanted or name.startswith(wanted + "[")]
        if not fitting and whole and wanted.partition("::")[0] in modules:
            raise pytest.UsageError(f"not_applicable.txt: there is no test {wanted}")
        for item in fitting:
            item.add_marker(pytest.mark.skip(reason=reason))


def read_reasons() -> list[tuple[str, str]]:
    """Test and reason of each line; lines that begin with # are for readers."""
    lines = [line.strip() for line in REASONS.read_text().splitlines()]
    pairs = [line.split("  ", 1) for line in lines if line and not line.startswith("#")]
    return [(name, reason.strip()) for name, reason in pairs]


@pytest.fixture(autouse=True)
def stop_servers() -> Any:
    """No server outlives its test."""
    yield
    for server in set(utils.server_instances):
        server.stop()


def find_template(server: Any) -> str:
    """The chat template that the server's flags name, as Jinja."""
    if server.chat_template_file:
        return Path(server.chat_template_file).read_text()
    name = server.chat_template or "chatml"
    return BUILT_IN.get(name, name)


def make_folder(server: Any) -> Path:
    """A models folder in which the server's model has its name, defaults and template; made once for all that agree."""
    repository = f"{server.model_hf_repo}/{server.model_hf_file}"
    source = make_model(WORK / "models", "starcoder" if "infill" in repository else "llama-spm")
    lines = [f"FROM {source}", f"PARAMETER temperature {server.temperature}", f"PARAMETER seed {server.seed}"]
    if server.n_predict:
        lines.append(f"PARAMETER num_predict {server.n_predict}")
    lines.append(f'TEMPLATE """{find_template(server)}"""')
    text = "\n".join(lines)
    name = server.model_alias or "unnamed"
    folder = WORK / "folders" / hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()[:16]
    if not folder.exists():
        making = folder.with_suffix(".making")
        making.mkdir(parents=True, exist_ok=True)
        modelfile = making / "Modelfile"
        modelfile.write_text(text)
        flags = ["--file", str(modelfile), "--models-folder", str(making / "models")]
        subprocess.run([*MLXR, "create", name, *flags], check=True, stdout=subprocess.DEVNULL)
        making.rename(folder)
    return folder / "models"


def start(self: Any, timeout_seconds: int = 60) -> None:
    """Start `mlxr serve` and wait until it is ready."""
    slots = self.n_slots or 4
    context = (self.n_ctx or 4096) // (1 if self.kv_unified else slots)
    flags = {
        "port": self.server_port,
        "host": self.server_host,
        "models-folder": make_folder(self),
        "default-model": self.model_alias or "demo",
        "context-tokens": context,
        "max-sequences": slots,
        "page-size": 1,  # so that as much of a prompt is found again as in llama.cpp's slots
        "prefill-chunk-tokens": self.n_batch or 512,
        "arena-bytes": "64M",
        "threads": 1,
        "log-level": "warning",
    }
    if self.cors_origins not in (None, "localhost"):  # pages of this machine are let in anyway
        flags["cors-origins"] = self.cors_origins
    environment = {**os.environ}
    if self.api_key:
        environment["MLXR_API_KEYS"] = self.api_key
    command = [*MLXR, "serve", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
    self.process = subprocess.Popen(command, env=environment)
    utils.server_instances.add(self)
    end = time.monotonic() + max(timeout_seconds, START_S)
    while time.monotonic() < end:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {self.process.returncode}")
        try:
            if self.make_request("GET", "/health", timeout=5).status_code == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server is not ready")


def match_regex(regex: str, text: str) -> bool:
    """Match as llama.cpp does; where only its test model's words would match, any text does."""
    return bool(text) if regex in MODEL_TEXTS else MATCH_REGEX(regex, text)


def with_fields(send: Any) -> Any:
    """Wrap `send` to add the fields of requests that mlxr has in place of the server's flags."""

    def sending(self: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any) -> Any:
        if isinstance(data, dict):
            data = {**find_fields(self), **data}
        reply = send(self, method, path, data, *rest, **named)
        if isinstance(reply, utils.ServerResponse):
            reply.headers = CaseInsensitiveDict(reply.headers)  # the names of headers have no case
        return reply

    return sending


def find_fields(server: Any) -> dict[str, object]:
    """Return the request fields that stand for `--verbose` and `--reasoning`."""
    fields: dict[str, object] = {"verbose": True} if server.debug else {}
    if server.reasoning is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": server.reasoning != "off"}
    return fields


MATCH_REGEX = utils.match_regex
utils.match_regex = match_regex
utils.ServerProcess.start = start
utils.ServerProcess.make_request = with_fields(utils.ServerProcess.make_request)
