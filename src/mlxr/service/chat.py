"""A conversation with one model: from messages and tools to the prompt, and how its answers are to be read.

Knows the model's chat template and what it tells of the model: its reasoning tags, its format of tool calls, the
variables it reads. Token ids come out; the engine is not known here.

`SpecialGuard` keeps what users write from becoming control tokens. A chat template writes control tokens as text, and
so could anybody who writes `<|im_end|>` into a message. Before the template sees a conversation, every spelling of a
special token in it gets a mark: a character that occurs nowhere in the conversation. In the rendered text only the
template's own spellings are whole. Once the text is encoded, the tokens of the marks are taken out, so users' text is
read as plain characters. Tokens that a vocabulary spells with one character cannot be told from text.

`SizeBound` knows how much text can fit in a context without tokenising it: a token spells at most as many characters
as the longest one of the vocabulary, so a text that is much longer is refused at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from mlxr.core.errors import ContextFull, ConversationRefused, InvalidRequest, NoTemplateWorker
from mlxr.core.frozen import frozen
from mlxr.core.types import Grammar
from mlxr.engine.pictures import Pictures
from mlxr.service.answer import WRAPPERS, AnswerFormat, OutputParser
from mlxr.service.chat_templates import REASONING_KEYS, Messages, TurnOrder, list_shapes, merge_systems
from mlxr.service.messages import check_messages, list_repeated_calls, write_json
from mlxr.service.reasoning import BUDGET, EFFORT, EFFORTS, SWITCHES, ReasoningSplitter, Tags, find_level, find_tags
from mlxr.service.requests import ChatRequest, Ending, NamedTool, Tool, continues_reasoning, cut_at_mark, mark_end
from mlxr.service.schema import Enforceable, SchemaError, enforce
from mlxr.service.sight import Part, Sight
from mlxr.service.tools import TOOLS_VARIABLE, ToolFormat, find_format
from mlxr.service.tools.format import describe_tool
from mlxr.tokenizers import ChatTemplate, Tokenizer

# Private-use characters: no normalisation changes them, no text has them by accident, and no word contains them.
_MARKS = tuple(chr(0xE000 + 97 * step) for step in range(60))
_TRIES = 6


class SpecialGuard:
    """The guard of one vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def warm_up(self) -> None:
        """Look through the vocabulary now, not with the first request; a large one takes a while."""
        _ = self._pattern

    def choose_marks(self, *values: object) -> Sequence[str]:
        """Return marks that occur nowhere in `values`; none if no text in them spells a special token."""
        texts = [text for value in values for text in _list_texts(value)]
        pattern = self._pattern
        if pattern is None or not any(pattern.search(text) for text in texts):
            return ()
        return [mark for mark in _MARKS if not any(mark in text for text in texts)][:_TRIES]

    def put_marks(self, value: object, mark: str) -> object:
        """Return a copy of a JSON-like value with `mark` in every spelling of a special token."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(lambda match: match[0] + mark, value)
        if isinstance(value, Mapping):
            return {self.put_marks(key, mark): self.put_marks(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_marks(item, mark) for item in value]
        return value

    def take_marks(self, token_ids: Sequence[int], mark: str, count: int) -> list[int] | None:
        """Return `token_ids` without the tokens of `count` marks; None if a mark shares a token with other text."""
        spelt = mark.encode()
        kept: list[int] = []
        run: list[int] = []  # tokens that may be those of a mark
        found = 0
        for token_id in token_ids:
            run.append(token_id)
            while run and not spelt.startswith(b"".join(map(self._tokenizer.token_bytes, run))):
                kept.append(run.pop(0))
            if run and b"".join(map(self._tokenizer.token_bytes, run)) == spelt:
                found += 1
                run.clear()
        return [*kept, *run] if found == count else None

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """The first character of every special token's spelling, where the rest follows."""
        tokenizer = self._tokenizer
        specials = (tokenizer.token_text(index) for index in range(tokenizer.vocab_size) if tokenizer.is_special(index))
        texts = sorted(text for text in specials if len(text) > 1)
        groups = [
            f"{re.escape(first)}(?={'|'.join(re.escape(text[1:]) for text in group)})"
            for first, group in groupby(texts, key=lambda text: text[0])
        ]
        return re.compile("|".join(groups)) if groups else None


