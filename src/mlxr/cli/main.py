"""The `mlxr` command: finds the row, imports that command only, and turns errors into one line and an exit code.

A command is a function and a row of `COMMANDS`. Exit codes: 0 done, 1 a check failed, 2 a request that cannot be met
(one line on stderr), 130 interrupted, 141 the reader of our output went away. A warning that the engine logs is one
line on stderr, without traceback: the error that ends the command tells the cause.
"""

from __future__ import annotations

import builtins
import gc
import io
import keyword
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated

import typer

import mlxr
from mlxr.cli.terminal import make_printable
from mlxr.core.errors import MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.processes import end_on_interrupt

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
COMPLETION_VARIABLE = "_MLXR_COMPLETE"  # set by the scripts that `--install-completion` writes
WORDS = (  # typer's messages, and ours
    (r"^Invalid value for '?([^']*)'?: ", r"\1: "),
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Input should be a valid boolean.*", "must be true or false"),
    (r"Input should be (greater|less) than or equal to (\S+)", r"must be \2 or \1"),
    (r"Input should be", "must be"),
    (r"^([A-Z]+): Value error, ", r"\1: "),
    (r"\.?\s*Choose from:\s*", "; it is one of "),
    (r",\s+", ", "),
)
COLLECT_EVERY = 10_000  # new objects, while a command runs; at Python's default of 700, later imports are slow as well


@frozen
class CommandRow:
    """A command, and the place of its function."""

    name: str
    module: str  # holds a function of that name, with `_` behind it if Python uses the name
    help: str  # its line in `mlxr --help`

    @property
    def function(self) -> str:
        """The name of the function that runs the command, with `_` behind it if Python uses the name."""
        name = self.name.replace("-", "_")
        return f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else name


