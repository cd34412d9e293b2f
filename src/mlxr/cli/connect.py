"""`mlxr connect`: configures other programs for this server, as text to copy or written into their files."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxr.cli.flags import ReachedSettings
from mlxr.cli.remote import WANTS_KEY, address_of, ask_server, find_own_key, spell_url
from mlxr.cli.terminal import print_note
from mlxr.core.errors import InvalidRequest, MlxrError, NotFound
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings

USUAL_CONTEXT_TOKENS = 32768  # assumed for a model that is not here
ANSWER_TOKENS = 8192
ASK_S = 3.0  # the time-out for the server's facts
AGENT_TOKENS = 16384  # about what instructions and tools of coding agents take
PATIENCE_MS = 3_600_000  # of agents until an answer begins; their own five minutes are too few for small processors


@frozen
class Server:
    """The server's facts for a program: address without /v1, key (any, if none is set), model and context."""

    url: str
    key: str
    model: str
    context_tokens: int

    @property
    def answer_tokens(self) -> int:
        """The most tokens of one answer: a quarter of the context, at most ANSWER_TOKENS."""
        return min(ANSWER_TOKENS, self.context_tokens // 4)


@frozen
class Recipe:
    """The configuration of one program. `file` is relative to the home folder; one in JSON is merged, not replaced."""

    title: str
    command: str  # starts the configured program; MODEL stands for the model
    file: str = ""
    content: Callable[[Server], str] = lambda _: ""
    variables: Mapping[str, str] = field(default_factory=dict)  # URL, KEY and MODEL stand for the server's
    others: Mapping[str, str] = field(default_factory=dict)  # further files, with the JSON to merge into each
    note: str = ""  # for the user; MODEL stands for the model

    def list_files(self, server: Server) -> Mapping[Path, str]:
        """Return the text for each file of the home folder."""
        texts = ({self.file: self.content(server)} if self.file else {}) | dict(self.others)
        return {Path.home() / name: text for name, text in texts.items()}


def _opencode(server: Server) -> str:
    limit = {"context": server.context_tokens, "output": server.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxr",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"tool_call": True, "limit": limit}},
    }
    return _dump({"$schema": "https://opencode.ai/config.json", "provider": {"mlxr": provider}})


def _pi(server: Server) -> str:
    model = {"id": server.model, "contextWindow": server.context_tokens, "maxTokens": server.answer_tokens}
    provider = {"baseUrl": f"{server.url}/v1", "api": "openai-completions", "apiKey": server.key, "models": [model]}
    return _dump({"providers": {"mlxr": provider}})


def _codex(server: Server) -> str:
    return (
        f'model = "{server.model}"\nmodel_provider = "mlxr"\nmodel_context_window = {server.context_tokens}\n\n'
        f'[model_providers.mlxr]\nname = "mlxr"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
        f"stream_idle_timeout_ms = {PATIENCE_MS}\n"
        f'http_headers = {{ "Authorization" = "Bearer {server.key}" }}\n'
    )


def _continue(server: Server) -> str:
    return (
        "name: mlxr\nversion: 1.0.0\nschema: v1\nmodels:\n"
        f"  - name: {server.model}\n    provider: openai\n    model: {server.model}\n"
        f"    apiBase: {server.url}/v1\n    apiKey: {server.key}\n"
        "    capabilities: [tool_use]\n    roles: [chat, edit, apply]\n    defaultCompletionOptions: "
        f"{{contextLength: {server.context_tokens}, maxTokens: {server.answer_tokens}}}\n"
    )


def _claude(server: Server) -> str:
    variables = RECIPES["claude-code"].variables
    return _dump({"env": {name: _put(value, server) for name, value in variables.items()}})


def _zed(server: Server) -> str:
    model = {"name": server.model, "display_name": server.model, "max_tokens": server.context_tokens}
    return _dump(
        {
            "language_models": {
                "openai_compatible": {"mlxr": {"api_url": f"{server.url}/v1", "available_models": [model]}}
            }
        }
    )


RECIPES: Mapping[str, Recipe] = {
    "claude-code": Recipe(
        "Claude Code",
        "claude --model MODEL",
        ".claude/settings.json",
        _claude,
        {
            "ANTHROPIC_BASE_URL": "URL",
            "ANTHROPIC_AUTH_TOKEN": "KEY",  # it would ask whether to use an ANTHROPIC_API_KEY
            "ANTHROPIC_MODEL": "MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL": "MODEL",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
            "API_TIMEOUT_MS": str(PATIENCE_MS),
        },
        {".claude.json": '{"hasCompletedOnboarding": true}\n'},  # onboarding would ask for an account of Anthropic
    ),
    "codex": Recipe(
        "Codex",
        "codex --profile mlxr",
        ".codex/mlxr.config.toml",
        _codex,
        note="Codex warns that it has no metadata for MODEL: its catalogue has OpenAI's models alone, and it takes "
        "usual values for others; the context, of which those would be wrong, is stated here",
    ),
    "opencode": Recipe("opencode", "opencode --model mlxr/MODEL", ".config/opencode/opencode.json", _opencode),
    "continue": Recipe("Continue", "cn", ".continue/config.yaml", _continue),
    "pi": Recipe("pi", "pi --provider mlxr --model MODEL", ".pi/agent/models.json", _pi),
    "zed": Recipe("Zed", "zed  # the key is asked for in the agent's panel", ".config/zed/settings.json", _zed),
    "cline": Recipe("Cline", "cline auth -p openai-compatible -k KEY -m MODEL -b URL/v1"),
    "aider": Recipe(
        "aider",
        "aider --model openai/MODEL",
        variables={"OPENAI_API_BASE": "URL/v1", "OPENAI_API_KEY": "KEY"},
    ),
    "open-webui": Recipe(
        "Open WebUI",
        "open-webui serve",
        variables={"OPENAI_API_BASE_URL": "URL/v1", "OPENAI_API_KEY": "KEY", "ENABLE_OLLAMA_API": "false"},
    ),
    "openai": Recipe(
        "clients of OpenAI",
        "# any program that reads these",
        variables={"OPENAI_BASE_URL": "URL/v1", "OPENAI_API_KEY": "KEY"},
    ),
}

Tool = Annotated[str, typer.Argument(metavar="TOOL", help=f"One of {', '.join(RECIPES)}.")]
ModelName = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Default: the model that answers here.")]
Address = Annotated[str | None, typer.Option("--url", help="The server's address; default: that of the settings.")]
Write = Annotated[bool, typer.Option("--write", help="Write the tool's file; what it held is kept beside it.")]


def connect(
    tool: Tool, settings: ReachedSettings, model: ModelName = None, url: Address = None, write: Write = False
) -> None:
    """Show how coding agents and editors use this server, or with --write configure it.

    The server itself is started with `mlxr serve`.
    """
    recipe = RECIPES.get(tool)
    if recipe is None:
        near = _find_near(tool)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(RECIPES)}"
        raise InvalidRequest("TOOL", f"{tool!r} is not known; {hint}")
    if write and not recipe.file:
        raise InvalidRequest("--write", f"{recipe.title} has no file for it; set what `mlxr connect {tool}` shows")
    server = _describe(settings, model, url, needs_key=write)
    for path, text in recipe.list_files(server).items():
        if write:
            kept = _write(path, text)
            print_note(f"wrote {path}" + (f"; what was there before is in {kept.name}" if kept else ""))
        else:
            print(f"# {path} (--write adds it):\n{text}")
    if recipe.variables and not write:
        print("# or in the shell:" if recipe.file else "# in the shell:")
        for name, value in recipe.variables.items():
            print(f"export {name}={_put(value, server)}")
        print()
    print(f"# then:\n{_put(recipe.command, server)}")
    if recipe.note:
        print_note(_put(recipe.note, server))
    if server.context_tokens < AGENT_TOKENS:
        tokens = server.context_tokens
        print_note(f"{server.model} has a context of {tokens} tokens, which is little for an agent's instructions")


