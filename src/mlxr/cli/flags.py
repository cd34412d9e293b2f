"""Flags that several commands share, each defined once.

A command function asks for them by type: a parameter annotated `Settings` becomes one flag per row of the settings
table that concerns a model (`RegistrySettings`, `PullSettings` and `ServerSettings`: those that such a command uses);
one annotated `Sampling` becomes the sampling flags and gets those that were given. `expand_flags` turns such a function
into one that typer understands.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperArgument, TyperCommand
from typer.models import OptionInfo

from mlxr.cli.terminal import format_bytes, print_json, print_table
from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.model_settings import Kind, Scope, Setting, Value
from mlxr.core.sampling import ALL_TOKENS, EVERYDAY, Parameter, read_params
from mlxr.core.sampling import Kind as ParameterKind
from mlxr.core.settings import SETTINGS, Explained, Settings, explain, find_settings_file, resolve
from mlxr.core.types import PARAMETERS, SamplingParams


def complete_models(incomplete: str) -> list[str]:
    """Return the names of the catalogue that begin with `incomplete`; none if the catalogue cannot be read."""
    from mlxr.core.settings import resolve
    from mlxr.service.catalogue import open_registry

    try:
        names = [record.short_name for record in open_registry(resolve()).list()]
    except MlxrError:
        return []
    return [name for name in names if name.startswith(incomplete)]


FEW = 5  # a command with no more flags of settings and sampling hides none
COMMON = {  # the settings and sampling flags that people look for; --help-all shows the others
    *("device", "threads", "context_tokens", "models_folder", "temperature", "top_p", "max_tokens", "seed"),
    *("host", "port", "default_model", "api_keys_file", "keep_alive_s", "models_memory_bytes", "log_level"),
}
REACHED = {"host", "port", "api_keys_file", "default_model", "context_tokens", "models_folder"}  # for clients
SAMPLING_PANEL = "Sampling"
PANELS: Mapping[Scope, str] = {
    "model": "Model and device",
    "registry": "Models on disk",
    "hub": "Models on disk",
    "server": "Server",
}
UNITS = ("tokens", "percent", "bytes", "ms")  # the last word of a name may be its unit
METAVARS: Mapping[Kind | ParameterKind, str] = {
    "int": "NUMBER",
    "float": "NUMBER",
    "seed": "NUMBER",
    "texts": "TEXT",
    "bytes": "BYTES",
    "seconds": "SECONDS",
    "flag": "BOOL",
    "choice": "NAME",
    "path": "PATH",
    "text": "TEXT",
    "list": "NAMES",
    "object": "JSON",
}

Sampling = Annotated[Mapping[str, object], "sampling"]
RegistrySettings = Annotated[Settings, "registry"]
PullSettings = Annotated[Settings, "pull"]
ServerSettings = Annotated[Settings, "server"]
ReachedSettings = Annotated[Settings, "reached"]  # those of a server that other programs reach
SERVER_SCOPES: tuple[Scope, ...] = ("server", "registry", "hub", "model")
SCOPES: tuple[tuple[object, tuple[Scope, ...], set[str]], ...] = (  # with the flags that the help shows
    (Settings, ("model",), COMMON),
    (RegistrySettings, ("registry",), COMMON),
    (PullSettings, ("registry", "hub"), COMMON),
    (ServerSettings, SERVER_SCOPES, COMMON),
    (ReachedSettings, SERVER_SCOPES, REACHED),
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A .gguf file, a Hugging Face folder, or a name.", autocompletion=complete_models
    ),
]
OptionalModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a Hugging Face folder, or a name; default: demo.",
        autocompletion=complete_models,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the one that has the name.")]
System = Annotated[str | None, typer.Option("--system", help="A system message before the conversation.")]
SystemFile = Annotated[Path | None, typer.Option("--system-file", metavar="FILE", help="The same from a file.")]
MAX_TEXT_BYTES = 64 << 20  # of a file that becomes a part of a prompt


UNIT_OF = {bool: "", str: "TEXT", Path: "FILE", int: "NUMBER", float: "NUMBER"}  # the words behind a flag in the help
FLAG_TYPES: Mapping[ParameterKind, Any] = {"flag": bool, "texts": list[str]}  # numbers are text, read below
# Flags of llama.cpp, Ollama, vLLM and others, and ours: the first of those that the command has. {} stands for the
# command.
FOREIGN_FLAGS: Mapping[str, str] = {
    spelling: here
    for spellings, here in (
        ("--temp", "--temperature"),
        ("-n --n-predict --predict --num-predict --max-new-tokens --tokens", "--max-tokens"),
        ("-c --ctx-size --num-ctx --ctx --max-model-len --context --context-length --n-ctx", "--context-tokens"),
        ("-ngl --n-gpu-layers --gpu-layers --num-gpu --gpu", "--device cuda, by which a model runs wholly on it"),
        ("-m --model --model-path --hf -hf --hf-repo", "the model's name behind `{}`, without a flag"),
        ("-p --prompt", "the prompt in quotes behind the model, without a flag"),
        ("-t", "--threads"),
        ("-np --parallel --max-num-seqs --num-parallel", "--max-sequences"),
        ("-b --batch-size -ub --ubatch-size --max-num-batched-tokens", "--max-batch-tokens"),
        ("-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype", "--kv-type"),
        ("-s", "--seed"),
        ("--repeat-penalty", "--repetition-penalty"),
        ("--reasoning-budget", "--thinking-budget-tokens"),
        ("-sys --sys --system-prompt", "--system"),
        ("--chat-template-file --jinja", "--chat-template; templates in Jinja run by themselves"),
        ("--lora", "--adapter"),
        ("-md --model-draft --speculative-model", "--draft"),
        ("-a --alias --served-model-name", "--model-aliases"),
        ("--api-key", "--api-keys-file, or the variable MLXR_API_KEYS"),
        ("--gpu-memory-utilization", "--models-memory-bytes"),
        ("-tp --tensor-parallel-size --tensor-split", "--gpus"),
        ("--keepalive --keep-alive", "--keep-alive-s"),
        ("-v --verbose", "--stats|--log-level debug"),
        ("--log-disable --quiet", "--log-level error"),
        ("--port --host", "--url http://HOST:PORT"),
        ("--format", "--json"),
        ("-o --output", "`> FILE`"),
        ("-fa --flash-attn --mlock --no-mmap --mmap", "nothing: mlxr does the best by itself"),
    )
    for spelling in spellings.split()
}


def explain_flag(flag: str, words: Sequence[str], known: Sequence[str], command_path: str) -> str:
    """Return the error for a `flag` that a command does not know: its name here, or flags that are spelt like it.

    `words` are those of the command line, since `-ngl` arrives as `-n`; `known` are the flags of the command;
    `command_path` is its name with the program's before it.
    """
    spelt = [word.split("=")[0] for word in words if word.startswith(flag)]
    flag = next((word for word in spelt if word in FOREIGN_FLAGS), flag)
    for here in filter(None, FOREIGN_FLAGS.get(flag, "").split("|")):
        if not here.startswith("--") or re.split("[ ,;]", here)[0] in known:
            return f"{flag} is not a flag of `{command_path}`; write {here.replace('{}', command_path)}"
    near = difflib.get_close_matches(flag, known, n=2, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{flag} is not a flag of `{command_path}`{hint}"


def expand_flags(function: Callable[..., None], *, shows_all: bool = True) -> Callable[..., None]:
    """Return `function` with its Settings and Sampling parameters replaced by their flags.

    Its help has only the flags of COMMON or REACHED, unless it `shows_all` or there are few flags.
    """
    own = inspect.signature(function, eval_str=True).parameters
    flags: dict[str, Callable[[Mapping[str, object]], object]] = {}
    parameters: list[inspect.Parameter] = []
    shown = COMMON
    for name, parameter in own.items():
        row = next((row for row in SCOPES if parameter.annotation == row[0]), None)
        if row is not None:
            _, scopes, shown = row
            rows = [
                setting for scope in scopes for setting in SETTINGS if setting.scope == scope and not setting.secret
            ]
            flags[name] = partial(_read_settings, rows)
            parameters.extend(_setting_parameter(setting) for setting in rows)
        elif parameter.annotation == Sampling:
            flags[name] = _read_sampling
            parameters.extend(_sampling_parameter(row) for row in PARAMETERS)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(function)
    def call(**values: Any) -> None:
        given = {name: value for name, value in values.items() if name in own}
        function(**given, **{name: read(values) for name, read in flags.items()})

    for parameter in parameters:
        note = getattr(parameter.annotation, "__metadata__", (None,))[0]
        if isinstance(note, OptionInfo) and note.metavar is None:
            kinds = [parameter.annotation.__origin__, *get_args(parameter.annotation.__origin__)]
            note.metavar = next((unit for kind, unit in UNIT_OF.items() if kind in kinds), None)
    shared = [parameter for parameter in parameters if parameter.name not in own]
    if not shows_all and len(shared) > FEW:
        for parameter in shared:
            parameter.annotation.__metadata__[0].hidden = parameter.name not in shown
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


class PlainHelp(TyperCommand):
    """A command whose help shows no Python types: a flag's metavar says what it takes, and --help takes nothing."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, without the types that their help would show."""
        parameters = list(super().get_params(ctx))
        for parameter in parameters:
            if parameter.metavar is None or isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]  # noqa: ARG005
        return parameters


