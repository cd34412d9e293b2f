"""Calls as one JSON object each: with marks around it (Hermes, Qwen, SmolLM3), bare (Llama 3), or in mlxr's own way.

Sources: the chat templates of NousResearch's Hermes, of Qwen 2.5 and 3 and of HuggingFaceTB/SmolLM3-3B; Meta's prompt
format for Llama 3.1 and its chat template. A bare call that has been answered again and again is text: small models
repeat it instead of an answer, and a client that runs it would never end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from mlxr.service.messages import write_json
from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.arguments import CallReader
from mlxr.service.tools.format import (
    Asked,
    CallParser,
    CallPiece,
    ToolFormat,
    describe_tool,
    quote_lark,
    write_bare_grammar,
    write_call_rules,
    write_rule,
)


class BareJsonParser(CallParser):
    """Calls one after the other, with space and any of `separators` between; `leads` may come before each.

    `closing` may come behind a call. If there is a parser `rest`, it reads the text on; in answers that follow a
    grammar, which has the marks of `rest`, it reads everything.
    """

    def __init__(
        self,
        names: frozenset[str],
        keys: Sequence[str],
        *,
        leads: Sequence[str],
        separators: str,
        is_enforced: bool,
        closing: str = "",
        rest: CallParser | None = None,
    ) -> None:
        super().__init__()
        self._names, self._keys, self._leads = names, keys, leads
        self._separators, self._closing, self._rest = " \t\r\n" + separators, closing, rest
        self._stops = (closing,) if closing else ()
        self._is_enforced = is_enforced
        self._lead = ""  # the text before the call that is being read, in case the call turns out to be text
        self._reader: CallReader | None = None
        self._is_text = self._has_lead = self._is_behind = False

    def _advance(self) -> bool:
        if self._is_text or (self.is_bound and self._rest is not None):
            self._is_text, text, self._text = True, self._text, ""
            self._pass_on(text)
            return False
        if self._reader is not None:
            return self._read_call(self._reader)
        return self._read_between()

    def _read_between(self) -> bool:
        """Read the text before a call: space, separators, the closing marker of an earlier call, and a lead."""
        bare = self._text.lstrip(self._separators if self._is_behind else " \t\r\n")
        marks = list(self._leads) if self._is_behind or not self._has_lead else []
        if self._is_behind and self._closing:
            marks.append(self._closing)
        if not bare or any(mark.startswith(bare) and mark != bare for mark in marks):
            return False
        mark = max((mark for mark in marks if bare.startswith(mark)), key=len, default="")
        if mark:
            self._has_lead = True
            self._keep_lead(bare[len(mark) :])
            return True
        if bare.startswith("{"):
            self._keep_lead(bare)
            self._reader = CallReader(
                self.calls,
                self._names,
                self._keys,
                is_enforced=self._is_enforced,
                needs_arguments=self.is_bound,
                stops=self._stops,
            )
            return True
        self._turn_to_text("")
        return True

    def _keep_lead(self, rest: str) -> None:
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _read_call(self, reader: CallReader) -> bool:
        pieces, self._text = reader.push(self._text)
        if not reader.is_broken:
            self._take_call(reader, pieces)
        else:
            self._turn_to_text(reader.raw)
        return bool(self._text)

    def _take_call(self, reader: CallReader, pieces: Sequence[CallPiece]) -> None:
        """Take more of a call; a complete call that has been answered often enough becomes text."""
        if any((piece.name, piece.arguments) in self.answered for piece in pieces) and not self._is_enforced:
            self._give(self._lead + reader.raw)
        else:
            self._found += pieces
            self.calls += reader.is_complete
        if reader.is_complete:
            self._lead, self._reader, self._is_behind = "", None, True

    def _turn_to_text(self, raw: str) -> None:
        """Treat the held text and all that follows as text."""
        self._text = self._lead + raw + self._text
        self._lead, self._reader, self._is_text = "", None, True

    def _pass_on(self, text: str) -> None:
        """Give text out, or let `rest` read it for calls of another kind."""
        if self._rest is None:
            self._give(text)
            return
        self._rest.calls, self._rest.max_calls = self.calls, self.max_calls
        self._found += self._rest.push(text)
        self.calls = self._rest.calls

    def _end(self) -> None:
        if self._reader is not None:
            pieces = self._reader.finish()
            if self._reader.is_complete:
                self._take_call(self._reader, pieces)
            elif not self._is_enforced:
                self._turn_to_text(self._reader.raw)
        elif not self._is_text and not self.calls:
            self._turn_to_text("")
        if self._is_text:
            self._pass_on(self._text)
            if self._rest is not None:
                self._found += self._rest.flush()


START, END = "<tool_call>", "</tool_call>"
KEYS = ("arguments", "parameters")


class HermesFormat(ToolFormat):
    """The format of Hermes and Qwen: JSON between two tags."""

    markers: Sequence[str] = (START, END)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of marked calls, and of answers that begin with calls without markers, which small models
        forget.
        """
        names = frozenset(tool.name for tool in tools)
        marked = HermesParser(names, is_enforced=is_enforced)
        leads = ("```json", "```")
        return BareJsonParser(names, KEYS, leads=leads, separators=",;", is_enforced=False, closing=END, rest=marked)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, and of text before and between them unless there must be a call."""
        end = asked.specials.get(END, quote_lark(END))
        body = f'"\\n" call "\\n" {end}'
        if asked.must_call or asked.answer is not None:
            start = asked.specials.get(START, quote_lark(START))
            blocks = 'block ("\\n" block)*' if asked.is_parallel else "block"
            rules = write_rule("start", [blocks] if asked.must_call or asked.answer is None else [blocks, asked.answer])
            rules += f"block: {start} {body}\n"
        elif START in asked.specials:
            rules = f"start: TEXT? ({asked.specials[START]} {body} TEXT?)*\nTEXT: /(?s:.+)/\n"
        else:
            # `until` ends with the first marker, so text with a marker can only go on as a call.
            rules = (
                f"start: (until {body})* tail\nuntil[suffix={quote_lark(START)}]: /(?s:.*)/\n"
                f"tail: TAIL\nTAIL: /(?s:.*)/ & ~/(?s:.*){START}(?s:.*)/\n"
            )
        return rules + write_call_rules(asked.tools, "arguments")


class HermesParser(CallParser):
    """Text, and calls between their markers."""

    def __init__(self, names: frozenset[str], *, is_enforced: bool) -> None:
        super().__init__()
        self._names, self._is_enforced = names, is_enforced
        self._lead = ""  # the start marker and the space behind it, in case the call turns out to be text
        self._reader: CallReader | None = None
        self._wants_end = False

    def _advance(self) -> bool:
        if self._wants_end:
            return self._read_end()
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._lead:
            return self._read_lead()
        return self._read_text()

    def _read_text(self) -> bool:
        before, marker, after = self._text.partition(START)
        if marker:
            self._give(before.rstrip())
            self._lead, self._text = before[len(before.rstrip()) :] + marker, after
            return True
        sure = before[: len(before) - hold_back(before, START)].rstrip()
        self._give(sure)
        self._text = before[len(sure) :]
        return False

    def _read_lead(self) -> bool:
        bare = self._text.lstrip()
        if bare.startswith("{"):
            self._lead += self._text[: len(self._text) - len(bare)]
            self._text = bare
            self._open_reader()
        elif bare:
            self._give(self._lead)
            self._lead = ""
        return bool(bare)

    def _open_reader(self) -> None:
        self._reader = CallReader(self.calls, self._names, KEYS, is_enforced=self._is_enforced, stops=(END,))

    def _read_call(self, reader: CallReader) -> bool:
        pieces, rest = reader.push(self._text)
        self._text = rest
        self._found += pieces
        if reader.is_complete:
            self.calls += 1
            self._lead, self._reader, self._wants_end = "", None, True
        elif reader.is_broken:
            self._give_up(reader)
        else:
            return False
        return bool(self._text)

    def _give_up(self, reader: CallReader) -> None:
        self._give(self._lead + reader.raw)
        self._lead, self._reader = "", None

    def _read_end(self) -> bool:
        """Read the text behind a call: the end marker, which may be missing, an extra bracket, or one more call."""
        bare = self._text.lstrip(" \t\r\n}")
        if END.startswith(bare) and bare != END:
            return False
        self._wants_end = False
        if bare.startswith(END):
            self._text = bare.removeprefix(END)
        elif self._text.lstrip().startswith("{"):
            bare = self._text.lstrip()
            self._lead, self._text = self._text[: len(self._text) - len(bare)], bare
            self._open_reader()
        return bool(self._text)

    def _end(self) -> None:
        if self._reader is not None:
            pieces = self._reader.finish()
            if self._reader.is_complete:
                self._found += pieces
                self.calls += 1
            elif not self._is_enforced:
                self._give_up(self._reader)
        elif self._lead:
            self._give_begun(self._lead, self._text, "{", is_enforced=self._is_enforced)
        elif not self._wants_end:
            self._give_rest(self._text, (START,))


TOOLS_VARIABLE = "xml_tools"


class SmolLM3Format(HermesFormat):
    """The format of SmolLM3: that of Hermes, but the template does not show calls."""

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with earlier calls as the text that the model wrote."""
        del tools
        return [_write_smollm3_calls(message) if "tool_calls" in message else message for message in messages]


