"""Every setting of mlxr: one table, from which flags, environment variables and documents are made.

The table is the class `Settings`, each field of which declares a row; the rows of a model are in `ModelSettings`.

A value comes, in this order, from the caller (a flag or a keyword), from the environment variable `MLXR_<NAME>`, from
the settings file, from a variable of other programs (`FOREIGN_VARIABLES`), or from the default in the table. The file
is TOML with one line for each setting; it is the one that `MLXR_SETTINGS_FILE` names, or `mlxr/settings.toml` in the
user's folder for configuration. Nothing else in the package reads the environment. Unknown names and values that do not
fit are refused with the setting's name.
"""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mlxr.core.errors import SettingError
from mlxr.core.frozen import frozen
from mlxr.core.model_settings import ENVIRONMENT_PREFIX, ModelSettings, Scope, Setting, Value, list_rows, setting

logger = logging.getLogger(__name__)
NOT_SETTINGS = frozenset({"MLXR_REAL_MODELS"})  # tells the project's own tests where models are


def warn_unknown(names: Iterable[str], known: Collection[str], prefix: str) -> None:
    """Log a warning for each of `names` that begins with `prefix` and is not `known`, once for each name."""
    for name in sorted(names):
        if name.startswith(prefix) and name not in known and name not in NOT_SETTINGS:
            rest = [one.removeprefix(prefix) for one in sorted(known)]
            near = difflib.get_close_matches(name.removeprefix(prefix), rest, n=1, cutoff=0.7)
            _warn_once(name, f"did you mean {prefix}{near[0]}?" if near else "`mlxr settings` lists all")


@cache
def _warn_once(name: str, hint: str) -> None:
    # If logging is not set up, Python prints the bare text of warnings to stderr.
    logger.warning("%s is no setting and has no effect; %s", name, hint)


Source = Literal["caller", "environment", "file", "default"]
FILE_VARIABLE = ENVIRONMENT_PREFIX + "SETTINGS_FILE"
FOREIGN_VARIABLES = {"hub_url": "HF_ENDPOINT"}  # variables of other programs, used if ours is not set


@frozen
class Settings(ModelSettings):
    """Resolved values of all rows: those of a model, and those below."""

    models_folder: str | None = setting(
        "path", None, "Where models and their catalogue are kept; default: in the user's data folder.", scope="registry"
    )
    hub_url: str = setting(
        "text", "https://huggingface.co", "Where models are pulled from; HF_ENDPOINT is heeded too.", scope="hub"
    )
    host: str = setting("text", "127.0.0.1", "Address to listen on; 0.0.0.0 is every address.", scope="server")
    port: int = setting("int", 11434, "Port to listen on; 0 takes a free one.", maximum=65535, scope="server")
    unix_socket: str | None = setting("path", None, "Listen on this Unix socket instead of an address.", scope="server")
    default_model: str | None = setting(
        "text",
        None,
        "The model that answers where none is named; default: of your own the one that was used last, else demo.",
        scope="server",
    )
    model_aliases: tuple[str, ...] = setting(
        "list",
        (),
        "Other names of models, such as gpt-4o=llama3:8b; * stands for any characters, as in claude-*=llama3:8b.",
        scope="server",
    )
    adapters: tuple[str, ...] = setting(
        "list",
        (),
        "Low-rank adapters (LoRA) that requests may name, such as sql=PATH; model:sql=PATH where it is not for the "
        "default model.",
        scope="server",
    )
    strict_model_names: bool = setting(
        "flag",
        False,
        "Refuse names that no model has, instead of answering with the default model or the only one.",
        scope="server",
    )
    pinned_models: tuple[str, ...] = setting(
        "list", (), "Models that are loaded at the start and stay loaded.", scope="server"
    )
    models_memory_bytes: int | None = setting(
        "bytes",
        None,
        "Memory for all loaded models with their caches; default: most of what is free at the start.",
        scope="server",
    )
    keep_alive_s: float = setting(
        "seconds",
        300.0,
        "How long an idle model stays loaded; 0: it is unloaded at once; negative: it stays for ever.",
        minimum=-(2**62),
        scope="server",
    )
    responses_bytes: int = setting(
        "bytes",
        32 * 2**20,
        "Memory for answers of /v1/responses that later requests may continue; 0: none are kept.",
        scope="server",
    )
    responses_file: str | None = setting(
        "path",
        None,
        "A file in which these answers outlive the server, up to responses_bytes; default: they are in memory.",
        scope="server",
    )
    api_keys: tuple[str, ...] = setting(
        "list", (), "API keys; every request must carry one of them.", scope="server", secret=True
    )
    api_keys_file: str | None = setting(
        "path", None, "A file with API keys, one on each line; every request must carry one.", scope="server"
    )
    allowed_hosts: tuple[str, ...] = setting(
        "list", (), "Host names that requests may use, besides local names and addresses.", scope="server"
    )
    cors_origins: tuple[str, ...] = setting(
        "list",
        (),
        "Web pages that may use this server besides local ones, such as https://my.page or chrome-extension://*.",
        scope="server",
    )
    image_origins: tuple[str, ...] = setting(
        "list",
        (),
        "Origins such as https://pictures.example from which pictures and PDFs of requests are fetched; default: none.",
        scope="server",
    )
    import_folders: tuple[str, ...] = setting(
        "list",
        (),
        "Folders below which requests may import model files, which stay there; default: none.",
        scope="server",
    )
    page: bool = setting("flag", True, "Answer browsers that open the server's address with its page.", scope="server")
    page_tool_origins: tuple[str, ...] = setting(
        "list",
        (),
        "Servers that the page may call for the tools of a conversation, such as http://localhost:9000.",
        scope="server",
    )
    mcp_commands: tuple[str, ...] = setting(
        "list",
        (),
        "MCP servers that the page may start for tools of conversations: NAME=COMMAND, as in files=npx -y a-server.",
        scope="server",
    )
    mcp_urls: tuple[str, ...] = setting(
        "list",
        (),
        "MCP servers that the page may reach through this server: addresses, or * for every public one.",
        scope="server",
    )
    max_body_bytes: int = setting("bytes", 32 * 2**20, "Largest request body.", minimum=1024, scope="server")
    requests_per_minute: int = setting(
        "int",
        0,
        "Most requests in a minute from one key, or from one address where there are no keys; 0: no limit.",
        maximum=2**31,
        scope="server",
    )
    request_timeout_s: float = setting(
        "seconds",
        60.0,
        "How long a client may take to send a request; for a file, each piece may take as long.",
        minimum=1,
        scope="server",
    )
    request_deadline_s: float | None = setting(
        "seconds", None, "Longest time for one answer; default: no limit.", scope="server"
    )
    drain_s: float = setting(
        "seconds", 30.0, "How long answers may continue after the server is told to end.", scope="server"
    )
    fetch_bytes: int = setting(
        "bytes",
        512 * 2**20,
        "Most bytes of cache pages that a replica of a cluster fetches from others at a time; 0: none are fetched.",
        scope="server",
    )
    fetch_timeout_s: float = setting(
        "seconds",
        3.0,
        "How long a request may wait for cache pages from another replica, before they are computed.",
        scope="server",
    )
    log_level: str = setting(
        "choice",
        "info",
        "The least important messages that are logged.",
        choices=("debug", "info", "warning", "error"),
        scope="server",
    )
    log_format: str = setting(
        "choice",
        "text",
        "Log lines as text for people or as JSON for programs.",
        choices=("text", "json"),
        scope="server",
    )
    live_watchers: int = setting(
        "int", 8, "How many may watch the engine at a time; 0: nobody.", maximum=1000, scope="server"
    )
    log_prompts: bool = setting("flag", False, "Log every prompt in full.", scope="server")
    tracing: bool = setting("flag", False, "Send OpenTelemetry spans (needs the extra `tracing`).", scope="server")

    def select(self, *scopes: Scope) -> dict[str, Any]:
        """The values of the rows with one of `scopes`, by name."""
        return {row.name: getattr(self, row.name) for row in SETTINGS if row.scope in scopes}


