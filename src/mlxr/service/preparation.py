"""Prepares requests: makes the engine's request, and the answers that turn its tokens into events. All callers use it.

Knows the tokenizer, the conversation's format and grammars, not the engine. Blocking programs and those with an event
loop both begin here, so a conversation is the same for all of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from mlxr.core.errors import ContextFull, InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.memory import return_free_memory
from mlxr.core.types import SamplingParams
from mlxr.core.work_threads import LEAST_URGENT, WorkThreads
from mlxr.engine.pictures import Pictures
from mlxr.engine.request import EngineRequest, TokenConstraint
from mlxr.loading import Adapter
from mlxr.service.adapters import AdapterChoice, Adapters
from mlxr.service.answer import PLAIN, Answer, AnswerFormat
from mlxr.service.chat import Chat, Rules, SizeBound, Turn, count_characters
from mlxr.service.chat_templates import BROUGHT, choose_template
from mlxr.service.embedding import Pooling, TextTokens
from mlxr.service.messages import check_messages
from mlxr.service.reasoning import GateTokens, ReasoningGate, Tags, collect_gate_tokens
from mlxr.service.requests import ChatRequest, Prompt, TextRequest, encode_prompt, find_message_ends, fit_window
from mlxr.service.sight import Sight
from mlxr.service.thought_budget import Thinking, ThoughtBudget, ThoughtEnd, ThoughtTokens, collect_thought_tokens
from mlxr.tokenizers import ChatTemplate, Detokenizer, Tokenizer, chat_template_from_source, refuse_chat

if TYPE_CHECKING:
    from mlxr.service.grammar import GrammarCompiler, GrammarConstraint
    from mlxr.service.grammar_library import NativeHost


MAX_BYTES = 40
MAX_TAIL_TOKENS = 20
_KEPT_TEXTS = 256

Sequences = frozenset[tuple[int, ...]]


class BreakerFinder:
    """Finds the token sequences that hold a breaker's text, among the first `vocab_size` tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._spelling = [tokenizer.token_bytes(i) for i in range(min(vocab_size, tokenizer.vocab_size))]
        self._by_end: dict[int, list[int]] = {}
        for token_id, spelling in enumerate(self._spelling):
            if spelling:
                self._by_end.setdefault(spelling[-1], []).append(token_id)
        self._find = lru_cache(_KEPT_TEXTS)(self._find_one)

    def find(self, texts: Iterable[str]) -> Sequences:
        """Return the sequences of all `texts`; of longer texts the first 40 bytes count."""
        return frozenset().union(*(self._find(text) for text in texts))

    def _find_one(self, text: str) -> Sequences:
        wanted = text.encode(errors="replace")[:MAX_BYTES]
        found: set[tuple[int, ...]] = {
            (token_id,) for token_id, spelling in enumerate(self._spelling) if wanted in spelling
        }
        for cut in range(1, len(wanted)):
            rest = wanted[cut:].decode(errors="ignore")
            tail = tuple(self._tokenizer.encode(rest, add_special=False)[:MAX_TAIL_TOKENS])
            heads = self._by_end.get(wanted[cut - 1], ())
            found |= {(head, *tail) for head in heads if tail and self._spelling[head].endswith(wanted[:cut])}
        return frozenset(found)


MAX_BROUGHT_TEMPLATES = 8  # parsed templates of requests that are kept


@frozen
class Prepared:
    """One request, ready for the engine, and the answers that turn the engine's events into their own."""

    request: EngineRequest
    answers: list[Answer]  # fed with the engine's events, each by its index
    relaxed: tuple[str, ...] = ()  # keywords of its schemas that are not enforced
    thought_end: ThoughtEnd | None = None  # ends the thoughts of its answers; None if there can be none


