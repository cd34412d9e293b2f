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

from mlxr.cli.chat_input import read_lines
from mlxr.cli.completion import complete_models
from mlxr.cli.conversation import Conversation
from mlxr.cli.flags import System
from mlxr.cli.remote import DEFAULT_MODEL, Answerer, AnswerStream, Url, open_model
from mlxr.cli.terminal import print_note, write_piece, write_thought
from mlxr.core.errors import MlxrError
from mlxr.core.events import Finish, ReasoningDelta, TextDelta
from mlxr.core.settings import Settings
from mlxr.core.types import FinishReason, SamplingParams

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a Hugging Face folder, or a name; the server's with --url.",
        autocompletion=complete_models,
    ),
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
    with open_model(model, settings, url, needs_chat_template=True) as answerer:
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            print_note(f"{model or url or DEFAULT_MODEL}: {HELP}")
        Chat(answerer, sampling, system, is_interactive=is_interactive).run()


class Chat:
    """Lines in, answers out, until the end of the input or /exit."""

    def __init__(
        self, answerer: Answerer, sampling: SamplingParams, system: str | None, *, is_interactive: bool
    ) -> None:
        self._is_interactive = is_interactive
        self._conversation = Conversation(answerer, sampling, system)

    def run(self) -> None:
        """Read lines until the end of the input or /exit."""
        for line in read_lines(is_interactive=self._is_interactive):
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self._conversation.reset()
                print_note("the conversation starts anew")
            elif text == "/help":
                print_note(HELP)
            elif text.startswith("/") and " " not in text:
                print_note(f"{text}: no such command; {HELP}")
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """One turn. What cannot be answered is said and forgotten on a terminal, and ends the command in a pipe."""
        try:
            self._conversation.ask(text, show_answer)
        except MlxrError as error:
            if not self._is_interactive:
                raise
            print_note(f"mlxr: {error}")


def show_answer(stream: AnswerStream) -> tuple[str, Finish]:
    """Print an answer as it grows; Ctrl-C ends it, and what was said so far counts.

    Returns the text without reasoning, and how the answer ended. Raises MlxrError when it failed.
    """
    pieces = []
    finish: Finish | None = None
    with stop_on_interrupt(stream):
        for event in stream:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
                write_piece(event.text)
            elif isinstance(event, ReasoningDelta):
                write_thought(event.text)
            elif isinstance(event, Finish):
                write_piece("\n")
                finish = event
    if finish is None or finish.reason is FinishReason.ERROR:
        raise MlxrError((finish and finish.error) or "the answer failed")
    return "".join(pieces), finish


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
