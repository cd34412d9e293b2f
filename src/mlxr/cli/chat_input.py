"""What a chat is told: lines of a terminal or a pipe, as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from mlxr.cli.terminal import print_note, write_piece

PROMPT = "> "


def read_lines(*, is_interactive: bool) -> Iterator[str]:
    """Lines of stdin until its end. A line that is not UTF-8 is left out, and a note says so."""
    return _read_terminal() if is_interactive else _read_pipe()


def _read_pipe() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            print_note(f"line {number} is not UTF-8 ({error.reason} at byte {error.start}); it was left out")


def _read_terminal() -> Iterator[str]:
    """Lines with editing and history; Ctrl-C at the prompt empties the line."""
    import readline  # noqa: F401 - importing it gives input() editing and history

    while True:
        try:
            line = input(PROMPT)
            line.encode()  # bytes that are not UTF-8 may arrive as lone surrogates
            yield line
        except UnicodeError:
            print_note("the line is not UTF-8; it was left out")
        except EOFError:
            write_piece("\n")
            return
        except KeyboardInterrupt:
            print_note("\n/exit or Ctrl-D ends")
