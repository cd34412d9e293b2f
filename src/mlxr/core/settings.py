"""Every setting of mlxr: one table, from which flags, environment variables and documents are made.

A value comes, in this order, from the caller (a flag or a keyword), from the environment variable `MLXR_<NAME>`, from
the settings file, or from the default in the table. The file is TOML with one line for each setting; it is the one that
`MLXR_SETTINGS_FILE` names, or `mlxr/settings.toml` in the user's folder for configuration. Nothing else in the package
reads the environment. Unknown names and values that do not fit are refused with the setting's name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlxr.core.environment import warn_unknown
from mlxr.core.errors import SettingError
from mlxr.core.setting import ENVIRONMENT_PREFIX, Scope, Setting, Value

Source = Literal["caller", "environment", "file", "default"]
FILE_VARIABLE = ENVIRONMENT_PREFIX + "SETTINGS_FILE"
DEVICES = ("auto", "cpu", "metal", "cuda", "reference", "mlx-cpu", "emulated")

SETTINGS: tuple[Setting, ...] = (
    Setting("device", "choice", "auto", "Where the model runs.", choices=DEVICES),
    Setting(
        "threads",
        "int",
        None,
        "Compute threads; default: the cores this process may use.",
        minimum=1,
        maximum=256,
    ),
    Setting(
        "isa",
        "choice",
        None,
        "Instruction set of the CPU kernels; default: the best this machine has.",
        choices=("portable", "avx2", "avx512"),
    ),
    Setting(
        "arena_bytes",
        "bytes",
        None,
        "Memory for the KV cache; default: what the context needs, within arena_percent of free memory.",
    ),
    Setting(
        "arena_percent",
        "int",
        50,
        "Share of the free memory that the KV cache may take if arena_bytes is not given, in percent.",
        minimum=1,
        maximum=100,
    ),
    Setting(
        "kv_cache",
        "choice",
        "auto",
        "paged: pages that requests share and that are kept; simple: one plain run for each request.",
        choices=("auto", "paged", "simple"),
    ),
    Setting("page_size", "int", 32, "Token positions in one page of the KV cache.", minimum=1, maximum=1024),
    Setting(
        "kv_type",
        "choice",
        None,
        "Number format of the KV cache; default: the device's own. q8 takes half the memory.",
        choices=("bf16", "f16", "f32", "q8"),
    ),
    Setting("store_bytes", "bytes", 0, "Disk space for cache pages, which then outlive memory and restarts; 0: none."),
    Setting("store_folder", "path", None, "Where cache pages are kept on disk; default: in the user's cache folder."),
    Setting(
        "context_tokens",
        "int",
        None,
        "Longest context of a request; default: what the model was made for.",
        minimum=1,
    ),
    Setting("max_batch_tokens", "int", 512, "Most tokens that one step computes.", minimum=1, maximum=2**20),
    Setting("max_sequences", "int", 64, "Most answers that are computed at the same time.", minimum=1, maximum=4096),
    Setting(
        "prefill_chunk_tokens",
        "int",
        512,
        "Most tokens of one prompt that one step computes.",
        minimum=1,
        maximum=2**20,
    ),
    Setting(
        "max_waiting",
        "int",
        1024,
        "Most requests that may wait for their turn; more are refused.",
        minimum=1,
        maximum=2**20,
    ),
    Setting(
        "models_folder",
        "path",
        None,
        "Where models and their catalogue are kept; default: in the user's data folder.",
        scope="registry",
    ),
    Setting("hub_url", "text", "https://huggingface.co", "Where models are pulled from.", scope="hub"),
    Setting("host", "text", "127.0.0.1", "Address to listen on; 0.0.0.0 is every address.", scope="server"),
    Setting("port", "int", 11434, "Port to listen on; 0 takes a free one.", maximum=65535, scope="server"),
    Setting("unix_socket", "path", None, "Listen on this Unix socket instead of an address.", scope="server"),
    Setting("default_model", "text", "demo", "The model that answers requests that name none.", scope="server"),
    Setting(
        "model_aliases",
        "list",
        (),
        "Other names of models, such as gpt-4o=llama3:8b; * stands for any characters, as in claude-*=llama3:8b.",
        scope="server",
    ),
    Setting(
        "strict_model_names",
        "flag",
        False,
        "Refuse names that no model has, instead of answering with the default model or the only one.",
        scope="server",
    ),
    Setting("pinned_models", "list", (), "Models that are loaded at the start and stay loaded.", scope="server"),
    Setting(
        "models_memory_bytes",
        "bytes",
        None,
        "Memory for all loaded models with their caches; default: most of what is free at the start.",
        scope="server",
    ),
    Setting(
        "keep_alive_s",
        "seconds",
        300.0,
        "How long an idle model stays loaded; 0: it is unloaded at once; negative: it stays for ever.",
        minimum=-(2**62),
        scope="server",
    ),
    Setting(
        "responses_bytes",
        "bytes",
        32 * 2**20,
        "Memory for answers of /v1/responses that later requests may continue; 0: none are kept.",
        scope="server",
    ),
    Setting("api_keys", "list", (), "API keys; every request must carry one of them.", scope="server", secret=True),
    Setting(
        "api_keys_file",
        "path",
        None,
        "A file with API keys, one on each line; every request must carry one.",
        scope="server",
    ),
    Setting(
        "allowed_hosts",
        "list",
        (),
        "Host names that requests may use, besides local names and addresses.",
        scope="server",
    ),
    Setting(
        "cors_origins",
        "list",
        (),
        "Web pages that may use this server besides local ones, such as https://my.page or chrome-extension://*.",
        scope="server",
    ),
    Setting(
        "import_folders",
        "list",
        (),
        "Folders below which requests may import model files, which stay there; default: none.",
        scope="server",
    ),
    Setting("page", "flag", True, "Answer browsers that open the server's address with its page.", scope="server"),
    Setting(
        "page_tool_origins",
        "list",
        (),
        "Servers that the page may call for the tools of a conversation, such as http://localhost:9000.",
        scope="server",
    ),
    Setting("max_body_bytes", "bytes", 32 * 2**20, "Largest request body.", minimum=1024, scope="server"),
    Setting(
        "requests_per_minute",
        "int",
        0,
        "Most requests in a minute from one key, or from one address where there are no keys; 0: no limit.",
        maximum=2**31,
        scope="server",
    ),
    Setting(
        "request_timeout_s",
        "seconds",
        60.0,
        "How long a client may take to send a request; for a file, each piece may take as long.",
        minimum=1,
        scope="server",
    ),
    Setting("request_deadline_s", "seconds", None, "Longest time for one answer; default: no limit.", scope="server"),
    Setting(
        "drain_s", "seconds", 30.0, "How long answers may continue after the server is told to end.", scope="server"
    ),
    Setting(
        "log_level",
        "choice",
        "info",
        "The least important messages that are logged.",
        choices=("debug", "info", "warning", "error"),
        scope="server",
    ),
    Setting(
        "log_format",
        "choice",
        "text",
        "Log lines as text for people or as JSON for programs.",
        choices=("text", "json"),
        scope="server",
    ),
    Setting(
        "metric_names",
        "list",
        (),
        "Other servers whose metric names /metrics uses as well.",
        choices=("vllm", "llamacpp", "otel"),
        scope="server",
    ),
    Setting(
        "live_watchers",
        "int",
        8,
        "How many may watch the engine at a time; 0: nobody.",
        maximum=1000,
        scope="server",
    ),
    Setting("log_prompts", "flag", False, "Log every prompt in full.", scope="server"),
    Setting("tracing", "flag", False, "Send OpenTelemetry spans (needs the extra `tracing`).", scope="server"),
)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}
VARIABLES = frozenset({FILE_VARIABLE, *(setting.environment_variable for setting in SETTINGS)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved values; one field per row of SETTINGS (a test holds the two equal)."""

    device: str = "auto"
    threads: int | None = None
    isa: str | None = None
    arena_bytes: int | None = None
    arena_percent: int = 50
    kv_cache: str = "auto"
    page_size: int = 32
    kv_type: str | None = None
    store_bytes: int = 0
    store_folder: str | None = None
    context_tokens: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    prefill_chunk_tokens: int = 512
    max_waiting: int = 1024
    models_folder: str | None = None
    hub_url: str = "https://huggingface.co"
    host: str = "127.0.0.1"
    port: int = 11434
    unix_socket: str | None = None
    default_model: str = "demo"
    model_aliases: tuple[str, ...] = ()
    strict_model_names: bool = False
    pinned_models: tuple[str, ...] = ()
    models_memory_bytes: int | None = None
    keep_alive_s: float = 300.0
    responses_bytes: int = 32 * 2**20
    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    import_folders: tuple[str, ...] = ()
    page: bool = True
    page_tool_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    requests_per_minute: int = 0
    request_timeout_s: float = 60.0
    request_deadline_s: float | None = None
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    metric_names: tuple[str, ...] = ()
    live_watchers: int = 8
    log_prompts: bool = False
    tracing: bool = False

    def select(self, *scopes: Scope) -> dict[str, Any]:
        """The values of the rows with one of `scopes`, by name."""
        values = asdict(self)
        return {setting.name: values[setting.name] for setting in SETTINGS if setting.scope in scopes}


@dataclass(frozen=True, slots=True)
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

    Variables of the process (`environment` None) that look like settings and are none are warned of, once each.
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
    for setting in SETTINGS:
        variable = setting.environment_variable
        if setting.name in given:
            resolved[setting.name] = Explained(setting.parse(given[setting.name]), "caller")
        elif variable in environment:
            resolved[setting.name] = Explained(setting.parse(environment[variable]), "environment", variable)
        elif setting.name in in_file:
            resolved[setting.name] = Explained(_parse_in_file(setting, in_file, path), "file", str(path))
        else:
            resolved[setting.name] = Explained(setting.default, "default")
    return resolved


def find_settings_file(environment: Mapping[str, str] | None = None) -> Path | None:
    """The settings file of the user, or None where there is none. A file that was named must exist."""
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


def _parse_in_file(setting: Setting, values: Mapping[str, object], path: Path | None) -> Value:
    try:
        return setting.parse(values[setting.name])
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error