GROUPS: Mapping[str, tuple[CommandRow, ...]] = {
    "Use a model": (
        CommandRow("run", "mlxr.cli.run", "Answer one prompt."),
        CommandRow("chat", "mlxr.cli.chat", "Talk with a model."),
        CommandRow("embed", "mlxr.cli.retrieval", "Print a vector of length 1 for each text."),
        CommandRow("rerank", "mlxr.cli.retrieval", "Rank documents by how well they answer a query."),
        CommandRow("find", "mlxr.cli.retrieval", "Search the files of a folder by meaning."),
    ),
    "Models": (
        CommandRow("list", "mlxr.cli.models", "List the models here."),
        CommandRow("search", "mlxr.cli.pull", "Find a model, and whether it fits this machine."),
        CommandRow("pull", "mlxr.cli.pull", "Fetch a model from Hugging Face."),
        CommandRow("import", "mlxr.cli.models", "Give a model on disk a name."),
        CommandRow("create", "mlxr.cli.models", "Make a model from another one with a Modelfile."),
        CommandRow("show", "mlxr.cli.show", "Show what a model holds."),
        CommandRow("cp", "mlxr.cli.models", "Give a model a second name."),
        CommandRow("rm", "mlxr.cli.models", "Remove models."),
        CommandRow("adapters", "mlxr.cli.models", "List the adapters (LoRA) here, add or remove one."),
        CommandRow("convert", "mlxr.cli.convert", "Write a model as a GGUF file of a given type."),
        CommandRow("imatrix", "mlxr.cli.validate", "Collect which columns of its weights a model uses."),
        CommandRow("merge", "mlxr.cli.convert", "Write a model with an adapter added to its weights."),
    ),
    "Server": (
        CommandRow("serve", "mlxr.cli.serve", "Answer OpenAI, Ollama and Anthropic clients over HTTP."),
        CommandRow("ps", "mlxr.cli.remote", "Show the models that a server has loaded."),
        CommandRow("stop", "mlxr.cli.remote", "Unload a model from a server."),
        CommandRow("top", "mlxr.cli.top", "Show live what a server does."),
        CommandRow("service", "mlxr.cli.service", "Run the server as a service of yours, also after a restart."),
        CommandRow("connect", "mlxr.cli.connect", "Show how coding agents and editors use this server."),
        CommandRow("cluster", "mlxr.cli.cluster", "Serve a model from several engines behind one address."),
    ),
    "Measure and check": (
        CommandRow("bench", "mlxr.cli.bench", "Measure prefill and decode speed."),
        CommandRow("perplexity", "mlxr.cli.validate", "Measure how well a model predicts a text."),
        CommandRow("profile", "mlxr.cli.bench", "Show where the time of a model's steps goes, kernel by kernel."),
        CommandRow("validate", "mlxr.cli.validate", "Prove which kernels run and that their results are right."),
        CommandRow("kernels", "mlxr.cli.bench", "Print the source of the GPU kernels."),
    ),
    "mlxr itself": (
        CommandRow("doctor", "mlxr.cli.doctor", "Look at processor, memory, GPU, disk, port, hub and models."),
        CommandRow("check-gpu", "mlxr.cli.doctor", "Check a GPU's kernels and speeds, and write a report."),
        CommandRow("settings", "mlxr.cli.flags", "Show every setting and where its value came from."),
        CommandRow("help", "mlxr.cli.main", "Explain a command."),
        CommandRow("version", "mlxr.cli.main", "Print the version of mlxr."),
    ),
}
COMMANDS: tuple[CommandRow, ...] = tuple(row for rows in GROUPS.values() for row in rows)
EXAMPLES: Sequence[tuple[str, str]] = (
    ('mlxr run demo "import os"', "one answer, of the model that comes with mlxr"),
    ("mlxr search qwen3", "models by short names, and which fit"),
    ("mlxr pull llama3.2:1b", "fetch one; `mlxr chat llama3.2:1b` talks with it"),
    ("mlxr serve --open", "a page, and an API for other programs"),
    ("mlxr connect claude-code", "how a coding agent uses the server"),
)
EXAMPLE_OF: Mapping[str, str] = {  # below the help of a command
    "run": 'cat notes.txt | mlxr run llama3.2:1b "Summarise this"',
    "chat": 'mlxr chat llama3.2:1b --system "You are brief."',
    "serve": "mlxr serve llama3.2:1b --port 8080 --open",
    "search": "mlxr search qwen3",
    "pull": "mlxr pull llama3.2:1b",
    "import": "mlxr import model.gguf coder",
    "create": "mlxr create helper -f Modelfile",
    "convert": "mlxr convert f16.gguf small.gguf --type q4_k_m",
    "imatrix": "mlxr imatrix f16.gguf text.txt imatrix.gguf",
    "connect": "mlxr connect claude-code",
    "embed": 'mlxr embed model.gguf "a text"',
    "rerank": 'mlxr rerank model.gguf "a question" *.txt',
    "bench": "mlxr bench demo --prompt-tokens 64 --generate-tokens 16",
    "ps": "mlxr ps --port 8080",
    "top": "mlxr top --port 8080",
    "service": "mlxr service install -- llama3.2:1b",
    "stop": "mlxr stop llama3.2:1b",
}
ALL_FLAGS = "--help-all"  # stands for --help with the flags that few people need


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETION_VARIABLE in os.environ:
        given = read_completed_words(os.environ)
    _prepare_streams()
    try:
        with _show_warnings(), _collect_seldom():
            if COMPLETION_VARIABLE not in os.environ and given in ([], ["--help"], ["-h"], [ALL_FLAGS]):
                result = _print_help()
            else:
                with end_on_interrupt(), _collect_nothing():
                    app = build_app(given)
                words = ["--help" if word == ALL_FLAGS else word for word in given]
                result = app(args=words, prog_name="mlxr", standalone_mode=False)
        sys.stdout.flush()
    except MlxrError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as end:  # typer ends by SystemExit for a broken pipe, and after completion
        if isinstance(end, SystemExit) and (end.code in (0, None) or COMPLETION_VARIABLE in os.environ):
            return int(end.code or 0)
        _give_up_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        message = _usage_message(error, given) or _system_message(error)
        if message is None:
            raise
        return _complain(message)
    return result if isinstance(result, int) else 0


