"""A model that answers: requests go in, events come out as they happen, hundreds at once.

All callers open it in the same way, and one thread runs its engine. Awaited methods belong on an event loop, where the
token events of one step arrive together; `ask_all`, `embed_all`, `read_stats` and `close` are for blocking programs.
Both prepare requests alike and read the same streams. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mlxr.core.errors import ContextFull, InvalidRequest
from mlxr.core.settings import Settings
from mlxr.core.stats import Dispatch, LiveReading, MachineLimits, PageRecord, WatchedModel
from mlxr.core.work_threads import WorkThreads
from mlxr.engine.engine_thread import EngineThread
from mlxr.engine.memory_plan import MIN_ARENA_BYTES
from mlxr.engine.pictures import Pictures
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import Floats
from mlxr.engine.speculative.planner import HOST_DEVICES
from mlxr.loading import Adapter, GGUFFile, LoadedModel, Model, Progress, is_for_text
from mlxr.registry import AdapterRecord
from mlxr.service.adapters import SessionAdapters
from mlxr.service.chat import SpecialGuard
from mlxr.service.embedding import (
    Kind,
    Pooling,
    PromptChoice,
    Ranker,
    TextTokens,
    choose_pooling,
    choose_product,
    choose_prompt,
    describe_pooling,
    spread_tokens,
    weigh_tokens,
)
from mlxr.service.identity import PageNames, PageSource
from mlxr.service.machine_limits import KeptLimits, explain_missing, measure_limits
from mlxr.service.opening import build_engine, report_warm_up, warm_up
from mlxr.service.preparation import Preparation, PreparingThreads
from mlxr.service.requests import ChatRequest, Prompt, TextRequest
from mlxr.service.sight import Sight
from mlxr.service.stats import SessionStats, collect_stats
from mlxr.service.streams import AsyncStream, Stream, embed_each, forward_to, open_streams
from mlxr.service.thought_budget import Thinking
from mlxr.tokenizers import ChatTemplate, Tokenizer

logger = logging.getLogger(__name__)
# Preparing a longer request would delay others on the loop.
INLINE_CHARACTERS = 4096
ENCODING_THREADS = 4  # these tokenise many texts beside a GPU
FEW_TEXTS, GROUP_CHARACTERS = 16, 1 << 16  # tokenised at a time; the last text may exceed it
T = TypeVar("T")


class Session:
    """Texts and conversations with one loaded model, which the session owns from now on.

    Making one maps the arena and starts the engine's thread; any thread may do that. `template` replaces the model's
    own chat template; `system` is the system message of conversations that have none. `memory_bytes` is the most that
    the cache may take if the settings leave its size open. Requests that name no adapter use the one at the path
    `adapter`, which is loaded as `adapter_name`, or under the name of its files. `room_tokens` is the most that a
    prompt and its answer can have together; `drafts` is true if answers get drafts. The warm-up is for at most
    `warm_up_sequences` answers and reports to `progress`. With `learns_template` the chat template is examined now and
    not with the first conversation. A session that fails to open closes everything, also `loaded`.

    Several names of one model share the loaded files: `share` makes a session for a further name, whose `base` is the
    first session. Stopping any of them stops all.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        *,
        template: ChatTemplate | None = None,
        system: str | None = None,
        memory_bytes: int | None = None,
        adapter: Path | None = None,
        adapter_name: str | None = None,
        warm_up_sequences: int | None = None,
        progress: Progress | None = report_warm_up,
        learns_template: bool = True,
    ) -> None:
        self.loaded = loaded
        self.base, self._thinking, self._learns_template = self, Thinking.read(settings), learns_template
        self._has_told_pooling = self._has_told_ranking = False
        self._measuring: asyncio.Task[MachineLimits] | None = None
        with ExitStack() as undo:
            undo.callback(loaded.close)
            self.adapters = SessionAdapters(loaded.load_adapter, settings.adapter_bytes)
            undo.callback(self.adapters.stop)
            self._own_adapter = None if adapter is None else self.adapters.load(adapter, adapter_name)
            engine = build_engine(loaded, settings, memory_bytes=memory_bytes)
            self.context_tokens, self.room_tokens = engine.context_tokens, engine.room_tokens
            self.drafts = engine.drafts
            self.measure_cache, self._keeps_arena = engine.measure_cache, settings.arena_bytes is not None
            self._kv_cache, self._kept_limits = engine.plan.kv_cache, KeptLimits(settings)
            self._start_keys, self.page_size = engine.start_keys, engine.plan.page_size
            self._engine = EngineThread(engine)
            undo.callback(self._engine.close)
            self._engine.call(lambda engine: warm_up(engine, loaded.ctx.device, settings, warm_up_sequences, progress))
            tower = loaded.tower
            self._sight = Sight(
                loaded.tokenizer,
                None if tower is None else tower.spec,
                lambda: b"" if tower is None else tower.fingerprint,
                loaded.blind,
                settings.image_tokens,
                settings.image_origins,
                ear=None if tower is None or tower.ear is None else tower.ear[1],
                deaf="" if tower is None else tower.deaf,
            )
            adapters = self.adapters
            self._collect_stats = lambda engine: collect_stats(loaded, adapters.measure(), engine)
            self._figures = self._engine.keep_figures(self._collect_stats)
            self._threads = PreparingThreads()
            undo.callback(self._threads.stop)
            self._preparation = self._prepare_for(loaded.name, template or loaded.chat_template, system)
            undo.pop_all()

    def share(
        self, name: str, template: ChatTemplate | None, system: str | None, adapter: AdapterRecord | None
    ) -> Session:
        """Return a session for a further name of this model, with its own template, system message and adapter.

        Everything else is shared. May be called on any thread; raises what reading the adapter raises.
        """
        other = copy(self)
        other._own_adapter = None if adapter is None else self.adapters.load(adapter.path, name)
        try:
            other._preparation = other._prepare_for(name, template, system)
        except BaseException:
            other.leave()
            raise
        return other

    def _prepare_for(self, name: str, template: ChatTemplate | None, system: str | None) -> Preparation:
        preparation = Preparation(
            self.loaded.tokenizer,
            template,
            vocab_size=self.loaded.config.vocab_size,
            context_tokens=self.context_tokens,
            model_name=name,
            system=system,
            host=self.loaded.ctx,
            adapters=self.adapters,
            adapter=self._own_adapter,
            thinking=self._thinking,
            sight=self._sight,
        )
        if self._learns_template:
            preparation.warm_up()
        return preparation

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights, with those of a draft model."""
        return self.loaded.weight_bytes

    @property
    def size_bytes(self) -> int:
        """The bytes of memory that weights and cache take now."""
        return self.weight_bytes + self.measure_cache().in_use_bytes

    @property
    def least_bytes(self) -> int:
        """The least bytes that the model needs: weights, and the part of the cache that requests hold, at least a
        minimum; the whole cache if the settings state its size or it is on a GPU.
        """
        cache = self.measure_cache()
        if self._keeps_arena or not self.is_on_host:
            return self.weight_bytes + cache.max_bytes
        return self.weight_bytes + max(min(cache.max_bytes, MIN_ARENA_BYTES), cache.held_bytes)

    @property
    def is_on_host(self) -> bool:
        """True if the model runs in the host's memory, not in a GPU's."""
        return self.loaded.ctx.device in HOST_DEVICES

    async def limit_cache(self, nbytes: int) -> None:
        """Let the cache take at most `nbytes` from now on, if its size is open; see `Engine.limit_cache`."""
        if not self._keeps_arena:
            await self._engine.limit_cache(nbytes)

    def leave(self) -> None:
        """Let go of this name's own parts; the model runs on for the other names."""
        if self._own_adapter is not None:
            self.adapters.release(self._own_adapter, lambda: None)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the loaded model."""
        return self.loaded.tokenizer

    @property
    def config(self) -> Model:
        """The configuration of the loaded model."""
        return self.loaded.config

    @property
    def failure(self) -> str | None:
        """The reason why the model can no longer answer; None as long as it can."""
        return None if self.loaded.group is None else self.loaded.group.failure

    @property
    def capabilities(self) -> frozenset[str]:
        """The model's capabilities, of "completion", "tools", "thinking", "vision", "audio" and "embedding"."""
        writes = is_for_text(self.config, self.loaded.pooling)
        return self._preparation.capabilities if writes else frozenset({"embedding"})

    @property
    def deaf(self) -> str:
        """The reason why the model does not hear; empty if it does."""
        return self._sight.deaf

    async def listen(self, data: bytes, field: str) -> tuple[int, float]:
        """Return the number of pieces of 30 s in a sound, and its seconds. Raises InvalidRequest naming `field`."""
        return await asyncio.to_thread(self._sight.listen, data, field)

    @property
    def blind(self) -> str:
        """The reason why the model sees no pictures; empty if it does."""
        return self._sight.blind

    @property
    def can_chat(self) -> bool:
        """True if the model has a chat template."""
        return self._preparation.can_chat

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template, None without one."""
        return self._preparation.chat_template

    def fit_think(self, think: bool | str | None) -> bool | str | None:
        """Return the setting nearest to `think` that this model has: a level becomes "on" if it knows no levels, and
        "off" becomes None if its reasoning cannot be switched off. See `Chat.fit_think`.
        """
        return self._preparation.fit_think(think)

    def encode_prompt(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of plain text, with its special tokens, or check ready ids; raises InvalidRequest."""
        return self._preparation.encode_prompt(prompt, add_special=add_special, parse_special=parse_special)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a conversation; raises TemplateError without a chat template, InvalidRequest for bad
        messages.
        """
        return self._preparation.encode_chat(request)

    def render_chat(self, request: ChatRequest) -> str:
        """Return the text of a conversation's prompt, special tokens spelt out; raises as `encode_chat` does."""
        return self._preparation.render_chat(request)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens."""
        return self.loaded.tokenizer.decode(token_ids)

    async def run(self, work: Callable[..., T], *arguments: object, reads: object = None) -> T:
        """Run `work(*arguments)` on one of this model's own threads and return its result.

        Work that reads a prompt or renders a template belongs here: however long it takes, it delays no other model.
        `reads` is the request, or the texts, that it reads: long ones run at a low priority.
        """
        return await self._threads.run(work, *arguments, reads=reads)

    @property
    def engine(self) -> EngineThread:
        """The engine, for a cluster: its pages and its load (see `identity.RequestHooks`)."""
        return self._engine

    async def start(
        self, request: TextRequest | ChatRequest, *, client: str | None = None, source: PageSource | None = None
    ) -> AsyncStream:
        """Start the answers to a request, or refuse it by an error.

        Clients share the engine evenly, however many requests each of them sends. If there is a `source`, it brings
        pages of the prompt first.

        Raises InvalidRequest, OutOfPages, QueueFull, TemplateError or EngineStopped.
        """
        if _is_slow(request):
            prepared = await self.run(self._preparation.prepare, request, client, reads=request)
        else:
            prepared = self._preparation.prepare(request, client)
        stream, asked = AsyncStream(prepared), prepared.request
        ticket = self._engine.open(asked, forward_to(stream), asyncio.get_running_loop())
        stream.attach(ticket)
        if source is not None and asked.uses_cache and not asked.scores_prompt:
            known_ids = asked.token_ids[:-1]  # the last one is always computed
            names = await self.run(self._name_pages, known_ids, asked.adapter, asked.pictures)
            stream.keep(await source.bring(names))
        try:
            await self._engine.start(ticket)
        except BaseException:
            stream.keep(None)
            raise
        return stream

    def ask(self, request: TextRequest | ChatRequest) -> Stream:
        """Start the answers to a request, for a blocking program; see `start`."""
        return self.ask_all([request])[0]

    def ask_all(self, requests: Iterable[TextRequest | ChatRequest], *, waits_for_room: bool = False) -> list[Stream]:
        """Start the answers to several requests together, for a blocking program; none runs if one is refused.

        With `waits_for_room` requests that the queue cannot hold yet start once it can. Raises as `start` does.
        """
        prepared = [self._preparation.prepare(request) for request in requests]
        return open_streams(self._engine, prepared, waits_for_room=waits_for_room)

    def embed_all(self, prompts: Iterable[Prompt], pooling: Pooling) -> list[Floats]:
        """Return the embedding of each text, in order, for a blocking program; raises as `embed` does."""
        return list(self.embed_each(prompts, pooling))

    def embed_each(self, prompts: Iterable[Prompt], pooling: Pooling) -> Iterator[Floats]:
        """Yield the embedding of each text as it comes, in order; texts are read when there is room for them."""
        return embed_each(self._engine, (self._preparation.prepare_text(prompt, pooling) for prompt in prompts))

    def embed_tokens(
        self,
        texts: Sequence[str],
        kind: Kind,
        choice: PromptChoice = PromptChoice(),  # noqa: B008 - a constant
        *,
        truncates: bool = False,
    ) -> Iterator[dict[int, float] | Floats]:
        """Yield the token weights or vectors of each text (see `finish_states`), for a blocking program."""
        choose_product(self.loaded.text_rules, kind, "kind")
        token_ids = list(self.encode_each(texts, "texts", choice, truncates=truncates))
        for ids, states in zip(token_ids, self.embed_each(token_ids, "none"), strict=True):
            yield self.finish_states(kind, states, ids, "kind")

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling | None = None,
        *,
        client: str | None = None,
        deadline_s: float | None = None,
        adapter: Adapter | None = None,
    ) -> Floats:
        """Return the embedding of a text, (hidden size,), not normalised, with `pooling` or the model's own.

        Raises as `start` does, and RequestFailed if the text was accepted and could not be computed.
        """
        pooling = self.choose_pooling(pooling)
        request = self._preparation.prepare_text(prompt, pooling, client=client, deadline_s=deadline_s, adapter=adapter)
        return await self._engine.embed(request)

    @cached_property
    def ranker(self) -> Ranker:
        """The ranker, which makes requests of pairs of texts, and scores of their logits."""
        file = self.loaded.file
        template = file.metadata.get("tokenizer.chat_template.rerank") if isinstance(file, GGUFFile) else None
        return Ranker(
            self.loaded.config,
            self.tokenizer,
            SpecialGuard(self.tokenizer),
            self.context_tokens,
            template if isinstance(template, str) else None,
        )

    def prepare_pairs(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> list[EngineRequest]:
        """Return a request for each document with the query; raises InvalidRequest."""
        if not self.ranker.is_stated and not self.base._has_told_ranking:
            self.base._has_told_ranking = True
            logger.warning(
                "%s ranks texts by how likely it says yes; its files do not say that it is made for it",
                self.loaded.name,
            )
        return [self.ranker.prepare(query, document, instruction) for document in documents]

    @property
    def labels_stand_apart(self) -> bool:
        """True if a text may have several labels of the classifier at once, by the model's files."""
        file = self.loaded.file
        stated = {} if isinstance(file, GGUFFile) else file.config
        return stated.get("problem_type") == "multi_label_classification"

    async def rank(
        self, request: EngineRequest, *, client: str | None = None, deadline_s: float | None = None
    ) -> Floats:
        """Return the logits of one pair, for the ranker to score; raises as `embed` does."""
        return await self._engine.embed(replace(request, client=client, deadline_s=deadline_s))

    def rank_all(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[float]:
        """Return for each document how well it answers the query, from 0 to 1, for a blocking program; raises as `rank`
        does.
        """
        logits = embed_each(self._engine, self.prepare_pairs(query, documents, instruction))
        return [self.ranker.score(one.tolist()) for one in logits]

    def choose_pooling(self, asked: Pooling | None, field: str = "input") -> Pooling:
        """Return the pooling that makes vectors of texts; raises InvalidRequest if mlxr does not know the model's."""
        if asked is None and self.loaded.pooling in (None, "none") and not self.base._has_told_pooling:
            self.base._has_told_pooling = True
            logger.warning(
                "%s is asked for vectors, but its files state no pooling, so it may not be made for them; they are the "
                "mean over all tokens",
                self.loaded.name,
            )
        return choose_pooling(self.loaded.pooling, asked, field)

    def describe_pooling(self, used: Pooling) -> str:
        """Describe the pooling `used` for vectors; see `embedding.describe_pooling`."""
        return describe_pooling(self.loaded.pooling, used)

    @property
    def text_tokens(self) -> int:
        """The most tokens of a text that becomes a vector: the context, or less if the model's files say so."""
        return min(self.context_tokens, self.loaded.text_rules.max_tokens or self.context_tokens)

    def encode_texts(
        self,
        texts: Sequence[Prompt],
        field: str,
        choice: PromptChoice = PromptChoice(),  # noqa: B008 - a constant
        *,
        truncates: bool = False,
        parse_special: bool = False,
    ) -> tuple[list[list[int]], str | None]:
        """Return the token ids of texts to embed, each behind the prompt of `choice`, and the prompt's name.

        With `truncates` a text that is too long is cut, but not the prompt and special tokens around it; otherwise
        raises ContextFull with the counts. Raises InvalidRequest naming `field` and the text's number.
        """
        name, _ = choose_prompt(self.loaded.text_rules, choice)
        return list(self.encode_each(texts, field, choice, truncates=truncates, parse_special=parse_special)), name

    def encode_each(
        self,
        texts: Iterable[Prompt],
        field: str,
        choice: PromptChoice = PromptChoice(),  # noqa: B008 - a constant
        *,
        truncates: bool = False,
        parse_special: bool = False,
    ) -> Iterator[list[int]]:
        """Yield the token ids of one text after the other; see `encode_texts`."""
        _, prompt = choose_prompt(self.loaded.text_rules, choice)
        unpooled = self._count_unpooled(prompt)

        def encode(group: Sequence[Prompt]) -> list[list[int] | InvalidRequest]:
            outcomes = self._encode_group(group, prompt, choice, truncates, parse_special)
            for at, (text, token_ids) in enumerate(zip(group, outcomes, strict=True)):
                if unpooled and isinstance(text, str) and not isinstance(token_ids, InvalidRequest):
                    outcomes[at] = marked = TextTokens(token_ids)
                    marked.unpooled = unpooled
            return outcomes

        threads = 1 if self.loaded.ctx.gpu is None else min(ENCODING_THREADS, (os.cpu_count() or 1) // 2)
        with closing(map_ahead(encode, texts, threads)) as encoded:
            for number, outcome in enumerate(itertools.chain.from_iterable(encoded)):
                if isinstance(outcome, ContextFull):
                    reason = f"text {number}: {outcome.reason}"
                    raise ContextFull(field, reason, outcome.prompt_tokens, outcome.context_tokens)
                if isinstance(outcome, InvalidRequest):
                    raise InvalidRequest(field, f"text {number}: {outcome.reason}")
                yield outcome

    def _count_unpooled(self, prompt: str) -> int:
        """Count the first tokens of a text that a mean leaves out, if the model's files exclude the prompt: as in
        sentence-transformers, the tokens of the prompt alone without a special token at its end."""
        if not prompt or not self.loaded.text_rules.leaves_prompts_out:
            return 0
        token_ids = self.encode_prompt(prompt, parse_special=False)
        return len(token_ids) - self.tokenizer.is_special(token_ids[-1])

    def finish_states(
        self, kind: Kind, states: Floats, token_ids: Sequence[int], field: str
    ) -> dict[int, float] | Floats:
        """Turn a text's states (tokens, hidden) into weights by token ids (`sparse`), or vectors of all tokens
        but the first (`multi`). Raises InvalidRequest naming `field`."""
        product = choose_product(self.loaded.text_rules, kind, field)
        if kind == "multi":
            return spread_tokens(product, states)
        unknown = (self.tokenizer.token_id("<unk>"), self.tokenizer.token_id("[UNK]"))
        ignored = {one for one in set(token_ids) if self.tokenizer.is_special(one) or one in unknown}
        return weigh_tokens(product, states, token_ids, ignored)

    def _encode_group(
        self, texts: Sequence[Prompt], prompt: str, choice: PromptChoice, truncates: bool, parse_special: bool
    ) -> list[list[int] | InvalidRequest]:
        """Return the tokens of each text, or the error that refuses it; the tokenizer gets all texts at once."""
        bounded = list[Prompt | InvalidRequest]()
        for text in texts:
            try:
                bounded.append(self._bound_text(text, prompt, choice, truncates))
            except InvalidRequest as error:
                bounded.append(error)
        written = [text for text in bounded if isinstance(text, str)]
        try:
            known = dict(zip(written, self.tokenizer.encode_all(written, parse_special=parse_special), strict=True))
        except InvalidRequest:  # each text is tried by itself below, to name the one at fault
            known = {}
        return [self._fit_text(text, known, truncates, parse_special) for text in bounded]

    def _bound_text(self, text: Prompt, prompt: str, choice: PromptChoice, truncates: bool) -> Prompt:
        if isinstance(text, str):
            return self._preparation.bound_characters(f"{prompt}{text}", truncates=truncates)
        if prompt and choice.is_given:
            raise InvalidRequest("prompt", "goes before texts, and these are token ids")
        return text

    def _fit_text(
        self, text: Prompt | InvalidRequest, known: Mapping[str, list[int]], truncates: bool, parse_special: bool
    ) -> list[int] | InvalidRequest:
        if isinstance(text, InvalidRequest):
            return text
        token_ids = known.get(text) if isinstance(text, str) else None
        if not token_ids:
            try:
                token_ids = self.encode_prompt(text, parse_special=parse_special)
            except InvalidRequest as error:
                return error
        limit = self.text_tokens
        if len(token_ids) <= limit:
            return token_ids
        if truncates:
            return self.tokenizer.cut(token_ids, limit)
        reason = (
            f"is too large: this model's maximum context length is {limit} tokens for a text, and this one has "
            f"{len(token_ids)}; `truncate` cuts it"
        )
        return ContextFull("input", reason, len(token_ids), limit)

    async def name_pages(self, request: TextRequest | ChatRequest) -> PageNames:
        """Return the names in the cache of the pages that the prompt of a request fills.

        Raises as `start` does if it cannot be a prompt.
        """
        token_ids, pictures = await self.run(self._preparation.encode_request, request, reads=request)
        names = self._name_pages(token_ids, self._preparation.find_adapter(request.adapter), pictures)
        return PageNames(names, len(token_ids), self.page_size)

    def _name_pages(self, token_ids: Sequence[int], adapter: Adapter | None, pictures: Pictures | None) -> list[bytes]:
        keys = self._start_keys(b"" if adapter is None else adapter.digest, pictures)
        return keys.cover(token_ids, len(token_ids) // self.page_size)

    async def stats(self) -> SessionStats:
        """Return the statistics: memory, contents of the cache, work done. During a long step those from before it."""
        stats, age_s = await self._figures.get()
        return replace(stats, age_s=age_s)

    def read_stats(self) -> SessionStats:
        """Return the statistics, for a blocking program; see `stats`."""
        return self._engine.call(self._collect_stats)

    def describe(self, name: str) -> WatchedModel:
        """Describe the model, called `name`, and its device, for watchers."""
        loaded = self.loaded
        return WatchedModel(
            name=name,
            architecture=loaded.config.architecture,
            device=loaded.ctx.device,
            isa=loaded.ctx.isa,
            threads=loaded.ctx.threads,
            context_tokens=self.context_tokens,
            kv_cache=self._kv_cache,
            weight_bytes=loaded.weight_bytes,
        )

    async def read_live(self) -> LiveReading:
        """Return the state of the engine now, and its work since the last reading.

        The first reading begins the record; it ends with `stop_live`, or after ten seconds without a reading.
        """
        return await self._engine.read_live(self.loaded.model.work)

    async def stop_live(self) -> None:
        """Stop recording what the engine does."""
        await self._engine.stop_live()

    async def describe_page(self, group: int, page: int) -> PageRecord | None:
        """Return one page of the cache in full, None if there is no such page."""
        return await self._engine.describe_page(group, page)

    async def find_limits(self) -> MachineLimits | None:
        """Return the limits of this machine, None if they were never measured."""
        return await asyncio.to_thread(self._kept_limits.find, self.loaded)

    async def measure_limits(self) -> MachineLimits:
        """Measure and keep the limits of this machine; calls at the same time share one. Answers pause for a second.

        Raises DeviceError if the model does not run on the processor, or memory is short.
        """
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure_limits())
        return await asyncio.shield(self._measuring)

    async def _measure_limits(self) -> MachineLimits:
        limits = await self._engine.run_between_steps(lambda _: measure_limits(self.loaded))
        await asyncio.to_thread(self._kept_limits.keep, self.loaded.ctx.isa, self.loaded.ctx.threads, limits)
        return limits

    def explain_missing_limits(self) -> str:
        """Return the reason why `find_limits` finds nothing, and what helps."""
        return explain_missing(self.loaded)

    def count_kernels(self) -> list[Dispatch]:
        """Return how often each kernel ran since the model was loaded."""
        return self.loaded.ctx.ledger.snapshot().dispatches

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones at most `drain_s` seconds to end, cancel the rest, free the model.

        Every stream gets its last events. May be called more than once.
        """
        await self._engine.stop(drain_s)
        self.close()

    def close(self) -> None:
        """Stop at once, for a blocking program; write cache pages to disk if the settings ask for that."""
        self._engine.close()
        self._threads.stop()
        self.adapters.stop()
        self.loaded.close()


def map_ahead(work: Callable[[list[Prompt]], T], texts: Iterable[Prompt], threads: int) -> Generator[T, None, None]:
    """Yield the results of `work` on groups of texts, in order; with several `threads` some groups are done ahead.

    On a GPU a small encoder computes texts faster than one thread tokenises them. A tokenizer releases the interpreter
    lock once for a group: taking it back from a busy engine takes longer than tokenising one text.
    """
    groups = _group(texts)
    first = list(itertools.islice(groups, 2))
    if threads < 2 or len(first) < 2:
        yield from map(work, itertools.chain(first, groups))
        return
    pool = WorkThreads("mlxr-encode", threads)
    started = deque(pool.submit(work, group) for group in first)
    try:
        while started:
            result = started.popleft().result()
            started += [pool.submit(work, group) for group in itertools.islice(groups, threads + 1 - len(started))]
            yield result
    finally:
        pool.stop()


def _group(texts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Split texts into groups; long texts are nearly alone, as all tokens of a group are in memory at once."""
    group, length = list[Prompt](), 0
    for text in texts:
        group.append(text)
        length += len(text)
        if len(group) == FEW_TEXTS or length >= GROUP_CHARACTERS:
            yield group
            group, length = [], 0
    if group:
        yield group


def _is_slow(request: TextRequest | ChatRequest) -> bool:
    """Return True if preparing may take long enough to delay others.

    That is so for a grammar, a long text, pictures, and every chat template, which is an unknown program.
    """
    is_long = isinstance(request, ChatRequest) or len(request.prompt) > INLINE_CHARACTERS
    return is_long or bool(isinstance(request, TextRequest) and request.pictures) or request.grammar is not None
