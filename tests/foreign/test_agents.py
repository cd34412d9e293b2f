"""Coding agents read a file through a call that is forced, send its result back and show the answer."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forcing_proxy import ANSWER, Json
from long_demo import CONTEXT_TOKENS

from conftest import COMMAND, MODEL, MakeProxy, find_program

OPENCODE = {"autoupdate": False, "share": "disabled", "permission": {"external_directory": "allow", "read": "allow"}}
OPENCODE_FILE = ".config/opencode/opencode.json"
SECRET = "The secret number is 4711."
QUESTION = "Read note.txt"
LIMIT_S = 240


@dataclass(frozen=True)
class Agent:
    """An agent, told of the server by `mlxr connect`. HOME and NOTE stand for its home and the file to read."""

    program: str
    words: tuple[str, ...]
    tool: str
    arguments: Json
    path: str  # of the requests that carry the conversation
    recipe: str = ""  # what `mlxr connect --write` takes
    files: dict[str, str] = field(default_factory=dict)  # in its home before that, as its owner has them
    first: tuple[str, ...] = ()  # words of a command that must run before


AGENTS = [
    Agent(
        "claude",
        ("-p", QUESTION, "--model", MODEL),
        "Read",
        {"file_path": "NOTE"},
        "/v1/messages",
        recipe="claude-code",
    ),
    Agent(
        "codex",
        ("exec", "--profile", "mlxr", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION),
        "exec_command",
        {"cmd": "cat note.txt"},
        "/v1/responses",
        recipe="codex",
    ),
    Agent(
        "opencode",
        ("run", "--model", f"mlxr/{MODEL}", QUESTION),
        "read",
        {"filePath": "NOTE"},
        "/v1/chat/completions",
        recipe="opencode",
        files={OPENCODE_FILE: json.dumps(OPENCODE | {"small_model": f"mlxr/{MODEL}"})},
    ),
    Agent(
        "pi",
        ("-p", "--provider", "mlxr", "--model", MODEL, QUESTION),
        "read",
        {"path": "note.txt"},
        "/v1/chat/completions",
        recipe="pi",
    ),
    Agent(
        "cline",
        ("--data-dir", "HOME/cline", "--retries", "1", "-t", "120", QUESTION),
        "read_files",
        {"files": [{"path": "NOTE"}]},
        "/v1/chat/completions",
        first=("auth", "--data-dir", "HOME/cline", "-p", "openai-compatible", "-k", "x", "-m", MODEL, "-b", "URL/v1"),
    ),
    Agent(
        "cn",
        ("-p", "--auto", "--config", "HOME/.continue/config.yaml", QUESTION),
        "Read",
        {"filepath": "note.txt"},
        "/v1/chat/completions",
        recipe="continue",
    ),
]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_an_agent_calls_a_tool_and_answers(agent: Agent, make_proxy: MakeProxy, tmp_path: Path) -> None:
    program = find_program(agent.program)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(f"{SECRET}\n")
    places = {"NOTE": str(work / "note.txt"), "HOME": str(home)}
    proxy = make_proxy(agent.tool, json.loads(put(json.dumps(agent.arguments), places)))
    places["URL"] = proxy.url
    keep = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLXR_", "OPENAI_", "ANTHROPIC_"))
    }
    variables = keep | {"HOME": str(home), "MLXR_CONTEXT_TOKENS": str(CONTEXT_TOKENS)}
    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    if agent.recipe:
        command = [COMMAND, "connect", agent.recipe, "--model", MODEL, "--url", proxy.url, "--write"]
        subprocess.run(command, env=variables, check=True, capture_output=True)
    for words in (agent.first, agent.words):
        if words:
            run = subprocess.run(
                [program, *(put(word, places) for word in words)],
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert ANSWER in run.stdout
    assert any(SECRET in result for result in proxy.results)
    assert all(status == 200 for path, status, _ in proxy.replies if path.startswith(agent.path))


def put(text: str, places: dict[str, str]) -> str:
    """Return `text` with the names of places replaced."""
    for name, place in places.items():
        text = text.replace(name, place)
    return text
