"""`mlxr chat`: a conversation on the terminal, or through a pipe."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Protocol

import typer

from mlxr.cli.chat_model import ChatModel, Conversation, Pictures, Turn
from mlxr.cli.flags import (
    Sampling,
    System,
    SystemFile,
    complete_models,
    make_sampling,
    read_number,
    read_system,
    read_text,
)
from mlxr.cli.remote import AnswerStream, Url
from mlxr.cli.terminal import (
    copy_text,
    format_table,
    make_renderer,
    print_fields,
    print_note,
    write_piece,
    write_thought,
)
from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.sampling import BY_SPELLING, Parameter
from mlxr.core.settings import Settings
from mlxr.core.types import PARAMETERS, Finish, FinishReason, Grammar, ReasoningDelta, TextDelta
from mlxr.service.reasoning import EFFORTS
from mlxr.service.sight import make_part, read_picture

PROMPT, MORE_PROMPT = "> ", "... "
_FILE = re.compile(r"""(?:["'](.+?)["']|(\S+))(.*)""", re.DOTALL)
QUOTES = '"""'
Complete = Callable[[str], list[str]]


def read_lines(*, is_interactive: bool, complete: Complete, draft: Callable[[], str]) -> Iterator[str]:
    """Yield the lines of stdin until its end. A line that is not UTF-8 is left out, with a note.

    Three quotes at the beginning of a line, or of the text of `/set system`, begin a text of several lines, up to the
    next three quotes. `complete` returns the completions of a line's beginning for Tab, `draft` the text that a new
    line begins with, for editing.
    """
    source = _Terminal(complete, draft) if is_interactive else _Pipe()
    while (line := source.read(PROMPT)) is not None:
        head, quotes, text = line.partition(QUOTES)
        if not quotes or head.strip() not in ("", "/set system"):
            yield line
            continue
        lines = [text]
        while not lines[-1].rstrip().endswith(QUOTES):
            more = source.read(MORE_PROMPT, is_more=True)
            if more is None:
                break
            lines.append(more.rstrip("\r\n"))
        else:
            yield head + "\n".join([text.rstrip("\r\n"), *lines[1:]]).rstrip().removesuffix(QUOTES)
            continue
        print_note("the text after three quotes has no end; it was left out")


class _Pipe:
    """Lines of a pipe or a file."""

    def __init__(self) -> None:
        self._number = 0

    def read(self, _prompt: str, *, is_more: bool = False) -> str | None:
        """Return the next line that is UTF-8; None at the end."""
        del is_more
        for line in sys.stdin.buffer:
            self._number += 1
            try:
                return line.decode()
            except UnicodeDecodeError as error:
                where = f"line {self._number} is not UTF-8 ({error.reason} at byte {error.start})"
                print_note(f"{where}; it was left out")
        return None


class _Terminal:
    """Lines that a person types, with editing, history and completion."""

    def __init__(self, complete: Complete, draft: Callable[[], str]) -> None:
        import readline

        self._found: list[str] = []
        self._draft = draft
        self._readline = readline

        def choose(_: str, state: int) -> str | None:
            if state == 0:
                self._found = complete(readline.get_line_buffer())
            return self._found[state] if state < len(self._found) else None

        readline.set_completer_delims("\n")  # Tab completes the whole line
        readline.set_completer(choose)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read(self, prompt: str, *, is_more: bool = False) -> str | None:
        """Return the next line; None at the end. Ctrl-C empties the line, or gives up a text of several lines
        (`is_more`).
        """
        while True:
            text = "" if is_more else self._draft()
            self._readline.set_startup_hook(partial(self._readline.insert_text, text) if text else None)
            try:
                line = input(prompt)
                line.encode()  # bytes that are not UTF-8 may arrive as lone surrogates
                return line
            except UnicodeError:
                print_note("the line is not UTF-8; it was left out")
            except EOFError:
                write_piece("\n")
                return None
            except KeyboardInterrupt:
                print_note("\n/bye or Ctrl-D ends")
                if is_more:
                    return None


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
    renders: bool  # Markdown, if stdout is a terminal
    draft: str  # the text that the next line begins with
    files: list[str]  # texts for the next question
    pictures: list[Mapping[str, object]]  # for the next question, too

    def answer(self, question: str, pictures: Pictures = ()) -> None:
        """Ask the model, with `pictures` and those that wait for the next question, and show its answer.

        Raises MlxrError.
        """

    def begin(self) -> None:
        """Start the conversation anew with the current model and parameters."""

    def apply_parameters(self) -> None:
        """Use the current parameters for the next answers; raises InvalidRequest for wrong ones."""


@frozen
class ChatCommand:
    """A command of the chat. `words` are those that may follow it, for the help and for Tab."""

    name: str
    usage: str
    help: str
    function: Callable[[Session, str], None]
    words: tuple[str, ...] = ()


def run_command(session: Session, line: str) -> None:
    """Run the command of a line that begins with `/`; raises MlxrError if that fails."""
    name, _, rest = line.partition(" ")
    command = BY_NAME.get(name)
    if command is None:
        raise InvalidRequest(name[:40], "is no command; /? lists all; a line that begins with a space is a question")
    command.function(session, rest.strip())


def complete(line: str) -> list[str]:
    """Return the lines to which Tab may complete a line's beginning."""
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
    session.pictures.clear()
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
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print_note("\n".join(format_table(("", ""), rows, width)))


def _take_turn(session: Session, command: str) -> Turn:
    if not session.conversation.turns:
        raise InvalidRequest(command, "there is no question to take back")
    return session.conversation.turns.pop()


def _undo(session: Session, _: str) -> None:
    print_note(f"taken back: {' '.join(_take_turn(session, '/undo').question.split())[:60]}")


def _answer_anew(session: Session, turn: Turn, question: str) -> None:
    """Ask in place of a turn that was removed; the turn comes back if the question fails."""
    turns = list(session.conversation.turns)
    try:
        session.answer(question, turn.pictures)
    except MlxrError:
        session.conversation.turns = [*turns, turn]
        raise


def _retry(session: Session, _: str) -> None:
    sampling = session.conversation.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        print_note("(temperature 0 or a seed gives the same answer again)")
    turn = _take_turn(session, "/retry")
    _answer_anew(session, turn, turn.question)


def _edit(session: Session, text: str) -> None:
    turn = _take_turn(session, "/edit")
    if text:
        _answer_anew(session, turn, text)
    elif "\n" in turn.question:
        session.conversation.turns.append(turn)
        raise InvalidRequest("/edit", "takes the new text, as the question has several lines")
    else:
        session.draft, session.pictures[:0] = turn.question, turn.pictures


def _copy(session: Session, _: str) -> None:
    turns = session.conversation.turns
    if not turns:
        raise InvalidRequest("/copy", "there is no answer to copy")
    place = copy_text(turns[-1].answer)
    if place is None:
        raise MlxrError("/copy: this system has no program for its clipboard, such as wl-copy or xclip")
    print_note(f"the answer went to {place}")


def _read(session: Session, words: str) -> None:
    path, question = _split_file("/read", words)
    session.files.append(f"{path}:\n{read_text(Path(path), '/read')}")
    _go_on(session, path, question)


def _add_picture(session: Session, words: str) -> None:
    path, question = _split_file("/image", words)
    blind = session.model.answerer.blind
    if blind:
        raise InvalidRequest("/image", f"{session.model.title} reads text only: {blind}")
    session.pictures.append(make_part(read_picture(path, "/image"), field=f"/image {path[:200]}"))
    _go_on(session, path, question)


def _split_file(command: str, words: str) -> tuple[str, str]:
    """Return the file that a command names, and the question behind it; raises InvalidRequest if it names none."""
    match = _FILE.match(words)
    if match is None:
        raise InvalidRequest(command, "needs a file, in quotes where its name has spaces, and perhaps a question")
    return match[1] or match[2], match[3].strip()


def _go_on(session: Session, path: str, question: str) -> None:
    """Ask the question that followed a file, or say that the file waits for one."""
    if question:
        session.answer(question)
    else:
        print_note(f"{path} goes with the next question")


def _system(session: Session, text: str) -> None:
    if text:
        _set_system(session, text)
    else:
        _show(session, "system")


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
    if any(turn.pictures for turn in conversation.turns):
        print_note("(pictures are not saved; the model will have the text alone)")
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
    if what in BY_SPELLING:  # the word `parameter` may be left out
        _set_parameter(session, words)
        return
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
    if row.kind != "texts":
        return read_number(row, text, row.name)
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise InvalidRequest(row.name, f"must be texts, each in quotes, got {text[:40]!r}") from None


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


def _set_markdown(renders: bool) -> Callable[[Session, str], None]:
    def set_it(session: Session, _: str) -> None:
        session.renders = renders
        print_note("answers are shown as Markdown" if renders else "answers are shown as the model writes them")

    return set_it


def _set_think(session: Session, words: str) -> None:
    """Let the model think: without limit, with an effort, or for at most a number of tokens."""
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
    "markdown": _set_markdown(True),
    "nomarkdown": _set_markdown(False),
    "think": _set_think,
    "nothink": _unset_think,
}
SETTINGS_HELP: Sequence[tuple[str, str]] = (
    ("parameter NAME VALUE", "how tokens are chosen, such as temperature 0.2; alone it shows the values in use"),
    ("system TEXT", "the system message"),
    ("format json, noformat", "answers that are JSON objects, or any text"),
    ("history, nohistory", "remember the turns, or answer each question by itself"),
    ("verbose, quiet", "print counts and times after each answer, or not"),
    ("markdown, nomarkdown", "show Markdown as it is meant, on a terminal, or as it is written"),
    ("think, nothink", "let the model reason first, or not; think low: with an effort, think 500: so many tokens"),
)
SHOWN = ("info", "license", "modelfile", "parameters", "system", "template")
COMMANDS: tuple[ChatCommand, ...] = (
    ChatCommand("/set", "WHAT VALUE", "Set something for the next answers; /? set lists what.", _set, tuple(_SETTERS)),
    ChatCommand("/show", "WHAT", f"Show of the model: {', '.join(SHOWN)}.", _show, SHOWN),
    ChatCommand("/system", "[TEXT]", "Set the system message, or show it.", _system),
    ChatCommand("/undo", "", "Take the last question and its answer back.", _undo),
    ChatCommand("/retry", "", "Answer the last question again.", _retry),
    ChatCommand("/edit", "[TEXT]", "Change the last question: by TEXT, or on the next line.", _edit),
    ChatCommand("/copy", "", "Copy the last answer to the clipboard.", _copy),
    ChatCommand("/read", "FILE [QUESTION]", "Add the text of a file to the question, or to the next one.", _read),
    ChatCommand("/image", "FILE [QUESTION]", "Show a picture with the question, or with the next one.", _add_picture),
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


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a Hugging Face folder, or a name; with --url a name that the server knows.",
        autocompletion=complete_models,
    ),
]
HELP = "/? lists the commands, /bye ends; Ctrl-C stops an answer"