SETTINGS = list_rows(Settings)
BY_NAME: Mapping[str, Setting] = {row.name: row for row in SETTINGS}
VARIABLES = frozenset({FILE_VARIABLE, *(row.environment_variable for row in SETTINGS)})


@frozen
class Explained:
    """The value of one setting and where it came from; `place` names the variable or the file."""

    value: Value
    source: Source
    place: str = ""


def resolve(overrides: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from `overrides` (None values count as not given), the environment, the file and the defaults."""
    return Settings(**{name: row.value for name, row in explain(overrides, environment).items()})  # type: ignore[arg-type]


def explain(
    overrides: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Explained]:
    """Every setting's value and where it came from. Raises SettingError for unknown names and unfit values.

    If `environment` is None, variables of the process that look like settings but are none are logged, once each.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    unknown = [name for name in given if name not in BY_NAME]
    if unknown:
        raise SettingError(f"{unknown[0]}: no such setting; there are {', '.join(BY_NAME)}")
    if environment is None:
        environment = os.environ
        warn_unknown(environment, VARIABLES, ENVIRONMENT_PREFIX)
    path = find_settings_file(environment)
    in_file = {} if path is None else _read_file(path)
    resolved: dict[str, Explained] = {}
    for row in SETTINGS:
        variable = row.environment_variable
        if row.name in given:
            resolved[row.name] = Explained(row.parse(given[row.name]), "caller")
        elif variable in environment:
            resolved[row.name] = Explained(row.parse(environment[variable]), "environment", variable)
        elif row.name in in_file:
            resolved[row.name] = Explained(_parse_in_file(row, in_file, path), "file", str(path))
        elif value := environment.get(FOREIGN_VARIABLES.get(row.name, "")):
            resolved[row.name] = Explained(row.parse(value), "environment", FOREIGN_VARIABLES[row.name])
        else:
            resolved[row.name] = Explained(row.default, "default")
    return resolved


def find_settings_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """The settings file of the user, or None if there is none. A file that was named must exist."""
    environment = os.environ if environment is None else environment
    named = environment.get(FILE_VARIABLE)
    if named:
        return Path(named)
    home = environment.get("HOME")
    folder = environment.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    path = None if folder is None else Path(folder) / "mlxr" / "settings.toml"
    return path if path is not None and path.is_file() else None


def _read_file(path: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: is not TOML: {error}") from error
    unknown = [name for name in values if name not in BY_NAME]
    if unknown:
        raise SettingError(f"{path}: {unknown[0]}: no such setting; `mlxr settings` lists them")
    return values


def _parse_in_file(row: Setting, values: Mapping[str, object], path: Path | None) -> Value:
    try:
        return row.parse(values[row.name])
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error
