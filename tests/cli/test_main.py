"""The command itself: the table, laziness, shared flags, errors in one line, exit codes."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import mlxr as package
from mlxr.cli.flags import Sampling, expand_flags, make_sampling
from mlxr.cli.main import COMMANDS, EXAMPLES, main
from mlxr.cli.terminal import print_table
from mlxr.core.settings import SETTINGS, Settings
from mlxr.core.types import PARAMETERS, SamplingParams

Run = Callable[..., str]
WITH_MODEL = ("run", "chat", "embed", "rerank", "find", "perplexity", "imatrix", "bench", "profile", "validate")
WITH_REGISTRY = {"list", "pull", "import", "create", "cp", "rm", "show", "adapters"}


def test_a_template_that_is_none_ends_the_command_before_a_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bench", "serve"):
        assert main([command, "demo", "--chat-template", "chatlm"]) == 2
        assert capsys.readouterr().err.startswith("mlxr: chat_template: chatlm is no file, and none of chatml, ")
        assert main([command, "demo", "--chat-template-kwargs", "[1]"]) == 2
        assert capsys.readouterr().err.startswith("mlxr: chat_template_kwargs: must be an object in JSON")


def execute(*arguments: str, stdin: bytes = b"", environment: dict[str, str] | None = None) -> Sequence[object]:
    """Run a process of its own; return exit code, stdout, stderr."""
    run = subprocess.run(
        [sys.executable, "-m", "mlxr", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    return run.returncode, run.stdout.decode(), run.stderr.decode()


def test_every_row_has_its_function_and_says_what_that_does() -> None:
    for row in COMMANDS:
        function = getattr(importlib.import_module(row.module), row.function)
        assert function.__doc__.startswith(row.help.removesuffix(".")), f"{row.name}: two words for one thing"


def test_help_lists_every_command(mlxr: Run) -> None:
    text = mlxr("--help")
    assert all(row.name in text and row.help in text for row in COMMANDS)
    assert mlxr() == text
    assert max(map(len, text.splitlines())) <= 80
    assert "Measure and check:" in text
    assert {line.split()[1] for line, _ in EXAMPLES} <= {row.name for row in COMMANDS}


def test_help_shows_the_common_flags_first(mlxr: Run) -> None:
    for name in ("run", "serve"):
        flags = set(re.findall(r"│ +(--[a-z-]+)", mlxr(name, "--help")))
        assert 10 <= len(flags) <= 18, flags
        assert flags < set(re.findall(r"│ +(--[a-z-]+)", mlxr(name, "--help-all")))
        assert re.search(r"--help-all shows \d+ more flags", mlxr(name, "--help"))
        assert "Example: `" in mlxr(name, "--help")


def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("NAME", " SIZE", "ABOUT"), [("a" * 30, "12.5 GiB", "words " * 20)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 60] == []
    assert "".join(lines).count("words") == 20
    print_table(("NAME", "ABOUT"), [("x", "words " * 20)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


@pytest.mark.parametrize("name", [row.name for row in COMMANDS])
def test_every_command_explains_itself(name: str, mlxr: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = mlxr(name, "--help-all")
    assert f"Usage: mlxr {name}" in text
    for setting in SETTINGS:
        scopes = {"model"} if name in WITH_MODEL else {"registry"} if name in WITH_REGISTRY else set()
        if name in ("serve", "cluster", "connect", "doctor"):
            scopes = {"model", "registry", "hub", "server"}
        elif name in ("pull", "search"):
            scopes = {"registry", "hub"}
        is_own = setting.flag == "--port" and name in ("ps", "stop", "top")
        assert (f"{setting.flag} " in text) == (is_own or (setting.scope in scopes and not setting.secret))
    for row in PARAMETERS:
        assert (f"{row.flag} " in text) == (name in ("run", "chat"))


@pytest.mark.parametrize("name", [row.name for row in COMMANDS])
def test_help_at_80_columns_is_whole_and_says_units(name: str, mlxr: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = mlxr(name, "--help")
    assert not {"…", "<bool>", "<str>", "<list[str]>"} & set(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for setting in SETTINGS:
        row = re.search(rf"{setting.flag} +([A-Z]+) ", text)
        if row is not None:
            units = {"bytes": "BYTES", "seconds": "SECONDS"} | ({"int": "TOKENS"} if "tokens" in setting.name else {})
            assert row[1] == units.get(setting.kind, row[1])
            assert setting.default is not True or "true" in text
    assert "33554432" not in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("run demo hi --temp 0.3", "--temp is not a flag of `mlxr run`; write --temperature (see `mlxr run --help`)"),
        ("run demo hi --temp=0.3", "write --temperature"),
        ("serve -ngl 99", "-ngl is not a flag of `mlxr serve`; write --device cuda"),
        ("serve -m demo", "write the model's name behind `mlxr serve`, without a flag"),
        ("serve --verbose", "write --log-level debug"),
        ("run demo hi -v", "write --stats"),
        ("run demo hi --port 11434", "write --url http://HOST:PORT"),
        ("list --temp 3", "--temp is not a flag of `mlxr list` (see"),
        ("run demo hi --temprature 3", "did you mean --temperature or"),
        ("run demo hi --temperature hot", "--temperature: must be a number, got 'hot'"),
        ("run demo hi --top-k 1.5", "--top-k: must be a whole number, got '1.5'"),
        ("rerank demo q --top 0", "--top: must be 1 or greater"),
        ("adapters frob", "ACTION: 'frob' is not one of 'list', 'add', 'remove', 'show'"),
        ("cluster", "Missing argument 'ACTION'; it is one of serve, update, status"),
        ("ps --port 1 --url http://127.0.0.1:1", "--port: is part of --url"),
        ("ps --port 1", "http://127.0.0.1:1: no mlxr server answers: nothing listens there"),
    ],
)
def test_habits_of_other_tools_and_wrong_values_are_told_in_our_words(line: str, told: str, refused: Run) -> None:
    assert told in refused(*line.split())


def test_help_as_a_command(mlxr: Run, refused: Run) -> None:
    assert mlxr("help") == mlxr("--help")
    assert mlxr("help", "pull") == mlxr("pull", "--help")
    assert "No such command 'pul'" in refused("help", "pul")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mlxr emb", ["embed"]),
        ("mlxr run --temp", ["--temperature", "--temperature-last"]),
        ("mlxr chat demo-", ["demo-draft"]),
        ("mlxr show d", ["demo", "demo-draft"]),
    ],
)
def test_the_shell_completes_commands_flags_and_models(line: str, expected: list[str], tmp_path: Path) -> None:
    environment = {
        "_MLXR_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "MLXR_MODELS_FOLDER": str(tmp_path),
    }
    assert execute(environment=environment) == (0, "".join(f"{word}\n" for word in expected), "")


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys, mlxr, mlxr.cli.main as cli\n"
        "assert cli.main(['--help']) == 0 and 'importlib.metadata' not in sys.modules\n"
        "for arguments in (['version'], ['--version']): assert cli.main(arguments) == 0\n"
        "heavy = {'numpy', 'rich', 'mlxr.kernels', 'mlxr.llm', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("module", ["mlxr.cli.main", "typer", "mlxr.cli.serve", "starlette.applications"])
def test_an_interrupt_during_the_imports_ends_without_a_word(module: str) -> None:
    script = f"""