def _list_texts(value: object) -> Iterator[str]:
    """All texts in a JSON-like value, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def refuse_unprotected() -> InvalidRequest:
    """Return the error for texts in which no mark could be used."""
    return InvalidRequest("messages", "spell a control token, which this vocabulary cannot write as text")


MANY_ITEMS = 64  # of a longer list the kinds of items are looked at first
_NUMBERS = {int, float}
SLACK = 4  # for vocabularies that shorten a text before they cut it, as NFKC or runs of spaces


class SizeBound:
    """The bound of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer, self.context_tokens = tokenizer, context_tokens

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, map(self._tokenizer.token_text, range(self._tokenizer.vocab_size))))

    @property
    def characters(self) -> int:
        """The most characters that a text may have."""
        return SLACK * self.context_tokens * self._longest

    def cut(self, text: str) -> str:
        """Return the beginning of a text, as many characters as may fit in the context."""
        return text if len(text) <= SLACK * self.context_tokens else text[: self.characters]

    def check(self, field: str, value: object, allowance: int = 0) -> None:
        """Raise ContextFull about `field` when the strings in a JSON-like value cannot fit in the context.

        They may have `allowance` more characters than fit.
        """
        if isinstance(value, list | tuple) and value and isinstance(value[0], int):  # a prompt that is ids already
            if len(value) > self.context_tokens:
                raise ContextFull.of(field, len(value), self.context_tokens)
            return
        enough = SLACK * self.context_tokens + allowance
        if count_characters(value, enough) <= enough:
            return  # fits even where each token is one character; the vocabulary need not be read
        characters = count_characters(value, self.characters + allowance)
        if characters > self.characters + allowance:
            reason = (
                f"this model's maximum context length is {self.context_tokens} tokens, which cannot hold a prompt of "
                f"{characters if isinstance(value, str) else f'more than {self.characters}'} characters"
            )
            raise ContextFull(field, reason, characters // self._longest, self.context_tokens)


def count_characters(value: object, enough: int, most_items: int | None = None) -> int:
    """Return the number of characters of the strings in a JSON-like value; stops counting above `enough`.

    A list of more than `most_items` counts as more than enough, whatever it holds.
    """
    found, waiting = 0, [value]
    while waiting and found <= enough:
        part = waiting.pop()
        if isinstance(part, str):
            found += len(part)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            if most_items is not None and len(part) > most_items:
                return enough + len(part)
            if len(part) < MANY_ITEMS or not set(map(type, part)) <= _NUMBERS:
                waiting.extend(part)
    return found


_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@frozen
class Rules:
    """The grammar that an answer must follow.

    `field` names the part of the request that asks for it. If it `is_optional` and cannot be enforced, the answer is
    read as well as possible. `answer` is what `@answer` in the grammar stands for. `relaxed` are keywords of the tools'
    schemas that no grammar can hold.
    """

    grammar: Grammar | str
    field: str
    is_optional: bool = False
    answer: Grammar | None = None
    relaxed: tuple[str, ...] = ()


@frozen
class Turn:
    """A conversation ready to be answered: its prompt ends inside the reasoning (`is_thinking`), right behind it
    (`has_thought`), or elsewhere.
    """

    token_ids: list[int]
    is_thinking: bool
    has_thought: bool
    pictures: Pictures | None = None


class _Parts(NamedTuple):
    """The parts of a conversation that clients wrote; a tool is its name, description and parameters."""

    messages: Any
    tools: Any
    values: Any
    system: Any


class Chat:
    """Conversations with one model. Safe to use from several threads.

    A prompt longer than `size_bound` allows is refused before it is tokenised. `budget_tokens` limits the reasoning of
    requests that do not say (None: no limit). `sight` takes in pictures.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system: str | None = None,
        size_bound: SizeBound | None = None,
        budget_tokens: int | None = None,
        sight: Sight | None = None,
    ) -> None:
        self._sight = sight or Sight(tokenizer, None, bytes, "it has no vision tower", 0)
        self._tokenizer, self._template, self._system, self._size_bound = tokenizer, template, system, size_bound
        self._budget_tokens = budget_tokens
        self._guard = SpecialGuard(tokenizer)
        self.tags: Tags | None = find_tags(template.source)

    def warm_up(self) -> None:
        """Look at vocabulary and template now, not with the first request."""
        self._guard.warm_up()
        with suppress(NoTemplateWorker):  # the first request tries again
            _ = self._format
            self._turn_order.warm_up()

    def render(self, request: ChatRequest) -> str:
        """Return the text of the prompt, special tokens spelt out; see `encode`."""
        request, shown = self._sight.take(request)
        return shown.spell(self._write(request, self._collect(request)))[0]

    def encode(self, request: ChatRequest) -> Turn:
        """Return the prompt; raises TemplateError, or InvalidRequest if the model cannot have this conversation."""
        request, shown = self._sight.take(request)
        parts = self._collect(request)
        try:
            marks = self._guard.choose_marks(*parts)
            for mark in marks:
                guarded = _Parts(*(self._guard.put_marks(part, mark) for part in parts))
                text, pictures = shown.spell(self._write(request, guarded))
                token_ids = self._guard.take_marks(self._tokenize(text, request), mark, text.count(mark))
                if token_ids is not None:
                    return self._make_turn(request, text, token_ids, pictures)
        except RecursionError:
            raise InvalidRequest("messages", "or the tools are nested too deeply") from None
        if marks:
            raise refuse_unprotected()
        text, pictures = shown.spell(self._write(request, parts))
        return self._make_turn(request, text, self._tokenize(text, request), pictures)

    def write_rules(self, request: ChatRequest) -> Rules | None:
        """Return the grammar that the answer must follow, after any reasoning.

        Raises InvalidRequest if the last message has begun the answer without it.
        """
        rules = self._make_rules(request)
        if rules is None or request.ending != "continued" or continues_reasoning(request.messages):
            return rules
        if rules.is_optional:  # in formats that mark answers they also hold the mark
            return None if self._format.marks_answers else rules
        raise InvalidRequest(rules.field, "cannot hold for an answer that the last message has begun")

    def _make_rules(self, request: ChatRequest) -> Rules | None:
        tools = list_tools(request)
        if not tools and (request.grammar is None or not self._format.marks_answers):
            return None if request.grammar is None else Rules(request.grammar, request.grammar.field)
        is_free = not tools or request.tool_choice == "auto"
        answer = request.grammar if is_free else None
        chosen, relaxed = [], dict[str, None]()
        for index, tool in enumerate(tools):
            if not isinstance(request.tool_choice, NamedTool) or tool.name == request.tool_choice.name:
                enforceable = _enforce(tool, f"tools[{index}].parameters", must_hold=not is_free)
                chosen.append(replace(tool, parameters=enforceable.schema))
                relaxed |= dict.fromkeys(enforceable.relaxed)
        special_ids = {marker: self._find_special(marker) for marker in self._format.markers}
        lark = self._format.write_grammar(
            chosen,
            must_call=not is_free,
            is_parallel=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
            specials={marker: f"<[{index}]>" for marker, index in special_ids.items() if index is not None},
            answer=None if answer is None else "@answer",
        )
        if lark is None:
            return None
        field = "tools" if tools or answer is None else answer.field
        return Rules(lark, field, is_free and answer is None, answer, tuple(relaxed))

    def make_format(self, request: ChatRequest, turn: Turn, *, is_enforced: bool) -> AnswerFormat:
        """Return the format in which the answers are read; `is_enforced` says that the rules hold."""
        tools, tags, tool_format = list_tools(request), self.tags, self._format
        if not tools and tags is None:
            return AnswerFormat()
        # Where an answer in JSON may begin like a call, a call is sure only once it is complete.
        is_sure = is_enforced and (request.grammar is None or request.tool_choice != "auto" or tool_format.marks_calls)
        once = not request.parallel_tool_calls or isinstance(request.tool_choice, NamedTool)
        is_free = request.tool_choice == "auto" and request.grammar is None
        repeated = list_repeated_calls(request.messages) if is_free else []
        answered = frozenset((name, write_json(arguments)) for name, arguments in repeated)

        has_parser = bool(tools) or tool_format.marks_answers
        wrappers = [spelling for spelling in WRAPPERS if spelling in self._template.source]

        def open_parser() -> OutputParser:
            reasoning = None
            if tags is not None and not turn.has_thought and not tool_format.marks_answers:
                reasoning = ReasoningSplitter(tags, is_open=turn.is_thinking)
            calls = tool_format.open_parser(tools, is_enforced=is_sure) if has_parser else None
            if calls is not None:
                calls.max_calls = 1 if once else None
                calls.answered, calls.is_bound = answered, is_enforced and not is_free
                calls.place = "thought" if turn.is_thinking else "text" if turn.has_thought else "start"
            return OutputParser(reasoning, calls, wrappers, drops_repeats=request.tool_choice == "required")

        shown = [*((tags.open, tags.close) if tags is not None else ()), *(tool_format.markers if has_parser else ())]
        ids = {spelling: self._find_special(spelling) for spelling in shown}
        return AnswerFormat(
            open_parser, {index: spelling for spelling, index in ids.items() if index is not None}, tool_format.make_id
        )

    def fit_think(self, think: bool | str | None) -> bool | str | None:
        """Return the setting nearest to `think` that this model has, for callers who cannot know its settings.

        A level becomes one that the model knows. If it knows none, the level stays if it stands for a budget, and
        becomes "on" (True) otherwise. If reasoning cannot be switched off, "off" (False) becomes the lowest level, or
        None without levels.
        """
        levels = () if self.tags is None or EFFORT not in self._variables else self.tags.levels
        if isinstance(think, str):
            if levels:
                return find_level(think, levels)
            return think if EFFORT in self._variables or think in EFFORTS else True
        if think is not False or self._switches or (self.tags is None and EFFORT not in self._variables):
            return think
        return levels[0] if levels else None

    def find_budget(self, request: ChatRequest) -> int | None:
        """Return the most tokens of reasoning; None for any number.

        First counts the budget of the request or its model; then the effort of the request, by a table, if the model
        knows no efforts itself; then the setting.
        """
        given = request.params.thinking_budget
        if given is None and isinstance(request.think, str) and EFFORT not in self._variables:
            given = EFFORTS.get(request.think)
        if given is None:
            return self._budget_tokens
        return None if given < 0 else given

    @cached_property
    def _format(self) -> ToolFormat:
        source = self._template.tool_source or self._template.source
        takes_tools = self._template.tool_source is not None or bool({"tools", TOOLS_VARIABLE} & self._variables)
        return find_format(source, takes_tools=takes_tools)

    @cached_property
    def _variables(self) -> frozenset[str]:
        return self._template.variables

    @cached_property
    def _switches(self) -> Sequence[str]:
        """The template's variables that switch reasoning on and off."""
        return [name for name in SWITCHES if name in self._variables]

    @cached_property
    def _turn_order(self) -> TurnOrder:
        return TurnOrder(self._template)

    @cached_property
    def _turn_order_with_tools(self) -> TurnOrder:
        if self._template.tool_source is None:
            return self._turn_order
        return TurnOrder(self._template, [describe_tool(Tool("probe"))])

    def _collect(self, request: ChatRequest) -> _Parts:
        """Check and return the parts that clients wrote: messages, tools and variables of the template."""
        tools = [(tool.name, tool.description, tool.parameters) for tool in list_tools(request)]
        messages = check_messages(request.messages)
        return _Parts(messages, tools, request.template_values, self._system)

    def _write(self, request: ChatRequest, parts: _Parts) -> str:
        """Return the text of the prompt. A conversation that the template refuses is tried again in other shapes.

        If the template takes none of them, raises its first error.
        """
        messages, tools, extra = self._arrange(request, parts)
        try:
            return self._render(request.ending, messages, tools, extra)
        except ConversationRefused:
            for shape in list_shapes(messages):
                with suppress(ConversationRefused):
                    return self._render(request.ending, shape, tools, extra)
            raise

    def _arrange(self, request: ChatRequest, parts: _Parts) -> tuple[Messages, Sequence[object] | None, dict[str, Any]]:
        """Return messages, tools and variables for the template. Texts that are added here may spell control tokens."""
        tools = [Tool(*tool) for tool in parts.tools]
        messages = mark_end(parts.messages) if request.ending == "continued" else list(map(dict, parts.messages))
        shown = [describe_tool(tool) for tool in tools] if self._format.shows_tools and tools else None
        extra = {**parts.values, **self._switch(self._choose_think(request))}
        budget_tokens = self.find_budget(request)
        if BUDGET in self._variables and BUDGET not in extra and budget_tokens is not None:
            extra[BUDGET] = budget_tokens
        if shown is not None and TOOLS_VARIABLE in self._variables:
            extra[TOOLS_VARIABLE] = [tool["function"] for tool in shown]
        order = self._turn_order if shown is None else self._turn_order_with_tools
        return order.arrange(self._prepare(messages, tools, parts.system)), shown, extra

    def _prepare(self, messages: Messages, tools: Sequence[Tool], system: str | None) -> Messages:
        """Return messages with the roles and keys that the template knows."""
        source = self._template.source
        keys = [key for key in REASONING_KEYS if key in source]
        for message in messages:
            if message["role"] == "developer" and "developer" not in source:
                message["role"] = "system"
            reasoning = message.pop("reasoning", None)
            if reasoning is not None:
                message.update(dict.fromkeys(keys, reasoning))
        if system is not None and not any(message["role"] in ("system", "developer") for message in messages):
            messages.insert(0, {"role": "system", "content": system})
        return self._format.prepare_messages(merge_systems(messages), tools)

    def _choose_think(self, request: ChatRequest) -> bool | str | None:
        """Return the request's `think`; a budget of 0 tokens switches reasoning off, as far as the template can."""
        if self.find_budget(request) == 0 and request.think is not False:
            return self.fit_think(False)
        return request.think

    def _switch(self, think: bool | str | None) -> dict[str, object]:
        """Return the template's variables for the value of `think`."""
        if think is None:
            return {}
        switches, has_effort = self._switches, EFFORT in self._variables
        if isinstance(think, str):
            if not has_effort and think in EFFORTS and (self.tags is not None or switches):
                return dict.fromkeys(switches, True)  # the effort stands for a budget
            if not has_effort:
                raise InvalidRequest("think", f"{think!r}: this model knows no levels of reasoning; say true or false")
            if self.tags is not None and self.tags.levels and think not in self.tags.levels:
                raise InvalidRequest("think", f"must be one of {', '.join(self.tags.levels)}, got {think[:64]!r}")
            return {**dict.fromkeys(switches, True), EFFORT: think}
        if think and self.tags is None and not switches and not has_effort:
            raise InvalidRequest("think", "is not supported by this model, which does not reason")
        if not think and (self.tags is not None or has_effort) and not switches:
            raise InvalidRequest("think", "cannot be false: this model's chat template cannot switch reasoning off")
        return dict.fromkeys(switches, think)

    def _render(
        self, ending: Ending, messages: Messages, tools: Sequence[object] | None, extra: Mapping[str, object]
    ) -> str:
        opens_turn = ending == "new turn"
        text = self._template.render(messages, add_generation_prompt=opens_turn, tools=tools, extra=extra)
        return cut_at_mark(text) if ending == "continued" else text

    def _tokenize(self, text: str, request: ChatRequest) -> list[int]:
        """Encode the prompt; BOS is added if the vocabulary wants it and the template did not write it."""
        tokenizer = self._tokenizer
        if self._size_bound is not None:
            # A prompt that will be cut may have messages of any length, but the template may not add more than usual.
            allowance = 0 if request.window is None else 2 * count_characters(request.messages, sys.maxsize)
            self._size_bound.check("messages", text, allowance)
        has_bos = tokenizer.bos_id is not None and text.startswith(tokenizer.token_text(tokenizer.bos_id))
        token_ids = tokenizer.encode(text, add_special=not has_bos, parse_special=True)
        if not token_ids:
            raise InvalidRequest("messages", "the chat template made an empty prompt of them")
        return token_ids

    def _make_turn(self, request: ChatRequest, text: str, token_ids: list[int], shown: Sequence[Part]) -> Turn:
        token_ids, pictures = self._sight.place(token_ids, shown)
        if self.tags is None:
            return Turn(token_ids, is_thinking=False, has_thought=False, pictures=pictures)
        if request.ending == "continued":
            is_thinking = continues_reasoning(request.messages)
            return Turn(token_ids, is_thinking, not is_thinking, pictures)
        text = text.rstrip()
        return Turn(token_ids, text.endswith(self.tags.open), text.endswith(self.tags.close), pictures)

    def _find_special(self, spelling: str) -> int | None:
        """Return the control token of this spelling; None if there is none."""
        token_id = self._tokenizer.token_id(spelling)
        return token_id if token_id is not None and self._tokenizer.is_special(token_id) else None


def list_tools(request: ChatRequest) -> Sequence[Tool]:
    """Check and return the tools that may be called; none with the choice "none"."""
    seen: set[str] = set()
    for index, tool in enumerate(request.tools):
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(f"tools[{index}].name", "must be 1 to 128 letters, digits and any of _ . : / -")
        if tool.name in seen:
            raise InvalidRequest(f"tools[{index}].name", f"{tool.name} is there twice")
        if not isinstance(tool.parameters, Mapping):
            raise InvalidRequest(f"tools[{index}].parameters", "must be a JSON schema")
        seen.add(tool.name)
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        if choice.name not in seen:
            raise InvalidRequest("tool_choice", f"{choice.name[:128]!r} is none of the tools")
    elif choice not in ("auto", "none", "required"):
        raise InvalidRequest("tool_choice", f"must be auto, none, required or the name of a tool, got {choice!r}")
    elif choice == "required" and not seen:
        raise InvalidRequest("tool_choice", "is required, but there are no tools")
    return () if choice == "none" else request.tools


def _enforce(tool: Tool, field: str, *, must_hold: bool) -> Enforceable:
    """Return the part of a tool's schema that a grammar can hold. Refuses broken ones if the model must call a tool."""
    try:
        return enforce(json.dumps({"type": "object", **tool.parameters}))
    except SchemaError as error:
        if must_hold:
            raise InvalidRequest(field, str(error)) from None
        return Enforceable({"type": "object"}, ("parameters",))