def chat(
    settings: Settings,
    sampling: Sampling,
    model: Model = None,
    system: System = None,
    system_file: SystemFile = None,
    url: Url = None,
) -> None:
    """Talk with a model. Lines come from the terminal or a pipe; /? lists the commands."""
    system = read_system(system, system_file)
    with ChatModel(model, settings, url) as opened:
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            print_note(f"{opened.title}: {HELP}")
        Chat(opened, sampling, system, is_interactive=is_interactive).run()


class Chat:
    """Lines in, answers out, until the end of the input or /bye."""

    def __init__(
        self, model: ChatModel, given: Mapping[str, object], system: str | None, *, is_interactive: bool
    ) -> None:
        self.model = model
        self.given = dict(given)
        self.is_verbose = self.is_over = False
        self.renders, self.draft = True, ""
        self.files: list[str] = []
        self.pictures: list[Mapping[str, object]] = []
        self._is_interactive = is_interactive
        self.conversation = self._make_conversation(system)

    def begin(self) -> None:
        """Start the conversation anew with the current model and parameters."""
        self.conversation = self._make_conversation(None)
        self.pictures.clear()

    def apply_parameters(self) -> None:
        """Use the current parameters for the next answers; raises InvalidRequest for wrong ones."""
        self.conversation.sampling = make_sampling(self.model.parameters, self.given)

    def run(self) -> None:
        """Read lines until the end of the input or /bye."""
        for line in read_lines(is_interactive=self._is_interactive, complete=complete, draft=self._take_draft):
            if line.startswith("/"):
                self._guard(partial(run_command, self, line.strip()), ends_pipe=False)
            elif line.strip():
                self._guard(partial(self.answer, line.strip()), ends_pipe=True)
            if self.is_over:
                return

    def _guard(self, work: Callable[[], None], *, ends_pipe: bool) -> None:
        """Run `work` and print its error, if it fails; in a pipe, a question that fails ends the command."""
        try:
            work()
        except MlxrError as error:
            if ends_pipe and not self._is_interactive:
                raise
            print_note(f"mlxr: {error}")

    def _take_draft(self) -> str:
        draft, self.draft = self.draft, ""
        return draft

    def answer(self, question: str, pictures: Pictures = ()) -> None:
        """Ask the model, with the files and pictures that wait for the question, and show its answer.

        Raises MlxrError; then the waiting pictures are dropped, as one of them may be the reason.
        """
        start_s = time.perf_counter()
        whole = "\n\n".join([question, *self.files])
        shown, waited = [*pictures, *self.pictures], len(self.pictures)
        self.pictures.clear()
        try:
            finish = self.conversation.ask(whole, partial(show_answer, renders=self.renders), shown)
        except MlxrError:
            if waited:
                print_note("(the picture is left out from now on; /image adds it again)")
            raise
        self.files.clear()
        if self.is_verbose:
            seconds = time.perf_counter() - start_s
            tokens, thought_tokens = finish.usage.completion_tokens, finish.usage.reasoning_tokens
            thoughts = f" ({thought_tokens} of them thoughts)" if thought_tokens else ""
            print_note(
                f"{finish.usage.prompt_tokens} prompt tokens ({finish.usage.cached_tokens} of them cached), {tokens} "
                f"tokens{thoughts} in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s; ended by {finish.reason.value}"
            )

    def _make_conversation(self, system: str | None) -> Conversation:
        sampling = make_sampling(self.model.parameters, self.given)
        return Conversation(self.model.answerer, sampling, system, self.model.messages)


def show_answer(stream: AnswerStream, *, renders: bool = True) -> tuple[str, Finish]:
    """Print an answer as it grows; Ctrl-C ends it, and the text so far counts.

    Returns the text without reasoning, and the end of the answer. Raises MlxrError if it failed.
    """
    pieces = []
    finish: Finish | None = None
    renderer = make_renderer() if renders else None
    with stop_on_interrupt(stream):
        for event in stream:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
                write_piece(event.text if renderer is None else renderer.push(event.text))
            elif isinstance(event, ReasoningDelta):
                write_thought(event.text)
            elif isinstance(event, Finish):
                write_piece("\n" if renderer is None else renderer.push("", is_last=True) + "\n")
                finish = event
    if finish is None or finish.reason is FinishReason.ERROR:
        raise MlxrError((finish and finish.error) or "the answer failed")
    return "".join(pieces), finish


@contextmanager
def stop_on_interrupt(stream: AnswerStream) -> Iterator[None]:
    """Let Ctrl-C cancel the answer between two steps instead of breaking into one."""
    if threading.current_thread() is not threading.main_thread():  # only that thread can handle signals
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        stream.cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