def count_hidden(function: Callable[..., None]) -> int:
    """Count the flags that the help of an expanded function leaves out."""
    notes = [getattr(annotation, "__metadata__", (None,))[0] for annotation in function.__annotations__.values()]
    return sum(getattr(note, "hidden", False) for note in notes)


def _setting_parameter(setting: Setting) -> inspect.Parameter:
    # Values stay text here: the settings table checks them, the same for flags and environment.
    text = setting.help
    if setting.choices:
        text += f" [{', '.join(setting.choices)}]"
    if setting.kind == "bytes":
        text += " [a number, or such as 512M or 2G]"
    if setting.default not in (None, ()):
        text += f" [default: {describe_value(setting, setting.default)}]"
    option = typer.Option(
        setting.flag,
        help=text.replace("[", r"\["),
        metavar=name_unit(setting),
        show_default=False,
        rich_help_panel=PANELS[setting.scope],
    )
    return _flag_parameter(setting.name, Annotated[str | None, option], None)


def name_unit(row: Setting | Parameter) -> str:
    """Return the word behind the flag in the help: the unit of the value if it has one, else its kind."""
    last = row.name.rsplit("_", 1)[-1]
    return last.upper() if row.kind == "int" and last in UNITS else METAVARS[row.kind]


def describe_value(setting: Setting, value: object) -> str:
    """Return a value with its unit, as the help shows it."""
    if setting.kind == "bytes" and isinstance(value, int) and value:
        return format_bytes(value)
    if setting.kind == "seconds" and isinstance(value, float):
        return f"{value:g} s"
    if setting.kind == "flag":
        return str(value).lower()
    unit = name_unit(setting)
    return f"{value} {unit.lower()}" if setting.kind == "int" and unit != METAVARS["int"] else str(value)