def _find_near(tool: str) -> list[str]:
    """Return the names of tools that are spelt like `tool`, or begin as it does; the nearest first."""
    plain = {re.sub(r"\W|_", "", name): name for name in RECIPES}
    wanted = re.sub(r"\W|_", "", tool.lower())
    begun = [name for short, name in plain.items() if len(wanted) > 1 and short.startswith(wanted)]
    near = [plain[short] for short in difflib.get_close_matches(wanted, plain, n=2, cutoff=0.7)]
    return list(dict.fromkeys([*begun, *near]))


def _describe(settings: Settings, model: str | None, url: str | None, *, needs_key: bool) -> Server:
    """Ask the running server for its facts; missing ones come from the settings and models here.

    With `needs_key` raises MlxrError if the server wants a key that was not given.
    """
    from mlxr.service.catalogue import choose_default, open_registry

    address = (spell_url(url) or address_of(settings)).rstrip("/").removesuffix("/v1")
    if not address.startswith(("http://", "https://")):
        raise InvalidRequest("--url", f"{url!r} has no http:// or https:// before it")
    registry, key = open_registry(settings), find_own_key(settings)
    info: Mapping[str, Any] = {}
    known: Mapping[str, Any] = {}
    try:
        info = ask_server(settings, address, "/v1/admin/info", timeout_s=ASK_S)
        known = ask_server(settings, address, "/api/show", {"model": model or info["default_model"]}, timeout_s=ASK_S)
    except MlxrError as error:
        if WANTS_KEY in str(error) and needs_key:
            raise
        print_note(str(error) if info else f"{error}\nwhat follows is by the settings and models of this machine")
    name = model or str(info.get("default_model") or choose_default(registry, settings).name)
    stated = [value for field, value in (known.get("model_info") or {}).items() if field.endswith(".context_length")]
    try:
        tokens = int(stated[0]) if stated else registry.get(name).context_tokens
    except NotFound:
        tokens = USUAL_CONTEXT_TOKENS
    tokens = (info if info else {"context_tokens": settings.context_tokens}).get("context_tokens") or tokens
    if info:
        wants = "wants a key" if info.get("needs_key") else "wants no key"
        print_note(f"the server at {address} answers: default model {info['default_model']}, {wants}")
    return Server(address, key or "none", name, tokens)


