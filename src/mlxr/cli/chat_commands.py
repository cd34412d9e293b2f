"""The commands of a chat: a table, and what each of them does to the session.

A command is a row; its function gets the session and the words after the command. What is wrong with them is raised as
InvalidRequest, and the chat goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxr.cli.chat_model import ChatModel
from mlxr.cli.completion import complete_models
from mlxr.cli.conversation import Conversation
from mlxr.cli.terminal import print_fields, print_note
from mlxr.core.errors import InvalidRequest
from mlxr.core.parameter import Parameter
from mlxr.core.sampling import BY_SPELLING
from mlxr.core.types import PARAMETERS, Grammar
from mlxr.service.reasoning import EFFORTS

SHORTCUTS = (
    ("Tab", "completes a command"),
    ("Up, Down", "go through the lines typed before"),
    ("Ctrl-C", "stops an answer, or empties the line"),
    ("Ctrl-D", "ends"),
    ('"""', "begins and ends a text of several lines"),
)


class Session(Protocol):
    """The state of a chat that its commands read and change."""

    model: ChatModel
    conversation: Conversation
    given: dict[str, object]
    is_verbose: bool
    is_over: bool

    def begin(self) -> None:
        """Start the conversation anew with the model and the parameters as they are now."""

    def apply_parameters(self) -> None:
        """Let the parameters as they are now hold for the next answers; raises InvalidRequest for wrong ones."""


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A row. `words` are what may follow, for the help and for Tab."""

    name: str
    usage: str
    help: str
    function: Callable[[Session, str], None]
    words: tuple[str, ...] = ()


def run_command(session: Session, line: str) -> None:
    """Do what a line that begins with `/` says; raises MlxrError for what cannot be done."""
    name, _, rest = line.partition(" ")
    command = BY_NAME.get(name)
    if command is None:
        raise InvalidRequest(name[:40], "is no command; /? lists all; a line that begins with a space is a question")
    command.function(session, rest.strip())


def complete(line: str) -> list[str]:
    """The lines that Tab may make of the beginning of one."""
    name, space, rest = line.partition(" ")
    if not space:
        return sorted(known for known in BY_NAME if known.startswith(name))
    command = BY_NAME.get(name)
    if command is None:
        return []
    if command.name == "/load":
        return [f"{name} {model}" for model in complete_models(rest)]
    first, space, last = rest.partition(" ")
    if command.name == "/set" and space and first == "parameter":
        return [f"/set parameter {row.name}" for row in PARAMETERS if row.name.startswith(last)]
    return [f"{name} {word}" for word in command.words if word.startswith(rest)]


def _end(session: Session, _: str) -> None:
    session.is_over = True


def _reset(session: Session, _: str) -> None:
    session.conversation.reset()
    print_note("the conversation starts anew")


def _help(_: Session, words: str) -> None:
    if words == "shortcuts":
        rows = list(SHORTCUTS)
    else:
        name = f"/{words.lstrip('/')}"
        chosen = [row for row in COMMANDS if not words or row.name == name]
        rows = [(f"{row.name} {row.usage}".strip(), row.help) for row in chosen or COMMANDS]
        if words in ("set", "/set"):
            rows += [("  /set " + usage, text) for usage, text in SETTINGS_HELP]
    width = max(len(left) for left, _ in rows)
    for left, right in rows:
        print_note(f"{left.ljust(width)}  {right}")


def _load(session: Session, name: str) -> None:
    if not name:
        raise InvalidRequest("/load", "needs the name of a model")
    session.model.load(name)
    session.begin()
    print_note(f"{session.model.title} is loaded; the conversation starts anew")


def _save(session: Session, words: str) -> None:
    name = words.removesuffix("--force").rstrip()
    if not name:
        raise InvalidRequest("/save", "needs a name")
    parameters = {BY_SPELLING[key].list_names("ollama")[-1]: value for key, value in session.given.items()}
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
    conversation, replaces = session.conversation, name != words
    session.model.save(name, conversation.system, listed, conversation.messages, replaces=replaces)
    print_note(f"saved as {name}")


def _show(session: Session, what: str) -> None:
    card = session.model.describe()
    conversation = session.conversation
    texts = {
        "license": card.license or "the model states no license",
        "modelfile": card.modelfile,
        "system": conversation.system or card.system or "there is no system message",
        "template": card.template,
    }
    if what in texts:
        print(texts[what])
    elif what == "parameters":
        values = {row.list_names("ollama")[-1]: getattr(conversation.sampling, row.name) for row in PARAMETERS}
        print_fields([(name, _describe_value(value)) for name, value in values.items()])
    elif what in ("", "info"):
        print_fields([("model", session.model.title), *card.info.items()])
    else:
        raise InvalidRequest("/show", f"shows {', '.join(SHOWN)}; got {what[:40]}")


def _describe_value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    return "not set" if value is None else str(value)


def _set(session: Session, words: str) -> None:
    what, _, rest = words.partition(" ")
    function = _SETTERS.get(what)
    if function is None:
        raise InvalidRequest("/set", f"sets {', '.join(_SETTERS)}; got {what[:40]!r}")
    function(session, rest.strip())


def _set_parameter(session: Session, words: str) -> None:
    if not words:
        _show(session, "parameters")
        return
    name, _, text = words.partition(" ")
    row = BY_SPELLING.get(name)
    if row is None or not text.strip():
        names = ", ".join(row.name for row in PARAMETERS)
        raise InvalidRequest("/set parameter", f"takes a name and a value; names are {names}")
    value = _read_value(row, text.strip())
    before = dict(session.given)
    session.given[row.name] = value
    try:
        session.apply_parameters()
    except InvalidRequest:
        session.given.clear()
        session.given.update(before)
        raise
    print_note(f"{row.name} is {_describe_value(getattr(session.conversation.sampling, row.name))}")


def _read_value(row: Parameter, text: str) -> object:
    try:
        if row.kind == "texts":
            return tuple(shlex.split(text))
        return float(text) if row.kind == "float" else int(text)
    except ValueError:
        wanted = "texts, each in quotes" if row.kind == "texts" else "a number"
        raise InvalidRequest(row.name, f"must be {wanted}, got {text[:40]!r}") from None


def _set_system(session: Session, text: str) -> None:
    if not text:
        raise InvalidRequest("/set system", "needs the text of the message")
    session.conversation.system = text
    print_note("the system message is set")


def _set_format(session: Session, text: str) -> None:
    if text != "json":
        raise InvalidRequest("/set format", f"knows json alone, got {text[:40]!r}")
    session.conversation.grammar = Grammar("json_object")
    print_note("answers are JSON objects")


def _unset_format(session: Session, _: str) -> None:
    session.conversation.grammar = None
    print_note("answers are free text")


def _set_history(keeps: bool) -> Callable[[Session, str], None]:
    def set_it(session: Session, _: str) -> None:
        session.conversation.keeps_history = keeps
        print_note("turns are remembered" if keeps else "each question is answered by itself")

    return set_it


def _set_verbose(is_verbose: bool) -> Callable[[Session, str], None]:
    def set_it(session: Session, _: str) -> None:
        session.is_verbose = is_verbose
        print_note("counts of tokens and times follow each answer" if is_verbose else "answers come alone")

    return set_it


def _set_think(session: Session, words: str) -> None:
    """Let the model think: as much as it likes, with an effort, or at most so many tokens."""
    if words.isascii() and words.isdigit():
        _set_parameter(session, f"thinking_budget {words}")
        words = ""
    elif words and words not in EFFORTS:
        raise InvalidRequest("/set think", f"takes tokens or one of {', '.join(EFFORTS)}, got {words[:40]!r}")
    session.conversation.think = words or True
    print_note(f"the model thinks before it answers{f', with the effort {words}' if words else ''}")


def _unset_think(session: Session, _: str) -> None:
    session.conversation.think = False
    print_note("the model answers without thinking")


_SETTERS: Mapping[str, Callable[[Session, str], None]] = {
    "parameter": _set_parameter,
    "system": _set_system,
    "format": _set_format,
    "noformat": _unset_format,
    "history": _set_history(True),
    "nohistory": _set_history(False),
    "verbose": _set_verbose(True),
    "quiet": _set_verbose(False),
    "think": _set_think,
    "nothink": _unset_think,
}
SETTINGS_HELP: Sequence[tuple[str, str]] = (
    ("parameter NAME VALUE", "how tokens are chosen, such as temperature 0.2; alone it shows the values in use"),
    ("system TEXT", "the system message"),
    ("format json, noformat", "answers that are JSON objects, or any text"),
    ("history, nohistory", "remember the turns, or answer each question by itself"),
    ("verbose, quiet", "print counts and times after each answer, or not"),
    ("think, nothink", "let the model reason first, or not; think low: with an effort, think 500: so many tokens"),
)
SHOWN = ("info", "license", "modelfile", "parameters", "system", "template")
COMMANDS: tuple[ChatCommand, ...] = (
    ChatCommand("/set", "WHAT VALUE", "Set something for the next answers; /? set lists what.", _set, tuple(_SETTERS)),
    ChatCommand("/show", "WHAT", f"Show of the model: {', '.join(SHOWN)}.", _show, SHOWN),
    ChatCommand("/load", "MODEL", "Talk with another model.", _load),
    ChatCommand(
        "/save",
        "NAME",
        "Save model, parameters, system message and conversation as a model; --force replaces one.",
        _save,
    ),
    ChatCommand("/clear", "", "Forget the conversation; /reset does the same.", _reset),
    ChatCommand("/bye", "", "End; /exit and Ctrl-D do the same.", _end),
    ChatCommand("/?", "[COMMAND]", "Explain the commands, or with `shortcuts` the keys.", _help, ("shortcuts",)),
)
_SPELLINGS = {"/reset": "/clear", "/exit": "/bye", "/help": "/?"}
BY_NAME: Mapping[str, ChatCommand] = {row.name: row for row in COMMANDS} | {
    other: row for other, name in _SPELLINGS.items() for row in COMMANDS if row.name == name
}
