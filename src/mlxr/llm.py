"""`LLM`: the front door for Python programs. Opens a model and answers, alone or many prompts at once.

It is the side of a `Session` for programs that wait. A thread of its own runs the engine, as in the server. Functions
declare the settings of a model as `**keywords: Unpack[ModelKeywords]`, of which type checkers know each one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, Unpack, get_type_hints

from mlxr.core.errors import InvalidRequest
from mlxr.core.model_keywords import ModelKeywords
from mlxr.core.settings import Settings, resolve
from mlxr.core.types import AUTO_DRAFTS, Closes, DraftOptions, Grammar, SamplingParams
from mlxr.loading import Progress
from mlxr.service.adapters import AdapterChoice
from mlxr.service.embedding import Pooling, PromptChoice, check_dimensions, choose_pooling, scale_vector
from mlxr.service.opening import find_adapter_path, find_own_adapter, find_record, open_model, split_adapter
from mlxr.service.requests import ChatRequest, Message, Prompt, TextRequest
from mlxr.service.session import Session
from mlxr.service.sight import open_pictures
from mlxr.service.stats import SessionStats
from mlxr.service.streams import Completion, Stream, fold_events

KEYWORDS = get_type_hints(ModelKeywords)
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., object])


def show_keywords(function: Function) -> Function:
    """Return `function` with each setting in its signature, for `help` and for completion in a running interpreter."""
    signature = inspect.signature(function)
    own = [row for row in signature.parameters.values() if row.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [row for row in own if row.kind is inspect.Parameter.KEYWORD_ONLY]
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in KEYWORDS.items()
    ]
    shown = signature.replace(parameters=[*own[: len(own) - len(named)], *settings, *named])
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function


def resolve_keywords(keywords: ModelKeywords) -> Settings:
    """Return settings from `keywords`; those that are None come from the environment, the file and the defaults.

    Raises TypeError for names that no setting of a model has, as Python does, and SettingError for unfit values.
    """
    for name in keywords:
        if name not in KEYWORDS:
            near = difflib.get_close_matches(name, KEYWORDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(KEYWORDS)}"
            raise TypeError(f"got an unexpected keyword argument {name!r}{hint}")
    return resolve(keywords)


__all__ = ["LLM", "Completion"]


class LLM(Closes):
    """A model, loaded and ready.

        with LLM("demo") as llm:
            for completion in llm.generate(["import os", "import re"], SamplingParams(max_tokens=20)):
                print(completion.text)

    `model` is a `.gguf` file, a Hugging Face folder or a name ("demo", or what `mlxr list` shows). The other arguments
    are the settings of the same name (`mlxr settings` describes them); None leaves the choice to the environment, the
    settings file and the defaults. With `needs_chat_template` a model without one is refused with TemplateError before
    its weights are read. `adapter` is a low-rank adapter (LoRA) for all requests that name no other one: its files,
    or its name in `mlxr adapters list`.
    `progress(done, total)` is called while the weights are prepared, and again while a GPU compiles its kernels, those
    of one request at a time. Raises MlxrError.
    Safe to use from several threads: their requests share the engine's batches.
    """

    @show_keywords
    def __init__(
        self,
        model: str | Path = "demo",
        *,
        needs_chat_template: bool = False,
        progress: Progress | None = None,
        adapter: str | Path | None = None,
        **keywords: Unpack[ModelKeywords],
    ) -> None:
        settings = resolve_keywords(keywords)
        self._name = str(model)
        model, named = split_adapter(model, settings)
        record = find_record(model, settings)
        own = None if record is None else find_own_adapter(record, settings)
        chosen = adapter or named
        path = None if chosen is None else find_adapter_path(chosen, settings)
        loaded = open_model(model, settings, progress, needs_chat_template=needs_chat_template, needs_draft=True)
        self._opened: Session | None = Session(
            loaded,
            settings,
            system=None if record is None else record.system,
            adapter=own.path if path is None and own is not None else path,
            adapter_name=None if path is not None else loaded.name,
            warm_up_sequences=1,
            progress=progress,
            learns_template=False,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        drafts: DraftOptions | Sequence[DraftOptions] = AUTO_DRAFTS,
    ) -> list[Completion]:
        """Continue one prompt or several, which are computed together; return a completion per prompt, in their order.

        A prompt is text, in which special tokens count as such, or a list of token ids. `params` is for all prompts, or
        one for each; so are `drafts` and `adapter`. An adapter is the name of one that is loaded, several with factors
        that are added in their order ({"sql": 0.5, "brief": 1.0}), or None. With `n` above 1 the `choices` of a
        completion are its prompt's answers. Raises InvalidRequest when one of the prompts cannot be served; the others
        are cancelled then.
        """
        wanted = _list_prompts(prompts)
        all_params = _spread("params", params or SamplingParams(), len(wanted))
        adapters: list[AdapterChoice | None] = _spread("adapter", adapter, len(wanted))
        all_drafts = _spread("drafts", drafts, len(wanted))
        rows = zip(wanted, all_params, adapters, all_drafts, strict=True)
        requests = [TextRequest(prompt, own, adapter=name, drafts=guess) for prompt, own, name, guess in rows]
        streams = self._session.ask_all(requests, waits_for_room=True)
        try:
            return [fold_events(stream.wait()) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        prompt_name: str | None = None,
        input_type: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> list[list[float]]:
        """Return a vector of length 1 for each text, (hidden size,); all of them are computed together.

        `pooling` chooses the tokens that count: all (`mean`), the `last` or the first (`cls`); None: as the model's
        files state, else all. A prompt of the model goes before each text: that named `prompt_name`, or that for the
        kind of text (`input_type`: query, document, ...), or a `prompt` of your own. `dimensions` keeps the first so
        many numbers, scaled to length 1 again; `truncate` cuts texts that are too long. Raises InvalidRequest for a
        text that is too long, and if the files state what mlxr does not do.
        """
        session, listed = self._session, [texts] if isinstance(texts, str) else list(texts)
        used = choose_pooling(session.loaded.pooling, pooling, "texts")
        check_dimensions(dimensions, session.config.vector_size)
        choice = PromptChoice(prompt_name, input_type, prompt)
        token_ids = session.encode_each(listed, "texts", choice, truncates=truncate)
        return [scale_vector(vector, dimensions).tolist() for vector in session.embed_each(token_ids, used)]

    def embed_sparse(self, texts: str | Sequence[str], *, truncate: bool = False) -> list[dict[int, float]]:
        """Return the weights of each text's tokens by id, for models that make them (bge-m3). Raises InvalidRequest."""
        made = self._session.embed_tokens([texts] if isinstance(texts, str) else texts, "sparse", truncates=truncate)
        return [one for one in made if isinstance(one, dict)]

    def embed_multi(self, texts: str | Sequence[str], *, truncate: bool = False) -> list[list[list[float]]]:
        """Return a vector of length 1 for each token of a text but the first, for models that make them
        (bge-m3, as ColBERT). Raises InvalidRequest."""
        made = self._session.embed_tokens([texts] if isinstance(texts, str) else texts, "multi", truncates=truncate)
        return [one.tolist() for one in made if not isinstance(one, dict)]

    def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[tuple[int, float]]:
        """Return the places of the documents, the best answer to the query first, each with a number from 0 to 1.

        For cross-encoders, and for models that write text, which are asked whether a document answers the query, by an
        `instruction` if there is one. Raises InvalidRequest for a model that cannot rank.
        """
        scores = self._session.rank_all(query, list(documents), instruction)
        return sorted(enumerate(scores), key=lambda pair: -pair[1])

    def load_adapter(self, path: str | Path, name: str | None = None) -> str:
        """Load a low-rank adapter (LoRA): a PEFT folder or a GGUF file; returns the name by which requests choose it.

        All adapters take at most `adapter_bytes`. Raises MlxrError for files that are none of this model's adapters.
        """
        return self._session.adapters.load(path, name)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises InvalidRequest for an unknown name, and for one that answers under way have."""
        self._session.adapters.unload(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return self._session.adapters.names

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        think: bool | str | None = None,
        grammar: Grammar | None = None,
        adapter: AdapterChoice | None = None,
        drafts: DraftOptions = AUTO_DRAFTS,
    ) -> Completion:
        """Return the assistant's next message. `messages` are `{"role": ..., "content": ...}`, the oldest first.

        Content is text, or a list of parts: `{"type": "text", "text": ...}` and, for a model that sees,
        `{"type": "image", "image": ...}` with the path of a picture or its bytes.

        `think` switches reasoning on or off, or names a level, if the model has that; `grammar` describes the answer's
        form, `adapter` names one that is loaded. Raises TemplateError when the model has no chat template.
        """
        with self.stream_chat(messages, params, think=think, grammar=grammar, adapter=adapter, drafts=drafts) as stream:
            return fold_events(stream.wait())

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: AdapterChoice | None = None,
        drafts: DraftOptions = AUTO_DRAFTS,
    ) -> Stream:
        """Continue one prompt; iterate over the result for TextDelta events and one Finish. Closing it cancels."""
        request = TextRequest(prompt, params or SamplingParams(), adapter=adapter, drafts=drafts)
        return self._session.ask(request)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        think: bool | str | None = None,
        grammar: Grammar | None = None,
        adapter: AdapterChoice | None = None,
        drafts: DraftOptions = AUTO_DRAFTS,
    ) -> Stream:
        """Do `chat` as a stream of events."""
        messages = open_pictures(messages)
        request = ChatRequest(
            messages, params or SamplingParams(), think=think, grammar=grammar, adapter=adapter, drafts=drafts
        )
        return self._session.ask(request)

    @property
    def can_chat(self) -> bool:
        """True if the model came with a chat template."""
        return self._session.can_chat

    @property
    def blind(self) -> str:
        """The reason that the model sees no pictures, and the remedy; empty if it does."""
        return self._session.blind

    @property
    def context_tokens(self) -> int:
        """The number of tokens that a prompt and its answer may have together."""
        return self._session.context_tokens

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a prompt, as `generate` reads it: BOS in front if the model wants it."""
        return self._session.encode_prompt(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens; bytes that form no character become U+FFFD."""
        return self._session.decode(token_ids)

    def stats(self) -> SessionStats:
        """Return figures of the model, its cache and what was computed, and the implementation of each operator."""
        return self._session.read_stats()

    def close(self) -> None:
        """Write cache pages to disk if settings ask for that, and give the memory back; the object cannot be used
        again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _session(self) -> Session:
        if self._opened is None:
            raise InvalidRequest("LLM", f"{self._name} is closed; open it again")
        return self._opened


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") for item in listed):
        return [listed]  # type: ignore[list-item]
    for item in listed:
        if hasattr(item, "__index__"):
            raise InvalidRequest("prompts", "mixes token ids with whole prompts")
    return listed  # type: ignore[return-value]


def _spread(field: str, given: T | Sequence[T], count: int) -> list[T]:
    """Return one value for each prompt, from one for all or one for each. Raises InvalidRequest for another number."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(field, f"must be one for all prompts or one for each; got {len(given)} for {count}")
    return list(given)