def _write_smollm3_calls(message: Mapping[str, object]) -> dict[str, object]:
    calls = cast("list[dict[str, dict[str, object]]]", message["tool_calls"])
    lines = [str(message["content"])] if message["content"] else []
    for call in calls:
        body = write_json({key: call["function"][key] for key in ("name", "arguments")})
        lines.append(f"{START}\n{body}\n{END}")
    return {**message, "content": "\n".join(lines)}


PYTHON_TAG = "<|python_tag|>"


class Llama3Format(ToolFormat):
    """The format of Llama 3: bare JSON, also after a tag."""

    markers: Sequence[str] = (PYTHON_TAG,)
    marks_calls = False

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with at most one call each: the template refuses more."""
        del tools
        prepared = []
        for message in messages:
            calls = cast("list[object]", message.get("tool_calls", []))
            if len(calls) > 1:
                prepared += [
                    {**message, "content": message["content"] if not index else "", "tool_calls": [call]}
                    for index, call in enumerate(calls)
                ]
            else:
                prepared.append(message)
        return prepared

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of bare JSON, which also passes over the tag before it."""
        names = frozenset(tool.name for tool in tools)
        keys = ("parameters", "arguments")
        return BareJsonParser(names, keys, leads=(PYTHON_TAG,), separators=";,", is_enforced=is_enforced)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, or of calls beside a given answer; None if neither is demanded."""
        return write_bare_grammar(asked, "parameters", "; ")


_INTRODUCTION = (
    "You can call these functions:\n{tools}\n"
    "To call functions, answer with nothing but one JSON object for each call, on a line of its own: "
    '{{"name": <name of the function>, "arguments": <object with its arguments>}}. '
    "You will be told the results. Otherwise answer in plain words."
)


class GenericFormat(ToolFormat):
    """Tool calls for models whose template knows no tools: lines of JSON."""

    markers: Sequence[str] = ()
    shows_tools = False
    marks_calls = False

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with tools, calls and results as plain text; consecutive results become one message."""
        prepared: list[dict[str, object]] = []
        for message in messages:
            if message["role"] == "tool":
                text = _write_result(message)
                if prepared and prepared[-1].get("is_result"):
                    prepared[-1]["content"] = f"{prepared[-1]['content']}\n{text}"
                else:
                    prepared.append({"role": "user", "content": text, "is_result": True})
            elif "tool_calls" in message:
                prepared.append({"role": "assistant", "content": _write_calls(message)})
            else:
                prepared.append(message)
        plain = [{key: value for key, value in message.items() if key != "is_result"} for message in prepared]
        return _introduce(plain, tools) if tools else plain

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of bare JSON, which also passes over code fences."""
        names = frozenset(tool.name for tool in tools)
        keys = ("arguments", "parameters")
        leads = ("```json", "```")
        return BareJsonParser(names, keys, leads=leads, separators=",;", is_enforced=is_enforced)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, or of calls beside a given answer; None if neither is demanded."""
        return write_bare_grammar(asked, "arguments", "\n")


def _introduce(messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
    text = _INTRODUCTION.format(tools="\n".join(write_json(describe_tool(tool)["function"]) for tool in tools))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _write_calls(message: Mapping[str, object]) -> str:
    calls = cast("list[dict[str, dict[str, object]]]", message["tool_calls"])
    lines = [write_json({key: call["function"][key] for key in ("name", "arguments")}) for call in calls]
    return "\n".join([*([str(message["content"])] if message["content"] else []), *lines])


def _write_result(message: Mapping[str, object]) -> str:
    return f"Result of {message.get('name', 'the call')}: {message['content']}"
