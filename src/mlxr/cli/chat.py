"""`mlxr chat`: a conversation on the terminal, or through a pipe."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Annotated

import typer

from mlxr.cli.chat_commands import complete, run_command
from mlxr.cli.chat_input import read_lines
from mlxr.cli.chat_model import ChatModel
from mlxr.cli.completion import complete_models
from mlxr.cli.conversation import Conversation
from mlxr.cli.flags import Sampling, System, make_sampling
from mlxr.cli.remote import AnswerStream, Url
from mlxr.cli.terminal import print_note, write_piece, write_thought
from mlxr.core.errors import MlxrError
from mlxr.core.events import Finish, ReasoningDelta, TextDelta
from mlxr.core.settings import Settings
from mlxr.core.types import FinishReason

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
    url: Url = None,
) -> None:
    """Talk with a model. Lines come from the terminal or a pipe; /? lists the commands."""
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
        self._is_interactive = is_interactive
        self.conversation = self._make_conversation(system)

    def begin(self) -> None:
        """Start the conversation anew with the model and the parameters as they are now."""
        self.conversation = self._make_conversation(None)

    def apply_parameters(self) -> None:
        """Let the parameters as they are now hold for the next answers; raises InvalidRequest for wrong ones."""
        self.conversation.sampling = make_sampling(self.model.parameters, self.given)

    def run(self) -> None:
        """Read lines until the end of the input or /bye."""
        for line in read_lines(is_interactive=self._is_interactive, complete=complete):
            if line.startswith("/"):
                self._guard(partial(run_command, self, line.strip()), ends_pipe=False)
            elif line.strip():
                self._guard(partial(self._answer, line.strip()), ends_pipe=True)
            if self.is_over:
                return

    def _guard(self, work: Callable[[], None], *, ends_pipe: bool) -> None:
        """Do something. What fails is said and forgotten; in a pipe, a question that fails ends the command."""
        try:
            work()
        except MlxrError as error:
            if ends_pipe and not self._is_interactive:
                raise
            print_note(f"mlxr: {error}")

    def _answer(self, question: str) -> None:
        start_s = time.perf_counter()
        finish = self.conversation.ask(question, show_answer)
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
