"""Commands that help a newcomer: search, doctor, the offer to fetch what is missing, and models of other programs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from free_ports import find_port

from mlxr.cli.connect import RECIPES
from mlxr.cli.main import main
from mlxr.core.stats import MachineLimits
from mlxr.loading import ASSETS
from mlxr.registry import library
from mlxr.service import doctor, machine_limits

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_hub import FakeHub

Run = Callable[..., str]
LIMITS = MachineLimits(read_bytes_per_s=2e10, int8_macs_per_s=1e11, measured_at=1.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path / "models"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLXR_PORT", str(find_port()))  # at the usual one somebody's own server may answer
    for name in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_search_tells_what_fits(mlxr: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model = library.find("qwen3:30b")
    assert model is not None
    monkeypatch.setattr(machine_limits, "read_room_bytes", lambda _: model.size_bytes + (1 << 20))
    lines = mlxr("search", "qwen3", "30b", "--offline").splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FITS", "SPEED", "ABOUT"]
    assert lines[1].split()[:4] == ["qwen3:30b", "17.4", "GiB", "tight"]
    monkeypatch.setattr("mlxr.cli.pull.find_read_rate", lambda _: 2e10)
    (row,) = json.loads(mlxr("search", "qwen3:30b", "--offline", "--json"))["known"]
    assert row["tokens_per_s"] == round(2e10 / (model.size_bytes * model.active), 1)
    monkeypatch.setattr("mlxr.cli.pull.find_read_rate", lambda _: 1e9)
    monkeypatch.setattr(machine_limits, "read_room_bytes", lambda _: 1 << 50)
    assert "slow  0.5 tok/s" in mlxr("search", "qwen3:30b", "--offline")
    assert main(["search", "xyzzy", "--offline"]) == 1


def test_search_asks_the_hub_and_goes_on_without(mlxr: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeHub() as hub:
        hub.listing = json.dumps([{"id": "a/Xyzzy-GGUF", "downloads": 1234}]).encode()
        assert "hf.co/a/Xyzzy-GGUF      1,234" in mlxr("search", "xyzzy", "--hub-url", hub.url)
    assert main(["search", "llama3.2", "--hub-url", "http://127.0.0.1:9"]) == 0
    output = capsys.readouterr()
    assert "llama3.2:1b" in output.out
    assert "tight fits but leaves little for a conversation" in output.err
    assert "only the table of mlxr was searched" in output.err


def test_a_missing_model_is_offered(tmp_path: Path, refused: Run, mlxr: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "about 1.8 GiB; `mlxr pull llama3.2` fetches it" in refused("run", "llama3.2", "hi")
    assert "is not here; `mlxr pull llama3.2` fetches a model of that name" in refused("run", "lama3.2", "hi")
    (tmp_path / "Modelfile").write_text("# a comment\nFROM llama3.2\n")
    place = tmp_path / "Modelfile"
    assert f"{place}: line 2: FROM llama3.2 is not here; it is hf.co/" in refused("create", "mine", "-f", place)
    place.write_text("FROM demo\nPARAMETER top_k much\n")
    assert f"{place}: line 2: PARAMETER top_k: must be" in refused("create", "mine", "-f", place)
    (tmp_path / "quark.gguf").touch()
    assert "did you mean quark.gguf?" in refused("run", tmp_path / "quork.gguf", "hi")
    assert "did you mean" not in refused("run", tmp_path / "xyzzy.gguf", "hi")
    assert "`mlxr search` what can be fetched" in refused("chat", "xyzzy")
    model = library.find("llama3.2:1b")
    assert model is not None
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert main(["run", "llama3.2:1b", "hi"]) == 2
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    with FakeHub() as hub:
        hub.add(model.repository, {"Llama-3.2-1B.Q4_K_M.gguf": (ASSETS / "demo-draft.gguf").read_bytes()})
        monkeypatch.setenv("MLXR_HUB_URL", hub.url)
        assert mlxr("run", "llama3.2:1b", "import os", "--temperature", 0, "--max-tokens", 4)
    assert "llama3.2:1b" in mlxr("list")


def test_models_of_ollama_are_imported(home: Path, mlxr: Run, refused: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no models of it are on this disk" in refused("import", "--from", "ollama")
    assert "known are ollama, lmstudio, hub" in refused("import", "--from", "jan")
    store = home / ".ollama" / "models"
    (store / "blobs").mkdir(parents=True)
    blob = store / "blobs" / "sha256-0a"
    shutil.copy(ASSETS / "demo-draft.gguf", blob)
    (store / "blobs" / "sha256-0b").write_bytes(b"no model")
    names = {"registry.ollama.ai/library/tiny/1b": "0a", "registry.ollama.ai/me/bad/latest": "0b"}
    for name, digest in {**names, "hf.co/a/gone/latest": "0c"}.items():
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 1}
        (store / "manifests" / name).parent.mkdir(parents=True)
        (store / "manifests" / name).write_text(json.dumps({"layers": [{"mediaType": "x", "digest": "y"}, layer]}))
    (store / "manifests/registry.ollama.ai/library/tiny/damaged").write_text("{")
    listed = mlxr("import", "--from", "ollama", "--dry-run")
    assert [line.split()[0] for line in listed.splitlines()] == ["NAME", "me/bad:latest", "tiny:1b"]
    assert main(["import", "--from", "ollama"]) == 1
    output = capsys.readouterr()
    assert "me/bad:latest is left out: " in output.err
    assert json.loads(mlxr("list", "--json"))[0]["path"] == str(blob)
    assert main(["import", "--from", "ollama"]) == 1  # the same again changes nothing
    assert blob.read_bytes() == (ASSETS / "demo-draft.gguf").read_bytes()


def test_models_of_lm_studio_and_of_the_hub_s_cache(home: Path, mlxr: Run) -> None:
    folder = home / ".lmstudio" / "models" / "someone" / "Tiny-GGUF"
    folder.mkdir(parents=True)
    for name in ("Tiny Q8.gguf", "mmproj-Tiny.gguf", "Big-00001-of-00002.gguf", "Big-00002-of-00002.gguf"):
        shutil.copy(ASSETS / "demo-draft.gguf", folder / name)
    names = [line.split()[0] for line in mlxr("import", "--from", "lmstudio", "--dry-run").splitlines()[1:]]
    assert names == ["Big", "Tiny-Q8"]
    snapshot = home / ".cache/huggingface/hub/models--a--Small/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"12345678")
    assert [line.split()[0] for line in mlxr("import", "--from", "hub", "--dry-run").splitlines()[1:]] == ["Small"]


def test_doctor(mlxr: Run, monkeypatch: pytest.MonkeyPatch, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "measure_machine", lambda _: LIMITS)
    checks = {row["name"]: row for row in json.loads(mlxr("doctor", "--offline", "--json", "--port", find_port()))}
    assert {"versions", "processor", "memory speed", "memory", "gpu", "models folder", "models"} < set(checks)
    assert set(checks) >= {"port", "pictures"}
    assert "20.0 GB/s, so an 8B model in 4 bits makes at most 4 tokens/s" in checks["memory speed"]["found"]
    assert checks["port"]["verdict"] == "ok"
    own = home / "own.gguf"
    shutil.copy(ASSETS / "demo-draft.gguf", own)
    mlxr("import", own, "own")
    own.unlink()
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 0.05)
        port = other.getsockname()[1]
        assert main(["doctor", "--port", str(port), "--hub-url", "http://127.0.0.1:9"]) == 1
    output = capsys.readouterr()
    assert "PROBLEM  own" in output.out
    assert f"another program has 127.0.0.1:{port}" in output.out
    assert "pulls need it: check the network" in output.out
    assert "1 problem keeps mlxr from working fully" in output.err


@pytest.mark.smoke
def test_a_machine_without_a_gpu_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    assert main(["check-gpu"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("mlxr: mlx finds no GPU here")
    assert written.err.count("\n") == 1


def test_a_check_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of a check is on the page, and so are all later checks."""

    def refuse() -> tuple[bool, str]:
        raise RuntimeError("error: cannot combine with previous 'int' declaration specifier")

    checks = [
        ("kernel", "first", refuse),
        ("kernel", "second", lambda: (True, "off by 0")),
        ("speed", "memory", lambda: (None, "9 GB/s")),
    ]
    monkeypatch.setattr(doctor, "list_checks", lambda *_, **__: iter(checks))
    monkeypatch.setattr(doctor, "describe_gpu", lambda _: {"device_name": "a chip"})
    monkeypatch.setattr(
        "mlxr.cli.doctor.answer_questions", lambda device, questions: ([device, *questions[1:]], "5 tokens/s")
    )
    report = tmp_path / "report.md"
    assert main(["check-gpu", "metal", "--report", str(report)]) == 1
    page = capsys.readouterr().out
    for words in (
        "metal, NOT ALL WELL",
        "device_name: a chip",
        "kernel: 1 of 2 passed",
        "memory: 9 GB/s",
        "previous 'int'",
    ):
        assert words in page
    assert (
        "49 of 50 greedy answers as on the processor, 5 tokens/s; to 'What does len do?' 'metal' instead of 'cpu'"
        in page
    )
    text = report.read_text()
    assert page in text
    fields = json.loads(text.split("```json")[1].split("```")[0])
    assert [one["passed"] for one in fields["findings"]] == [False, True, None, False]