def read_completed_words(environment: Mapping[str, str]) -> list[str]:
    """Return the arguments that a shell wants completed: bash gives all words, other shells the line."""
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS", "")
    return line.split()[1:]


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the typer application for these arguments: the command that they name, and help lines of the others."""
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    app = typer.Typer(
        name="mlxr",
        help="Run language models on the machine you have.",
        add_completion=True,
        rich_markup_mode=None if named is None else "rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_root)
    for row in COMMANDS:
        if row.name != named:
            app.command(row.name, help=row.help)(lambda: None)
            continue
        from mlxr.cli.flags import PlainHelp, count_hidden, expand_flags

        shows_all = ALL_FLAGS in arguments or COMPLETION_VARIABLE in os.environ
        function = expand_flags(getattr(import_module(row.module), row.function), shows_all=shows_all)
        count = count_hidden(function)
        notes = [f"Example: `{EXAMPLE_OF[named]}`"] if named in EXAMPLE_OF else []
        notes += [f"{ALL_FLAGS} shows {count} more flags."] if count else []
        app.command(row.name, cls=PlainHelp, epilog="\n\n".join(notes) or None)(function)
    return app


def _print_help() -> int:
    """Print the list of all commands, as plain text: importing rich would take longer than everything else."""
    print("Usage: mlxr COMMAND [ARGUMENTS]\n\nRun language models on the machine you have.")
    for title, rows in GROUPS.items():
        print(f"\n{title}:")
        for row in rows:
            print(f"  {row.name:10}  {row.help}")
    print("\nExamples:")
    for line, text in EXAMPLES:
        print(f"  {line:26}  {text}")
    print("\n`mlxr COMMAND --help` explains a command. mlxr alone takes --help, --version,")
    print("--install-completion and --show-completion.")
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _root(
    wants_version: Annotated[
        bool, typer.Option("--version", help="Print the version of mlxr.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Flags of `mlxr` itself."""


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def version(json: AsJson = False) -> None:
    """Print the version of mlxr."""
    print(f'{{"version": "{mlxr.__version__}"}}' if json else f"mlxr {mlxr.__version__}")


Command = Annotated[str | None, typer.Argument(metavar="COMMAND", help="The command; without one, all are listed.")]


def help_(command: Command = None) -> None:
    """Explain a command. `mlxr help run` prints what `mlxr run --help` does."""
    if command is None:
        _print_help()
        return
    arguments = [command, "--help"]
    build_app(arguments)(args=arguments, prog_name="mlxr", standalone_mode=False)


def _usage_message(error: Exception, given: Sequence[str]) -> str | None:
    """Return the line for a wrong command line, None for other errors. Typer's errors have a code and a format."""
    from mlxr.cli.flags import explain_flag

    format_message = getattr(error, "format_message", None)
    if format_message is None or getattr(error, "exit_code", None) is None:
        return None
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    flag, message = getattr(error, "option_name", None), str(format_message())
    if flag is not None and context is not None and message.startswith("No such option"):
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]
        return f"{explain_flag(flag, given, known, context.command_path)}{hint}"
    for theirs, ours in WORDS:
        message = re.sub(theirs, ours, message)
    return f"{message.rstrip('.')}{hint}"


def _system_message(error: Exception) -> str | None:
    """Return the line for an error of the operating system (a full disk, an absurd path), None for other errors."""
    if not isinstance(error, OSError):
        return None
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_output()
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{str(error.filename)[:200]}: {reason}"


def _give_up_output() -> None:
    """Redirect stdout to nowhere, as Python flushes it once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _prepare_streams() -> None:
    """Make stdin, stdout and stderr usable: closed ones become empty files, and every text can be encoded."""
    # In this order, so that each gets its own descriptor; a file opened later must not become stdout.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _OneLine(logging.Formatter):
    """Formats a record as one line without its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return _format_line(record.getMessage())


@contextmanager
def _show_warnings() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_OneLine())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@contextmanager
def _collect_seldom() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _collect_nothing() -> Iterator[None]:
    """Collect no garbage while modules are imported: nearly all that they make stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _format_line(message: str) -> str:
    return make_printable("mlxr: " + " ".join(message.splitlines()))


def _complain(message: str) -> int:
    print(_format_line(message), file=sys.stderr)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
