"""Reads what a chat is told: lines of a terminal or a pipe, as text; several lines as one between three quotes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from mlxr.cli.terminal import print_note, write_piece

PROMPT, MORE_PROMPT = "> ", "... "
QUOTES = '"""'
Complete = Callable[[str], list[str]]


def read_lines(*, is_interactive: bool, complete: Complete) -> Iterator[str]:
    """Lines of stdin until its end. A line that is not UTF-8 is left out, and a note says so.

    Where three quotes stand at the beginning of a line, or of the text of `/set system`, all up to the next three
    quotes is one line. `complete` gives what Tab may make of the beginning of a line.
    """
    source = _Terminal(complete) if is_interactive else _Pipe()
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
        """The next line that is text; None at the end."""
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

    def __init__(self, complete: Complete) -> None:
        import readline

        self._found: list[str] = []

        def choose(_: str, state: int) -> str | None:
            if state == 0:
                self._found = complete(readline.get_line_buffer())
            return self._found[state] if state < len(self._found) else None

        readline.set_completer_delims("\n")  # a whole line is completed
        readline.set_completer(choose)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read(self, prompt: str, *, is_more: bool = False) -> str | None:
        """The next line; None at the end. Ctrl-C empties the line, and gives up a text of several lines (`is_more`)."""
        while True:
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
