"""`mlxr chat`: a conversation on the terminal, or through a pipe."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from mlxr.cli.flags import System
from mlxr.cli.remote import DEFAULT_MODEL, Answerer, AnswerStream, Url, open_model
from mlxr.cli.terminal import print_note, write_piece, write_thought
from mlxr.core.errors import InvalidRequest, MlxrError, TemplateError
from mlxr.core.events import Finish, ReasoningDelta, TextDelta
from mlxr.core.settings import Settings
from mlxr.core.types import FinishReason, SamplingParams

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="A .gguf file, a Hugging Face folder, or a name; the server's with --url."),
]
HELP = "/exit ends, /reset forgets the conversation, /help shows this; Ctrl-C stops an answer"


def chat(
    settings: Settings,
    sampling: SamplingParams,
    model: Model = None,
    system: System = None,
    url: Url = None,
) -> None:
    """Talk with a model. Lines come from the terminal or a pipe; /help lists the commands."""
    with open_model(model, settings, url) as answerer:
        name = model or url or DEFAULT_MODEL
        if not answerer.can_chat:
            raise TemplateError(f"{name} has no chat template, so it cannot chat; `mlxr run --raw` continues text")
        interactive = sys.stdin.isatty()
        if interactive:
            print_note(f"{name}: {HELP}")
        Conversation(answerer, sampling, system, interactive).run()


class Conversation:
    """The messages so far, and what happens with the next line."""

    def __init__(self, answerer: Answerer, sampling: SamplingParams, system: str | None, interactive: bool) -> None:
        self._answerer = answerer
        self._sampling = sampling
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._interactive = interactive
        self.messages = list(self._opening)

    def run(self) -> None:
        """Read lines until the end of the input or /exit."""
        for line in read_lines("> " if self._interactive else ""):
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._opening)
                print_note("the conversation starts anew")
            elif text == "/help":
                print_note(HELP)
            elif text.startswith("/") and " " not in text:
                print_note(f"{text}: no such command; {HELP}")
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """One turn. What cannot be answered is said and forgotten on a terminal, and ends the command in a pipe."""
        turn = {"role": "user", "content": text}
        try:
            reply = self._stream([*self.messages, turn])
        except MlxrError as error:
            if not self._interactive:
                raise
            print_note(f"mlxr: {error}")
            return
        self.messages += [turn, {"role": "assistant", "content": reply}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it grows; Ctrl-C ends it, and what was said so far counts."""
        pieces = []
        with self._answerer.stream_chat(messages, self._sampling) as stream, stop_on_interrupt(stream):
            for event in stream:
                if isinstance(event, TextDelta):
                    pieces.append(event.text)
                    write_piece(event.text)
                elif isinstance(event, ReasoningDelta):
                    write_thought(event.text)
                elif isinstance(event, Finish):
                    write_piece("\n")
                    if event.reason is FinishReason.ERROR:
                        raise MlxrError(event.error or "the answer failed")
        return "".join(pieces)


def read_lines(prompt: str) -> Iterator[str]:
    """Lines of stdin until its end. On a terminal, with line editing; Ctrl-C there empties the line."""
    if not prompt:
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise InvalidRequest("stdin", f"is not UTF-8 ({error.reason})") from error
        return
    import readline  # noqa: F401 - importing it gives input() editing and history

    while True:
        try:
            yield input(prompt)
        except EOFError:
            write_piece("\n")
            return
        except KeyboardInterrupt:
            print_note("\n/exit or Ctrl-D ends")


@contextmanager
def stop_on_interrupt(stream: AnswerStream) -> Iterator[None]:
    """Let Ctrl-C cancel the answer between two steps instead of breaking into one."""
    if threading.current_thread() is not threading.main_thread():  # only there may signals be handled
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
