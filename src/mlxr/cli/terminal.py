"""Output of commands: JSON, tables, sizes, progress, Markdown. Results go to stdout, notes and progress to stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from unicodedata import combining, east_asian_width

Progress = Callable[[int, int], None]
NARROWEST = 12  # characters of a column that is wrapped
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: object) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_fields(rows: Iterable[tuple[str, str]], title: str | None = None) -> None:
    """Print names and values in two columns."""
    print_table(("", ""), rows, title)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print rows in columns, with headings if there are any; a heading that begins with a space aligns right.

    On a terminal that is too narrow, the widest cells are wrapped between words.
    """
    if title is not None:
        print(f"{title}:")
    for line in format_table(columns, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        print(line)


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]], room: int | None = None) -> list[str]:
    """Return the lines of a table, at most `room` characters wide if its words allow."""
    lines = [[heading.strip() for heading in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    if room is not None:
        widths = _narrow(widths, columns, room)
    made = []
    for line in lines if any(columns) else lines[1:]:
        wrapped = [
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) if len(cell) > width else [cell]
            for cell, width in zip(line, widths, strict=True)
        ]
        for parts in zip_longest(*wrapped, fillvalue=""):
            cells = [
                cell.rjust(width) if heading.startswith(" ") else cell.ljust(width)
                for cell, width, heading in zip(parts, widths, columns, strict=True)
            ]
            made.append("  ".join(cells).rstrip())
    return made


def _narrow(widths: list[int], columns: Sequence[str], room: int) -> list[int]:
    """Return widths that fit into `room` characters; cuts the widest columns of text first, at most to NARROWEST."""
    texts = [index for index, heading in enumerate(columns) if not heading.startswith(" ")]
    while sum(widths) + 2 * (len(widths) - 1) > room:
        widest = max(texts, key=lambda index: widths[index])
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return widths


def print_note(text: str) -> None:
    """Print a remark on stderr."""
    print(text, file=sys.stderr, flush=True)


def write_piece(text: str) -> None:
    """Write a piece of an answer to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_thought(text: str) -> None:
    """Write a piece of a model's reasoning, dimmed, to a terminal; nothing goes into files and pipes."""
    if sys.stdout.isatty():
        write_piece(DIM + "\n".join(map(make_printable, text.split("\n"))) + PLAIN)


@contextmanager
def show_progress(title: str, *, counts_bytes: bool = False) -> Iterator[Progress | None]:
    """Show a progress bar on stderr that goes away when done; yields None if stderr is no terminal.

    Otherwise yields a function that takes (done, total), in bytes or pieces. With `counts_bytes` the bar also shows the
    bytes done, the total, and the speed.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    sizes = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if counts_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *sizes, TimeRemainingColumn())
    with change_keys(_hide_keys), Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def change_keys(change: Callable[[int], object]) -> Iterator[None]:
    """Set the terminal's treatment of keys by `change(descriptor)` while the block runs.

    Changes nothing if stdin is no terminal, or if this process is in the background, as that would stop it.
    """
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        is_ours = os.tcgetpgrp(descriptor) == os.getpgrp()
    except (ImportError, ValueError, OSError, termios.error):
        is_ours = False
    if not is_ours:
        yield
        return
    change(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _hide_keys(descriptor: int) -> None:
    """Hide typed keys, so that they are not written into the output; they wait for the next read."""
    import termios

    mode = termios.tcgetattr(descriptor)
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, mode)


def format_bytes(count: float) -> str:
    """Return a size in the largest unit that leaves at least 1 before the point."""
    for unit in _BYTE_UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_BYTE_UNITS[-1]}"


def format_count(count: int) -> str:
    """Return a number with separated thousands."""
    return f"{count:,}"


def make_printable(text: str) -> str:
    """Return `text` on one line, with control characters spelt out, so that they cannot control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


BOLD, ITALIC, CODE, DIM, PLAIN = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
MAX_WORD = 200  # characters that are shown at once
_MARKS = re.compile(r"`+|\*+|_|\\[\\`*_#]|[^`*_\\]+|.")
_HEADING, _BULLET, _QUOTE = re.compile(r"#{1,6} +"), re.compile(r"( *)[-*+] +(?=\S)"), re.compile(r"> ?")
_UNDECIDED = re.compile(r" *(#{0,6}|[-*_]+|[-*+] +|`{0,2}|~{0,2}|>)")
_RULE = re.compile(r" *(-{3,}|\*{3,}|_{3,}) *\n")


class Markdown:
    """Renders Markdown that comes in pieces for a terminal: styles replace marks, lines are wrapped between words.

    A subset: headings, bullets, quotes, rules, code, bold and italics; all else stays as it is written. Text that is
    not certain yet is held back, at most a word or the beginning of a line. Control characters are spelt out.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 20)
        self._held = ""
        self._column = self._hang = 0
        self._gap = ""
        self._line_style = ""  # of the whole line
        self._styles: list[str] = []  # that are open
        self._begins, self._is_code, self._wraps = True, False, True

    def push(self, text: str, *, is_last: bool = False) -> str:
        """Add a piece of the text; returns the text that can be shown now."""
        self._held += text.replace("\t", "    ").replace("\r", "")
        shown: list[str] = []
        while self._held and (self._begin(shown, is_last) if self._begins else self._go_on(shown, is_last)):
            pass
        if is_last and (self._styles or self._line_style):
            shown.append(PLAIN)
        return "".join(shown)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _begin(self, shown: list[str], is_last: bool) -> bool:
        """Show the beginning of a line, by the kind of line; returns False while the kind is open."""
        line, newline, _ = self._held.partition("\n")
        is_whole = bool(newline) or is_last
        if not is_whole and _UNDECIDED.fullmatch(line):
            return False
        if line.lstrip().startswith(("```", "~~~")):
            if is_whole:
                self._take(len(line) + 1)
                self._is_code = not self._is_code
            return is_whole
        self._begins = False
        self._wraps, self._hang = not self._is_code and not line.startswith("|"), 0
        if self._is_code:
            return True
        if _RULE.fullmatch(line + newline):
            self._take(len(line))
            shown.append("─" * min(self._width, 40))
        elif (match := _HEADING.match(line)) is not None:
            self._take(match.end())
            self._line_style = BOLD
            shown.append(BOLD)
        elif (match := _BULLET.match(line)) is not None:
            self._take(match.end())
            self._hang = self._column = len(match[1]) + 2
            shown.append(f"{match[1]}• ")
        elif (match := _QUOTE.match(line)) is not None:
            self._take(match.end())
            self._hang = self._column = 2
            self._line_style = DIM
            shown.append(f"{DIM}│ ")
        return True

    def _go_on(self, shown: list[str], is_last: bool) -> bool:
        """Show one word, or the rest of a line of code; returns False while the end of the word has not come."""
        if self._is_code or self._held[0] == "\n":
            line, newline, _ = self._held.partition("\n")
            self._take(len(line) + 1)
            shown.append(f"{CODE}{make_printable(line)}{PLAIN}" if line else "")
            if newline:
                shown.append(f"{PLAIN}\n" if self._styles or self._line_style else "\n")
                self._styles.clear()
                self._line_style = self._gap = ""
                self._column, self._begins = 0, True
            return True
        if self._held[0] == " ":
            self._gap += self._take(1)
            return True
        end = _find_end(self._held)
        if end is None and not is_last:
            return False
        word, cells = self._style(self._take(end or len(self._held)))
        if self._wraps and self._column > self._hang and self._column + len(self._gap) + cells > self._width:
            shown.append("\n" + ("│ " if self._line_style == DIM else " " * self._hang))
            self._column, self._gap = self._hang, ""
        shown.append(self._gap + word)
        self._column, self._gap = self._column + len(self._gap) + cells, ""
        return True

    def _style(self, word: str) -> tuple[str, int]:
        """Return a word with styles for its marks, and the number of cells that it takes."""
        parts, cells, before = [], 0, " "
        for match in _MARKS.finditer(word):
            mark, after = match[0], word[match.end() : match.end() + 1]
            style = {"`": CODE, "*": BOLD if len(mark) == 2 else ITALIC, "_": ITALIC}.get(mark[0], "")
            is_open = style in self._styles
            may_open = after not in ("", "_") and not before.isalnum() and (before, mark) != ("_", "_")
            may_close = mark[0] != "_" or not after.isalnum()
            is_mark = style == CODE or (len(mark) <= 2 and CODE not in self._styles)
            if style and is_mark and (may_close if is_open else may_open):
                self._styles.remove(style) if is_open else self._styles.append(style)
                parts.append(PLAIN + self._line_style + "".join(self._styles) if is_open else style)
            else:
                text = mark[1:] if mark[0] == "\\" and len(mark) == 2 and CODE not in self._styles else mark
                text = make_printable(text)
                parts.append(text)
                cells += sum(2 if _is_wide(char) else not combining(char) for char in text)
            before = mark[-1]
        return "".join(parts), cells


def _find_end(text: str) -> int | None:
    """Return the end of the first word in `text`; None if more of it may come. A wide letter is a word of its own."""
    for at, char in enumerate(text):
        if char in " \n" or at == MAX_WORD:
            return at
        if _is_wide(char):
            return max(at, 1)
    return None


def _is_wide(char: str) -> bool:
    return not char.isascii() and east_asian_width(char) in "WF"


def make_renderer() -> Markdown | None:
    """Return the renderer of answers for a terminal; None if stdout is none, since programs want plain answers."""
    return Markdown(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


CLIPBOARDS = (("pbcopy",), ("wl-copy",), ("xclip", "-selection", "clipboard"), ("clip.exe",))


def copy_text(text: str) -> str | None:
    """Put a text on the clipboard, by a program of the system or else by the terminal itself (OSC 52 of xterm).

    Returns the way that was used, None if there is neither.
    """
    import base64  # imported here, as they take milliseconds and `mlxr --help` needs neither
    import subprocess

    for command in CLIPBOARDS:
        if shutil.which(command[0]) is not None:
            done = subprocess.run(
                command, input=text.encode(), check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if done.returncode == 0:
                return "the clipboard"
    if not sys.stdout.isatty():
        return None
    write_piece(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
    return "the terminal, which puts it on the clipboard if it knows how"