def _write(path: Path, text: str) -> Path | None:
    """Put `text` into a configuration: merges JSON, replaces a file of our own, and else raises MlxrError.

    Returns the copy of the file that was there before mlxr first wrote it, if there is one.
    """
    kept = path.with_name(f"{path.name}.before-mlxr")
    old = path.read_text() if path.exists() else ""
    if old.strip():
        if path.suffix == ".json":
            try:
                before = json.loads(old)
            except ValueError as error:
                raise MlxrError(
                    f"{path}: is no plain JSON ({error}); add by hand what is shown without --write"
                ) from None
            merged = _merge(before, json.loads(text))
            text = old if merged == before else _dump(merged)
        elif old != text and "mlxr" not in path.name:
            raise MlxrError(f"{path}: is there already; add by hand what is shown without --write")
        if "mlxr" not in path.name and old != text and not kept.exists():
            shutil.copy2(path, kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.resolve()  # such files are often links
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o600  # it may hold the key
    part = target.with_name(f".{target.name}.mlxr")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    part.replace(target)  # the old file stays until the new one is complete
    return kept if kept.exists() else None


def _merge(old: Any, new: Any) -> Any:
    """Merge `new` into `old`, key by key."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _put(text: str, server: Server) -> str:
    values = {"URL": server.url, "KEY": server.key, "MODEL": server.model}
    return re.sub(r"\b(URL|KEY|MODEL)\b", lambda match: values[match[1]], text)


def _dump(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