def _sampling_parameter(row: Parameter) -> inspect.Parameter:
    option = typer.Option(
        row.flag,
        help=f"{row.help}{_describe_default(row)}",
        metavar=name_unit(row),
        show_default=False,
        rich_help_panel=SAMPLING_PANEL,
    )
    kind = FLAG_TYPES.get(row.kind, str)
    return _flag_parameter(row.name, Annotated[kind | None, option], None)


def _describe_default(row: Parameter) -> str:
    """Return the value that holds if neither the flag nor the model gives another one, as the help shows it."""
    value = EVERYDAY.get(row.name, row.default)
    if row.name == "max_tokens" or value is None or isinstance(value, bool | tuple):
        return ""
    return rf" \[default: {value:g}{', or what the model recommends' if row.name in EVERYDAY else ''}]"


def _flag_parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read_settings(rows: Sequence[Setting], values: Mapping[str, object]) -> Settings:
    return resolve({setting.name: values[setting.name] for setting in rows})


def _read_sampling(values: Mapping[str, object]) -> dict[str, object]:
    given = {
        row.name: read_number(row, value, row.flag) if isinstance(value, str) else value
        for row in PARAMETERS
        if (value := values[row.name]) not in (None, [])
    }
    make_sampling(given)  # raises for wrong values before a model is loaded
    return given


def read_number(row: Parameter, text: str, name: str) -> float:
    """Return the number that was typed for a parameter; raises InvalidRequest with `name`."""
    try:
        return float(text) if row.kind == "float" else int(text)
    except ValueError:
        wanted = "a number" if row.kind == "float" else "a whole number"
        raise InvalidRequest(name, f"must be {wanted}, got {text[:40]!r}") from None


def read_text(path: Path, field: str) -> str:
    """Return the text of a file for a prompt, without the line break at its end; raises InvalidRequest with `field`."""
    place = path.expanduser()
    try:
        if place.is_file() and place.stat().st_size > MAX_TEXT_BYTES:
            raise InvalidRequest(field, f"{path} is larger than {format_bytes(MAX_TEXT_BYTES)}")
        return place.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(field, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_system(system: str | None, file: Path | None) -> str | None:
    """Return the system message of --system or --system-file; raises InvalidRequest if both are given."""
    if system is not None and file is not None:
        raise InvalidRequest("--system-file", "and --system are two system messages; give one of them")
    return system if file is None else read_text(file, "--system-file")


def make_sampling(*layers: Mapping[str, object]) -> SamplingParams:
    """Make parameters of values under the names of any dialect; later layers override earlier ones, and an answer has
    no bound by default.

    Raises InvalidRequest naming the wrong value.
    """
    return SamplingParams(**read_params({"max_tokens": ALL_TOKENS}, *layers))


def settings(json: Json = False) -> None:
    """Show every setting and where its value came from: MLXR_* variables, the settings file, or the default.
    Commands use these values unless flags say otherwise.
    """
    found = explain()
    if json:
        print_json({setting.name: describe_setting(setting, found[setting.name]) for setting in SETTINGS})
        return
    rows = []
    for setting in SETTINGS:
        row = found[setting.name]
        rows.append((setting.name, show_setting(setting, row.value), f"{row.source} {row.place}".strip(), setting.help))
    print_table(("setting", "value", "from", "meaning"), rows)
    file = find_settings_file()
    print(f"\nsettings file: {file or 'none'}")


def describe_setting(setting: Setting, row: Explained) -> dict[str, object]:
    """Return one setting as JSON fields; secrets are counted, not shown."""
    value = row.value
    shown = show_setting(setting, value) if setting.secret else list(value) if isinstance(value, tuple) else value
    return {"value": shown, "source": row.source, "place": row.place or None, "scope": setting.scope}


def show_setting(setting: Setting, value: Value) -> str:
    """Return the value as text for people."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return f"({len(value)} set)" if setting.secret and value else ",".join(value) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