def test_checks_of_a_gpu_run_on_every_device_of_mlx() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    report = doctor.check_gpu("mlx-cpu", lambda _, questions: (list(questions), ""), is_brief=True)
    assert [one.text for one in report.findings if one.passed is not True] == []
    assert {one.part for one in report.findings} == {"kernel", "pages", "answers"}


def test_connect_shows_and_merges(
    home: Path,
    mlxr: Run,
    refused: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLXR_API_KEYS", "secret")
    shown = mlxr("connect", "aider", "--url", "http://box:1234/v1/", "--model", "llama3.2")
    assert "export OPENAI_API_BASE=http://box:1234/v1\nexport OPENAI_API_KEY=secret" in shown
    assert shown.endswith("aider --model openai/llama3.2\n")
    assert "known are claude-code, codex" in refused("connect", "emacs")
    for near, name in {"claude": "claude-code", "Open_WebUI": "open-webui", "codx": "codex", "ader": "aider"}.items():
        assert f"did you mean {name}?" in refused("connect", near)
    assert "did you mean opencode or open-webui or openai?" in refused("connect", "open")
    assert "has no file" in refused("connect", "aider", "--write")
    path = home / ".config" / "opencode" / "opencode.json"
    path.parent.mkdir(parents=True)
    own = home / "dotfiles.json"
    own.write_text('{"theme": "dark", "provider": {"other": {"npm": "x"}}}')
    own.chmod(0o640)
    path.symlink_to(own)
    assert main(["connect", "opencode", "--write"]) == 0
    assert "demo has a context of 2048 tokens, which is little" in capsys.readouterr().err
    written, usual = json.loads(path.read_text()), f"http://127.0.0.1:{os.environ['MLXR_PORT']}"
    assert (path.is_symlink(), stat.S_IMODE(own.stat().st_mode)) == (True, 0o640)
    assert (written["theme"], sorted(written["provider"])) == ("dark", ["mlxr", "other"])
    assert written["provider"]["mlxr"]["options"] == {"baseURL": f"{usual}/v1", "apiKey": "secret"}
    assert written["provider"]["mlxr"]["models"]["demo"]["limit"] == {"context": 2048, "output": 512}
    assert main(["connect", "opencode", "--write"]) == 0
    assert "; what was there before is in opencode.json.before-mlxr" in capsys.readouterr().err
    assert sorted(json.loads((path.parent / "opencode.json.before-mlxr").read_text())["provider"]) == ["other"]
    (home / ".claude.json").write_text('{"numStartups":1}')
    for _ in range(2):
        assert main(["connect", "claude-code", "--write"]) == 0
    assert json.loads((home / ".claude.json").read_text()) == {"numStartups": 1, "hasCompletedOnboarding": True}
    assert (home / ".claude.json.before-mlxr").read_text() == '{"numStartups":1}'
    assert json.loads((home / ".claude" / "settings.json").read_text())["env"]["ANTHROPIC_AUTH_TOKEN"] == "secret"
    capsys.readouterr()
    path.write_text("// mine\n{}")
    assert main(["connect", "opencode", "--write"]) == 2
    assert "is no plain JSON" in capsys.readouterr().err


def test_connect_writes_a_profile_of_its_own(home: Path, mlxr: Run, capsys: pytest.CaptureFixture[str]) -> None:
    mlxr("connect", "codex", "--write", "--port", find_port())
    mlxr("connect", "codex", "--write")
    mlxr("connect", "codex", "--write", "--model", "other")
    values = tomllib.loads((home / ".codex" / "mlxr.config.toml").read_text())
    assert (values["model"], values["model_provider"]) == ("other", "mlxr")
    assert stat.S_IMODE((home / ".codex" / "mlxr.config.toml").stat().st_mode) == 0o600  # for the key is in it
    assert [file.name for file in (home / ".codex").iterdir()] == ["mlxr.config.toml"]
    assert values["model_providers"]["mlxr"]["base_url"] == f"http://127.0.0.1:{os.environ['MLXR_PORT']}/v1"
    mlxr("connect", "continue", "--write")
    capsys.readouterr()
    assert main(["connect", "continue", "--write", "--model", "other"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("; ")[-1] for line in lines[:1]] == ["`mlxr serve` starts one, --url names another"]
    assert "is there already" in lines[-1]
    for tool in RECIPES:
        assert main(["connect", tool]) == 0
        told = capsys.readouterr()
        assert ("# then:" in told.out, "no metadata for demo" in told.err) == (True, tool == "codex")


def test_the_help_of_connect_has_what_clients_are_told(mlxr: Run) -> None:
    shown, whole = mlxr("connect", "--help"), mlxr("connect", "--help-all")
    assert all(flag in shown for flag in ("--url", "--model ", "--write", "--port", "--api-keys-file"))
    assert not any(flag in shown for flag in ("--device", "--threads", "--keep-alive-s", "--log-level"))
    assert "--device" in whole