class Preparation:
    """Prepares requests to one model. Safe to use from several threads.

    A prompt that cannot fit in `context_tokens` is refused before it is tokenised. `system` is the system message of
    conversations that have none; `host` the context of the model, see `GrammarCompiler`. Requests may name one of
    `adapters`; those that do not get the one named `adapter`. `thinking` has the defaults for thoughts. `sight` shows
    the model pictures.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        context_tokens: int,
        model_name: str,
        system: str | None = None,
        host: NativeHost | None = None,
        adapters: Adapters | None = None,
        adapter: str | None = None,
        thinking: Thinking = Thinking(),  # noqa: B008 - a constant
        sight: Sight | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._size_bound = bound = SizeBound(tokenizer, context_tokens)
        self._vocab_size = vocab_size
        self._model_name = model_name
        self._thinking = thinking
        self._open_chat = partial(
            Chat, tokenizer, system=system, size_bound=bound, budget_tokens=thinking.budget_tokens, sight=sight
        )
        self._sight, self._sees = sight, sight is not None and sight.is_there
        self._template = template
        self._chat = None if template is None else self._open_chat(template)
        self._chats: OrderedDict[str, Chat] = OrderedDict()  # with the templates that requests brought
        self._gates: dict[Tags, GateTokens] = {}
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._host = host
        self._adapters, self._adapter = adapters, adapter
        self._thoughts: tuple[tuple[Tags, str], ThoughtTokens] | None = None

    def fit_think(self, think: bool | str | None) -> bool | str | None:
        """Return the setting nearest to `think` that this model has; see `Chat.fit_think`."""
        return think if self._chat is None else self._chat.fit_think(think)

    def warm_up(self) -> None:
        """Do work now that would delay the first conversation."""
        if self._chat is not None:
            self._chat.warm_up()

    @property
    def capabilities(self) -> frozenset[str]:
        """The model's capabilities, of "completion", "tools", "thinking", "vision", "audio" and "embedding".

        Every model that can chat can call tools; if its template has no words for them, it gets ours.
        """
        found = {"completion", "embedding"}
        if self._chat is not None:
            found |= {"tools"} if self._chat.tags is None else {"tools", "thinking"}
            found |= {"vision"} if self._sees else set()
            found |= {"audio"} if self._sight is not None and not self._sight.deaf else set()
        return frozenset(found)

    @property
    def can_chat(self) -> bool:
        """True if there is a chat template."""
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, None without one."""
        return None if self._template is None else self._template.source

    def encode_prompt(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of plain text, or check ready ids; raises InvalidRequest."""
        return encode_prompt(
            self.tokenizer, self._vocab_size, prompt, add_special=add_special, parse_special=parse_special
        )

    def bound_characters(self, text: str, *, truncates: bool) -> str:
        """Return the text, cut to the context's bound if it `truncates`; otherwise raises ContextFull beyond that."""
        if truncates:
            return self._size_bound.cut(text)
        self._size_bound.check("prompt", text)
        return text

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a conversation; raises TemplateError without a chat template, InvalidRequest for bad
        messages.
        """
        chat, request = self._find_chat(request)
        return chat.encode(request).token_ids

    def render_chat(self, request: ChatRequest) -> str:
        """Return the text of a conversation's prompt, special tokens spelt out; raises as `encode_chat` does."""
        chat, request = self._find_chat(request)
        return chat.render(request)

    def encode_request(self, request: TextRequest | ChatRequest) -> tuple[list[int], Pictures | None]:
        """Return only the token ids and pictures that `prepare` would give to the engine; raises as it does."""
        self._check_size(request)
        if not isinstance(request, ChatRequest):
            token_ids, pictures = self._encode_text(request)
            return list(_fit(token_ids, request, pictures)[0]), pictures
        chat, request = self._find_chat(request)
        turn = chat.encode(request)
        return list(_fit(turn.token_ids, request, turn.pictures)[0]), turn.pictures

    def _encode_text(self, request: TextRequest) -> tuple[list[int], Pictures | None]:
        if not request.pictures or self._sight is None:
            return self.encode_prompt(request.prompt), None
        text, shown = self._sight.take_text(request)
        spelt, pictures = shown.spell(text)
        return self._sight.place(self.encode_prompt(spelt), pictures)

    def _check_size(self, request: TextRequest | ChatRequest) -> None:
        if request.window is None:  # with one, a prompt that is too long is cut
            if isinstance(request, ChatRequest):
                self._size_bound.check("messages", request.messages)
            else:
                self._size_bound.check("prompt", request.prompt)

    def prepare(self, request: TextRequest | ChatRequest, client: str | None = None) -> Prepared:
        """Prepare a request; raises all errors but the engine's own. `client` names the client."""
        self._check_size(request)
        if isinstance(request, ChatRequest):
            prepared = self._prepare_chat(request)
        else:
            token_ids, pictures = self._encode_text(request)
            prepared = self.prepare_tokens(*_fit(token_ids, request, pictures), echo=request.echo)
            prepared = replace(prepared, request=replace(prepared.request, pictures=pictures))
            if request.grammar is not None:
                constraint = self._compile(Rules(request.grammar, request.grammar.field))
                prepared = _constrain(prepared, constraint, constraint.relaxed)
            else:
                prepared = self.bound_text(prepared)
        has_echo = isinstance(request, TextRequest) and request.echo is not None
        asked = replace(
            prepared.request,
            priority=request.priority,
            client=client,
            deadline_s=request.deadline_s,
            uses_cache=request.cache_prompt,
            adapter=self.find_adapter(request.adapter),
            draft_tokens=request.drafts.tokens,
            prediction_ids=self._read_prediction(request.drafts.prediction),
            reports_progress=request.reports_progress,
            scores_prompt=has_echo and request.params.logprobs is not None,
        )
        return replace(prepared, request=asked)

    def prepare_text(
        self,
        prompt: Prompt,
        pooling: Pooling,
        *,
        client: str | None = None,
        deadline_s: float | None = None,
        adapter: AdapterChoice | Adapter | None = None,
    ) -> EngineRequest:
        """Return the engine's request for a text to embed; raises InvalidRequest."""
        token_ids = self.encode_prompt(prompt)
        unpooled = prompt.unpooled if isinstance(prompt, TextTokens) else 0
        return EngineRequest(
            token_ids,
            pooling=pooling,
            unpooled=min(unpooled, len(token_ids) - 1),  # at least one token makes the vector
            client=client,
            deadline_s=deadline_s,
            adapter=self.find_adapter(adapter),
        )

    def find_adapter(self, wanted: AdapterChoice | Adapter | None) -> Adapter | None:
        """Return the adapter of that name, or of None the default one. Raises InvalidRequest for an unknown name."""
        chosen = self._adapter if wanted is None else wanted
        if chosen is None or isinstance(chosen, Adapter):
            return chosen
        if self._adapters is None:
            raise InvalidRequest("adapter", "none can be loaded here")
        return self._adapters.choose(chosen)

    def prepare_tokens(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        format: AnswerFormat = PLAIN,  # noqa: A002
        echo: str | None = None,
    ) -> Prepared:
        """Prepare a prompt that is token ids already; its answers begin with `echo`."""
        stop_tokens = self._find_stop_tokens(params)
        answers = [
            Answer(
                Detokenizer(self.tokenizer, prompt_ids=token_ids),
                params,
                len(token_ids),
                stop_tokens,
                index,
                format,
                echo=echo,
            )
            for index in range(params.n)
        ]
        request = EngineRequest(
            list(token_ids),
            replace(params, stop_token_ids=params.stop_token_ids | stop_tokens.keys()),
            boundary_tokens=find_message_ends(self.tokenizer, token_ids),
            dry_breaker_ids=self._find_breakers(params),
        )
        return Prepared(request, answers)

    def _prepare_chat(self, request: ChatRequest) -> Prepared:
        chat, request = self._find_chat(request)
        rules = chat.write_rules(request)
        turn = chat.encode(request)
        inner = None if rules is None else self._compile_if(rules, request)
        gated = None if inner is None else self._gate(chat, inner, request, turn)
        answer_format = chat.make_format(request, turn, is_enforced=gated is not None)
        prepared = self.prepare_tokens(*_fit(turn.token_ids, request, turn.pictures), answer_format)
        prepared = replace(prepared, request=replace(prepared.request, pictures=turn.pictures))
        relaxed = () if rules is None or inner is None else (*inner.relaxed, *rules.relaxed)
        constraint, end = self._bound_chat(chat, gated, request, turn)
        return _constrain(prepared, constraint, relaxed, end)

    def _bound_chat(
        self, chat: Chat, inner: TokenConstraint | None, request: ChatRequest, turn: Turn
    ) -> tuple[TokenConstraint | None, ThoughtEnd | None]:
        """Return a constraint that also bounds the thought, and the object that ends the thought; `inner` and None if
        no thought can come.
        """
        budget_tokens = chat.find_budget(request)
        is_silent = request.think is False and (inner is not None or budget_tokens is None)
        if chat.tags is None or turn.has_thought or is_silent:
            return inner, None
        message = self._thinking.message if request.thinking_message is None else request.thinking_message
        tokens, end = self._read_thoughts(chat.tags, message), ThoughtEnd()
        return ThoughtBudget(tokens, budget_tokens, end, inner, is_thinking=turn.is_thinking), end

    def bound_text(self, prepared: Prepared) -> Prepared:
        """Add the budget of the thought that a text to continue has begun, or that its answer opens."""
        tags = None if self._chat is None else self._chat.tags
        given = prepared.request.params.thinking_budget
        budget_tokens = self._thinking.budget_tokens if given is None else given
        if tags is None or budget_tokens is None or budget_tokens < 0:
            return prepared
        text = self.tokenizer.decode(prepared.request.token_ids, skip_special=False)
        is_thinking = text.rfind(tags.open) > text.rfind(tags.close)
        if not is_thinking and text.rstrip().endswith(tags.close):
            return prepared
        tokens, end = self._read_thoughts(tags, self._thinking.message), ThoughtEnd()
        constraint = ThoughtBudget(tokens, budget_tokens, end, is_thinking=is_thinking)
        return _constrain(prepared, constraint, thought_end=end)

    def _read_thoughts(self, tags: Tags, message: str) -> ThoughtTokens:
        """Return tags and message as tokens; those of the last message are kept."""
        kept = self._thoughts
        if kept is None or kept[0] != (tags, message):
            kept = (tags, message), collect_thought_tokens(self.tokenizer, tags, message, self._vocab_size)
            self._thoughts = kept
        return kept[1]

    def _compile_if(self, rules: Rules, request: ChatRequest) -> GrammarConstraint | None:
        """Return the compiled rules; None if they are optional and cannot be enforced."""
        if rules.is_optional and request.params.ignore_eos:
            return None
        try:
            return self._compile(rules)
        except InvalidRequest:
            if rules.is_optional:
                return None
            raise

    def _gate(self, chat: Chat, inner: GrammarConstraint, request: ChatRequest, turn: Turn) -> TokenConstraint:
        """Return the rules as a constraint that holds after any reasoning."""
        if chat.tags is None or turn.has_thought or request.think is False:
            return inner
        gate = self._gates.get(chat.tags)
        if gate is None:
            gate = self._gates[chat.tags] = collect_gate_tokens(self.tokenizer, chat.tags, self._vocab_size)
        return ReasoningGate(gate, inner, is_thinking=turn.is_thinking)

    def _compile(self, rules: Rules) -> GrammarConstraint:
        with self._lock:
            if self._compiler is None:
                from mlxr.service.grammar import GrammarCompiler  # the library takes a while to import

                eos_ids = self.tokenizer.eos_ids
                self._compiler = GrammarCompiler(self.tokenizer, eos_ids, self._vocab_size, self._host)
        return self._compiler.compile(rules.grammar, rules.answer, field=rules.field)

    def _find_chat(self, request: ChatRequest) -> tuple[Chat, ChatRequest]:
        """Return the `Chat` with the request's template or the model's own, and the request for it."""
        if request.chat_template is not None:
            chat = self._find_brought(request.chat_template)
            return chat, replace(request, think=None if chat.tags is None else chat.fit_think(request.think))
        if self._chat is None:
            check_messages(request.messages)
            raise refuse_chat(self._model_name)
        return self._chat, request

    def _find_brought(self, given: str) -> Chat:
        with self._lock:
            chat = self._chats.get(given)
            if chat is not None:
                self._chats.move_to_end(given)
                return chat
        source = choose_template(given, "chat_template")
        chat = self._open_chat(chat_template_from_source(source, self.tokenizer, self._template, BROUGHT))
        with self._lock:
            self._chats[given] = chat
            if len(self._chats) > MAX_BROUGHT_TEMPLATES:
                self._chats.popitem(last=False)
        return chat

    @cached_property
    def _breakers(self) -> BreakerFinder:
        return BreakerFinder(self.tokenizer, self._vocab_size)

    def _find_breakers(self, params: SamplingParams) -> frozenset[tuple[int, ...]]:
        return self._breakers.find(params.dry_sequence_breakers) if params.dry_multiplier > 0 else frozenset()

    def _read_prediction(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a predicted answer: at most as many as an answer can have."""
        if not text:
            return ()
        try:
            token_ids = self.tokenizer.encode(self._size_bound.cut(text), add_special=False, parse_special=False)
        except InvalidRequest as error:
            raise InvalidRequest("prediction", error.reason) from None
        return tuple(token_ids[: self._size_bound.context_tokens])

    def _find_stop_tokens(self, params: SamplingParams) -> dict[int, str]:
        """Return the stop strings that are one special token: they never become text, so the engine must stop there."""
        found = {}
        for stop in params.stop:
            token_id = self.tokenizer.token_id(stop)
            if token_id is not None and self.tokenizer.is_special(token_id):
                found[token_id] = stop
        return found


def _constrain(
    prepared: Prepared,
    constraint: TokenConstraint | None,
    relaxed: tuple[str, ...] = (),
    thought_end: ThoughtEnd | None = None,
) -> Prepared:
    """Return the request with a constraint on its answers."""
    request = replace(prepared.request, constraint=constraint)
    return replace(prepared, request=request, relaxed=relaxed, thought_end=thought_end)


def _fit(
    token_ids: list[int], request: TextRequest | ChatRequest, pictures: Pictures | None
) -> tuple[Sequence[int], SamplingParams]:
    """Cut the prompt to its window; one with pictures is not cut. Raises ContextFull."""
    if request.window is None:
        return token_ids, request.params
    fitted, params = fit_window(token_ids, request.params, request.window)
    if pictures is not None and len(fitted) < len(token_ids):
        raise ContextFull.of("prompt", len(token_ids), len(fitted))
    return fitted, params


T = TypeVar("T")

QUICK_THREADS, LONG_THREADS = 4, 2
QUICK_NICENESS = 10  # a tenth of a thread that computes: many prompts at once would halve the pace of all answers
LONG_CHARACTERS = 1 << 16
GRAMMAR_WEIGHT = 8  # a character of a grammar takes as long as this many of a text


class PreparingThreads:
    """Two groups of threads that prepare requests: one for short prompts and one for long ones."""

    def __init__(self) -> None:
        self._quick = WorkThreads("mlxr-prepare", QUICK_THREADS, niceness=QUICK_NICENESS)
        self._long = WorkThreads("mlxr-prepare-long", LONG_THREADS, niceness=LEAST_URGENT)

    async def run(self, work: Callable[..., T], *arguments: object, reads: object = None) -> T:
        """Run `work(*arguments)` and return its result. `reads` is the request, or the texts, that it reads."""
        if weigh(reads) <= LONG_CHARACTERS:
            return await self._quick.run(work, *arguments)
        try:
            return await self._long.run(work, *arguments)
        finally:
            self._long.submit(return_free_memory)

    def stop(self) -> None:
        """Begin nothing more; does not wait for running work."""
        self._quick.stop()
        self._long.stop()


def weigh(value: object) -> int:
    """Count the characters in a request or a JSON-like value; stops once it is certain that they are many."""
    if not isinstance(value, TextRequest | ChatRequest):
        return count_characters(value, LONG_CHARACTERS, LONG_CHARACTERS)
    grammar = 0 if value.grammar is None else GRAMMAR_WEIGHT * len(value.grammar.text)
    if isinstance(value, TextRequest):
        return grammar + weigh(value.prompt)
    tools = sum(weigh(tool.parameters) for tool in value.tools)
    return grammar + GRAMMAR_WEIGHT * tools + weigh(value.messages)