import os, signal, sys
class Press:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where these tests run in a shell's background
sys.meta_path.insert(0, Press)
from mlxr.__main__ import run
sys.argv = ["mlxr", "serve", "--help"]
sys.exit(run())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_both_ways_to_start_are_one() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["mlxr"].partition(":")
    assert getattr(importlib.import_module(module), function) is importlib.import_module("mlxr.__main__").run


def test_importing_the_package_imports_nothing_of_it() -> None:
    script = "import sys, mlxr; assert not {m for m in sys.modules if m.startswith('mlxr.')}; from mlxr import LLM"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_version(mlxr: Run) -> None:
    assert mlxr("version") == mlxr("--version") == f"mlxr {package.__version__}\n"
    assert json.loads(mlxr("version", "--json")) == {"version": package.__version__}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing  # type: ignore[attr-defined]


def test_flags_become_settings_and_sampling() -> None:
    seen: list[object] = []

    def command(name: str, settings: Settings, sampling: Sampling) -> None:
        seen.extend([name, settings, sampling])

    values = dict.fromkeys([setting.name for setting in SETTINGS if setting.scope == "model"]) | {
        row.name: None for row in PARAMETERS
    }
    expand_flags(command)(name="x", **{**values, "threads": "2", "arena_bytes": "1M", "seed": 5, "stop": ["a", "b"]})
    name, settings, sampling = seen
    assert name == "x"
    assert settings == Settings(threads=2, arena_bytes=1 << 20)
    assert sampling == {"seed": 5, "stop": ["a", "b"]}
    assert make_sampling({"top_k": 3}, sampling) == SamplingParams(max_tokens=None, top_k=3, seed=5, stop=("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "missing.gguf", "hi"], "missing.gguf: no such file"),
        (["run", "demoo", "hi"], "did you mean demo"),
        (["run", "one", "two", "three"], "put the prompt in quotes"),
        (["nonsense"], "No such command 'nonsense'"),
        (["rum"], "Did you mean 'rm', 'run'"),
        (["--nonsense"], "--nonsense is not a flag of `mlxr`"),
        (["run", "--nonsense", "hi"], "--nonsense is not a flag of `mlxr run`"),
        (["run", "--temperature", "-1", "hi"], "temperature: must be at least 0"),
        (["run", "--temperature", "hot", "hi"], "--temperature"),
        (["run", "--max-tokens", "-3", "hi"], "max_tokens: must be at least 0"),
        (["run", "--device", "gpu", "hi"], "device: must be one of auto, cpu, metal, cuda, reference, mlx-cpu"),
        (["run", "--threads", "0", "hi"], "threads: must be from 1"),
        (["run", "--arena-bytes", "lots", "hi"], "arena_bytes: must be a size"),
        (["run", "--isa", "sse9", "hi"], "isa: must be one of"),
        (["run", "--device", "reference", "--threads", "2", "hi"], "takes no threads"),
        (["show", "missing.gguf"], "no such file"),
        (["perplexity", "demo", "missing.txt"], "missing.txt: no such file"),
        (["bench", "demo", "--batch", "0"], "batch: must be at least 1"),
        (["bench", "demo", "--repeat", "0"], "repeat: must be at least 1"),
        (["validate", "missing"], "no such file"),
        (["chat", "missing"], "missing is not here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], expected: str, refused: Run) -> None:
    assert expected in refused(*arguments)


def test_environment_settings_are_read_and_named() -> None:
    code, out, err = execute("run", "hi", environment={"MLXR_DEVICE": "gpu"})
    assert (code, out) == (2, "")
    assert err == "mlxr: device: must be one of auto, cpu, metal, cuda, reference, mlx-cpu, emulated; got gpu\n"


@pytest.mark.slow
def test_no_traceback_from_the_real_process(tmp_path: Path, gguf: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf.read_bytes()[:5000])
    for arguments in (["run", "missing.gguf", "hi"], ["run", str(broken), "hi"], ["show", str(broken)]):
        code, out, err = execute(*arguments)
        assert (code, out) == (2, "")
        assert str(err).startswith("mlxr: ")
        assert str(err).count("\n") == 1
        assert arguments[1] in str(err)


def test_control_characters_do_not_reach_the_terminal(refused: Run) -> None:
    assert "\\x1b[31m" in refused("run", "\x1b[31mred.gguf", "hi")


@pytest.mark.parametrize("arguments", [["show", "--tensors", "--json"], ["--help"]], ids=["show", "help"])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str], gguf: Path) -> None:
    paths = [str(gguf)] if "show" in arguments else []
    command = [sys.executable, "-m", "mlxr", *arguments, *paths]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("closed", "arguments", "expected"),
    [
        (">&-", ["version"], (0, "", "")),
        ("2>&-", ["run", "missing.gguf", "hi"], (2, "", "")),
        ("<&-", ["run", "missing.gguf", "-"], (2, "", "PROMPT: is blank")),
    ],
    ids=["stdout", "stderr", "stdin"],
)
def test_closed_streams_are_empty_ones(closed: str, arguments: list[str], expected: tuple[int, str, str]) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "mlxr", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == expected[:2]
    assert expected[2] in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [sys.executable, "-m", "mlxr", "version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (run.returncode, run.stderr) == (2, "mlxr: No space left on device\n")


def test_a_terminal_without_the_characters_is_no_error(gguf: Path) -> None:
    code, out, _ = execute("show", str(gguf), "--tensors", environment={"PYTHONIOENCODING": "ascii"})
    assert code == 0
    assert "512 \\xd7 256" in str(out)


def test_a_name_too_long_for_a_path_is_one_line(refused: Run) -> None:
    assert len(refused("show", "x" * 5000)) < 400


def test_warnings_are_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn() -> None:
        try:
            raise ValueError("inner")
        except ValueError:
            logging.getLogger("mlxr.engine").exception("two\nlines \x1b[31m %d", 5)
        logging.getLogger("mlxr.engine").info("not shown")

    monkeypatch.setattr("mlxr.cli.main.version", warn)
    handlers = list(logging.getLogger().handlers)
    assert main(["version"]) == 0
    assert capsys.readouterr().err == "mlxr: two lines \\x1b[31m 5\n"
    assert logging.getLogger().handlers == handlers


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxr.cli.main.version", interrupt)
    assert main(["version"]) == 130


def test_a_service_is_written_started_and_removed(
    tmp_path: Path, mlxr: Run, refused: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CONFIG_HOME", "MLXR_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "platform", "linux")
    unit = tmp_path / ".config" / "systemd" / "user" / "mlxr.service"
    assert f"would write {unit}" in mlxr("service", "install", "--dry-run", "--", "demo", "--port", "8080")
    assert not unit.exists()
    assert "systemctl is not on this machine" in refused("service", "install")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n[ "$2" != start ]\n')
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    assert "no service is installed" in refused("service", "start")
    assert "--prot is not a flag of `mlxr serve`; did you mean --port" in refused("service", "install", "--", "--prot")
    assert "Restart=on-failure" not in mlxr(
        "service", "install", "--", "demo", "--chat-template-kwargs", '{"a": "%h$b"}'
    )
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    assert line.endswith(r'-m mlxr serve demo --chat-template-kwargs "{\"a\": \"%%h$$b\"}"')
    monkeypatch.setenv("MLXR_PORT", "8080")
    assert main(["service", "install"]) == 0
    assert "the service does not see MLXR_PORT" in capsys.readouterr().err
    assert "%%h" in unit.with_name("mlxr.service.old").read_text()
    assert main(["service", "start"]) == 2
    assert "`systemctl --user start mlxr`: exit code 1" in capsys.readouterr().err
    mlxr("service", "uninstall")
    assert not unit.exists()
    assert (tmp_path / "log").read_text().splitlines()[-1] == "--user disable --now mlxr"
    monkeypatch.setattr(sys, "platform", "darwin")
    shown = mlxr("service", "install", "--dry-run", "--", "demo")
    assert "Library/LaunchAgents/mlxr.plist" in shown
    assert "<string>serve</string>\n\t\t<string>demo</string>" in shown
