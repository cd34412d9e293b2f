"""The turns of a chat, and what of them a question takes along when the model's context is full.

Knows the model as an `Answerer`, on this machine or behind a server; not where lines come from and answers go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxr.cli.remote import Answerer, AnswerStream
from mlxr.cli.terminal import print_note
from mlxr.core.errors import ContextFull, OutOfPages
from mlxr.core.events import Finish
from mlxr.core.types import FinishReason, Grammar, SamplingParams

ANSWER_SHARE = 4  # a question leaves at least this part of the context to its answer, as long as turns can be dropped
BYTES_PER_TOKEN = 3  # an estimate for text that nobody has tokenised yet
Show = Callable[[AnswerStream], tuple[str, Finish]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; `tokens` is what they take of the context, the first with the system message."""

    question: str
    answer: str
    tokens: int

    @property
    def messages(self) -> tuple[dict[str, str], dict[str, str]]:
        """The two as messages."""
        return {"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}


class Conversation:
    """A conversation with one model. It keeps as many of the latest turns as the context holds.

    `opening` are the messages that it begins with, besides the system message. What is set here holds from the next
    question on.
    """

    def __init__(
        self,
        answerer: Answerer,
        sampling: SamplingParams,
        system: str | None,
        opening: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._answerer = answerer
        self._context_tokens = answerer.context_tokens
        self._opening = list(opening)
        self.sampling, self.system = sampling, system
        self.think: bool | str | None = None
        self.grammar: Grammar | None = None
        self.keeps_history = True
        self.turns: list[Turn] = []

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """All that was said, without the system message."""
        return [*self._opening, *(message for turn in self.turns for message in turn.messages)]

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def ask(self, question: str, show: Show) -> Finish:
        """Answer a question; `show` prints the stream of the answer and returns its text and its end. Returns the end.

        The oldest turns are dropped while the context is full, and a note says how many. Raises ContextFull for a
        question that is too long by itself, and what the model raises; the turns are as before then.
        """
        kept = self._drop_estimated(question) if self.keeps_history else []
        while True:
            try:
                stream = self._answerer.stream_chat(
                    self._write_messages(kept, question), self.sampling, think=self.think, grammar=self.grammar
                )
                break
            except (ContextFull, OutOfPages):
                if not kept:
                    raise
                kept = kept[1:]
        with stream:
            dropped = len(self.turns) - len(kept)
            if dropped and self.keeps_history:
                print_note(f"(the context is full: the oldest {_count_turns(dropped)} forgotten)")
            answer, finish = show(stream)
        tokens = finish.usage.prompt_tokens + finish.usage.completion_tokens
        if self.keeps_history:
            self.turns = [*kept, Turn(question, answer, max(tokens - _sum_tokens(kept), 0))]
        self._note_end(finish, tokens)
        return finish

    def _write_messages(self, turns: list[Turn], question: str) -> list[Mapping[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = [message for turn in turns for message in turn.messages]
        return [*system, *self._opening, *said, {"role": "user", "content": question}]

    def _drop_estimated(self, question: str) -> list[Turn]:
        """The turns that leave room for the question and a fair answer, by what is known of their tokens."""
        kept, context_tokens = list(self.turns), self._context_tokens
        if context_tokens is None:
            return kept
        answer_tokens = context_tokens // ANSWER_SHARE
        if self.sampling.max_tokens is not None:
            answer_tokens = min(answer_tokens, self.sampling.max_tokens)
        room = context_tokens - answer_tokens - len(question.encode()) // BYTES_PER_TOKEN
        while kept and _sum_tokens(kept) > room:
            kept = kept[1:]
        return kept

    def _note_end(self, finish: Finish, tokens: int) -> None:
        """Say when the end of the context cut the answer; it is known from then on how long the context is."""
        max_tokens = self.sampling.max_tokens
        if finish.reason is FinishReason.LENGTH and finish.usage.completion_tokens != max_tokens:
            self._context_tokens = tokens
            print_note("(the context is full: the answer ends here, and the next question forgets the oldest turns)")


def _sum_tokens(turns: list[Turn]) -> int:
    return sum(turn.tokens for turn in turns)


def _count_turns(count: int) -> str:
    return "turn was" if count == 1 else f"{count} turns were"
