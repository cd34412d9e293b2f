"""The model that a chat talks with: opens it here or at a server, describes it, and saves it as a new model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path

from mlxr.cli.remote import Answerer, AnswerStream, ask_parameters, ask_server, find_here, name_default, open_model
from mlxr.cli.terminal import print_note
from mlxr.core.errors import ContextFull, InvalidRequest, MlxrError, OutOfPages
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.core.types import Closes, Finish, FinishReason, Grammar, SamplingParams
from mlxr.loading import NAMED_MODELS
from mlxr.registry import Changes, ModelRecord
from mlxr.registry.modelfile import list_parameters, write_modelfile
from mlxr.service.catalogue import open_registry, recommend
from mlxr.service.opening import find_own_adapter, find_record, note_use

ANSWER_SHARE = 4  # a question leaves at least this part of the context to its answer, as long as turns can be dropped
BYTES_PER_TOKEN = 3  # an estimate for text that is not tokenised yet
Show = Callable[[AnswerStream], tuple[str, Finish]]
Pictures = Sequence[Mapping[str, object]]


@frozen
class Turn:
    """A question and its answer; they take `tokens` of the context, the first turn with the system message.

    `pictures` are parts of the question, made by `make_part`.
    """

    question: str
    answer: str
    tokens: int
    pictures: Pictures = ()

    @property
    def messages(self) -> tuple[dict[str, str], dict[str, str]]:
        """The question and the answer as messages, without pictures."""
        return {"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}


class Conversation:
    """A conversation with one model. It keeps as many of the latest turns as the context holds.

    `opening` are the messages that it begins with, besides the system message. Changed attributes hold from the next
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
        """All messages, without the system message and without pictures."""
        return [*self._opening, *(message for turn in self.turns for message in turn.messages)]

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def ask(self, question: str, show: Show, pictures: Pictures = ()) -> Finish:
        """Answer a question about `pictures`, if there are any. Returns the end of the answer.

        `show` prints the stream of the answer and returns its text and its end.
        The oldest turns are dropped while the context is full, and a note says how many. Raises ContextFull if the
        question is too long by itself, and the model's errors; the turns then stay as before.
        """
        kept = self._drop_estimated(question) if self.keeps_history else []
        while True:
            try:
                stream = self._answerer.stream_chat(
                    self._write_messages(kept, question, pictures),
                    self.sampling,
                    think=self.think,
                    grammar=self.grammar,
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
            self.turns = [*kept, Turn(question, answer, max(tokens - _sum_tokens(kept), 0), pictures)]
        self._note_end(finish, tokens)
        return finish

    def _write_messages(self, turns: list[Turn], question: str, pictures: Pictures) -> list[Mapping[str, object]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = [message for turn in turns for message in (_show_with(turn.pictures, turn.question), turn.messages[1])]
        return [*system, *self._opening, *said, _show_with(pictures, question)]

    def _drop_estimated(self, question: str) -> list[Turn]:
        """Return the turns that leave room for the question and a fair answer, by an estimate of tokens."""
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
        """Print a note if the end of the context cut the answer; the context's length is known from then on."""
        max_tokens = self.sampling.max_tokens
        if finish.reason is FinishReason.LENGTH and finish.usage.completion_tokens != max_tokens:
            self._context_tokens = tokens
            print_note("(the context is full: the answer ends here, and the next question forgets the oldest turns)")


def _show_with(pictures: Pictures, question: str) -> Mapping[str, object]:
    """Return a question as a message, its pictures before it."""
    return {"role": "user", "content": [*pictures, {"type": "text", "text": question}] if pictures else question}


def _sum_tokens(turns: list[Turn]) -> int:
    return sum(turn.tokens for turn in turns)


def _count_turns(count: int) -> str:
    return "turn was" if count == 1 else f"{count} turns were"


Message = Mapping[str, str]


@frozen
class ModelCard:
    """The details of a model that `/show` prints; `parameters` are lines of name and value."""

    info: Mapping[str, str] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    system: str = ""
    template: str = ""
    modelfile: str = ""
    license: str = ""


class ChatModel(Closes):
    """The model of a chat, one at a time. `name` None is the default model, of this machine or the server's.

    `parameters` and `messages` are the model's own (see `mlxr create`). At a server there are no messages, since the
    server adds them itself.
    """

    def __init__(self, name: str | None, settings: Settings, url: str | None) -> None:
        self.name = name_default(settings) if name is None and url is None else name
        self._settings, self._url = settings, url
        self._stack = ExitStack()
        self.answerer: Answerer = self._open()

    @property
    def title(self) -> str:
        """The name that people use for the model."""
        return self.name or self._url or ""

    @property
    def parameters(self) -> Mapping[str, object]:
        """The sampling parameters, under Ollama's names."""
        if self._url is not None:
            return ask_parameters(self._settings, self._url, self.name)
        return {**recommend(self._record.path), **self._record.parameters}

    @property
    def messages(self) -> list[Message]:
        """The messages that every conversation begins with."""
        return list(self._record.messages) if self._url is None else []

    def load(self, name: str) -> None:
        """Use another model from now on. The old one is closed first, to free its memory.

        If the new one cannot be opened, the old one comes back, and MlxrError says why.
        """
        before = self.name
        if self._url is None:
            self._find_record(name)  # raises for a wrong name before anything is closed
        self._stack.close()
        self.name = name
        try:
            self.answerer = self._open()
        except MlxrError:
            self.name = before
            self.answerer = self._open()
            raise

    def save(
        self,
        name: str,
        system: str | None,
        parameters: Mapping[str, object],
        messages: list[Message],
        *,
        replaces: bool = False,
    ) -> None:
        """Make the model `name` of this one, with a system message, parameters under Ollama's names and messages.

        If another model has the name, raises NameTaken or the server's error, unless the new model `replaces` it.
        """
        if self._url is None:
            changes = Changes(system=system, parameters=parameters, messages=messages or None)
            open_registry(self._settings).derive(name, self._record, changes, replaces=replaces)
            return
        body: dict[str, object] = {"model": name, "from": self._require_name(), "stream": False, "replace": replaces}
        body |= {"system": system, "parameters": dict(parameters), "messages": list(map(dict, messages))}
        ask_server(self._settings, self._url, "/api/create", body, timeout_s=None)

    def describe(self) -> ModelCard:
        """Return the details of the model; raises MlxrError."""
        if self._url is not None:
            return self._ask_card(self._url)
        record = self._record
        info = {
            "architecture": record.architecture,
            "parameters": record.parameter_size,
            "quantization": record.quantization,
            "context length": f"{record.context_tokens} tokens",
            "embedding length": str(record.embedding_length),
        }
        return ModelCard(
            info,
            list_parameters(record.parameters),
            record.system or "",
            record.template or record.own_template,
            self._write_modelfile(record),
            record.license,
        )

    def _write_modelfile(self, record: ModelRecord) -> str:
        adapter = find_own_adapter(record, self._settings)
        return write_modelfile(record, None if adapter is None else adapter.path)

    def _ask_card(self, url: str) -> ModelCard:
        reply = ask_server(self._settings, url, "/api/show", {"model": self._require_name()})
        details = reply.get("details") or {}
        info = {
            "architecture": details.get("family", ""),
            "parameters": details.get("parameter_size", ""),
            "quantization": details.get("quantization_level", ""),
        }
        texts = {name: reply.get(name) or "" for name in ("system", "template", "modelfile", "license")}
        return ModelCard(info, (reply.get("parameters") or "").splitlines(), **texts)

    def _open(self) -> Answerer:
        if self._url is None:
            assert self.name is not None
            self._record = self._find_record(self.name)
            note_use(self._record, self._settings)
        model = open_model(self.name, self._settings, self._url, needs_chat_template=True)
        return self._stack.enter_context(model)

    def _find_record(self, name: str) -> ModelRecord:
        name = str(find_here(name, self._settings)[0])
        record = find_record(name, self._settings)
        if record is not None:
            return record
        path = name if name in NAMED_MODELS else str(Path(name).expanduser().absolute())
        return open_registry(self._settings).find(path)

    def _require_name(self) -> str:
        if self.name is None:
            raise InvalidRequest("MODEL", "is needed for this; name the model: `mlxr chat MODEL --url ...`")
        return self.name

    def close(self) -> None:
        """Close the model and its engine."""
        self._stack.close()
