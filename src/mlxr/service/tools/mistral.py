"""Calls as a list of JSON objects behind a marker: Mistral, Phi-4, Nemotron, Hunyuan A13B, Command R7B and Command A.

Sources: the chat templates of these models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import cast

from mlxr.service.identity import draw_hex
from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.arguments import ArgumentsReader, CallReader
from mlxr.service.tools.format import (
    Asked,
    CallParser,
    ToolFormat,
    quote_lark,
    write_argument_rules,
    write_call_rules,
    write_list_rules,
    write_marked_grammar,
    write_rule,
)

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID = re.compile(r"[A-Za-z0-9]{9}")
_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralFormat(ToolFormat):
    """See `ToolFormat`; `has_args_marker` is the newer form."""

    markers: Sequence[str] = (CALLS, ARGS, CALL_ID)

    def __init__(self, *, has_args_marker: bool) -> None:
        self._has_args_marker = has_args_marker

    def make_id(self) -> str:
        """Make an id of nine letters and digits: the templates refuse anything else."""
        return draw_hex(5, "call")[:9]

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with ids in the form that the templates want, the same for a call and its result."""
        del tools
        prepared = []
        for message in messages:
            if "tool_calls" in message:
                calls = cast("list[Mapping[str, object]]", message["tool_calls"])
                message = {**message, "tool_calls": [{**call, "id": _fit_id(call.get("id", ""))} for call in calls]}
            if "tool_call_id" in message:
                message = {**message, "tool_call_id": _fit_id(message["tool_call_id"])}
            prepared.append(message)
        return prepared

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of the calls behind Mistral's marker."""
        return MarkedParser(frozenset(tool.name for tool in tools), CALLS, is_enforced=is_enforced)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, and of text before them unless there must be a call."""
        rules = self._write_calls(asked.tools, asked.is_parallel, asked.specials)
        return write_marked_grammar(CALLS, rules, asked)

    def _write_calls(self, tools: Sequence[Tool], is_parallel: bool, specials: Mapping[str, str]) -> str:
        """Return the rule `calls` and those below it."""
        if not self._has_args_marker:
            return write_list_rules(tools, is_parallel=is_parallel)
        marker, args = (specials.get(text, quote_lark(text)) for text in (CALLS, ARGS))
        named = [f"{quote_lark(tool.name)} {args} args_{index}" for index, tool in enumerate(tools)]
        more = f"({marker} call)*" if is_parallel else ""
        return f"calls: call {more}\n" + write_rule("call", named) + write_argument_rules(tools)


def _fit_id(call_id: object) -> str:
    text = str(call_id)
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


class MarkedParser(CallParser):
    """Reads text, and calls behind the marker `start`, in either form; `end` may come behind them and is no text."""

    def __init__(self, names: frozenset[str], start: str, end: str = "", *, is_enforced: bool) -> None:
        super().__init__()
        self._names, self._start_marker, self._end_marker = names, start, end
        self._is_enforced = is_enforced
        self._wants_end = False
        self._lead = ""  # the marker and the text behind it, in case that turns out to be no call
        self._in_list = False
        self._reader: CallReader | ArgumentsReader | None = None

    def _advance(self) -> bool:
        if self._wants_end:
            return self._read_end()
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._in_list:
            return self._read_list()
        return self._read_head() if self._lead else self._read_text()

    def _read_text(self) -> bool:
        before, marker, after = self._text.partition(self._start_marker)
        if marker:
            self._give(before.rstrip())
            self._lead, self._text = before[len(before.rstrip()) :] + marker, after
            return True
        sure = before[: len(before) - hold_back(before, self._start_marker)].rstrip()
        self._give(sure)
        self._text = before[len(sure) :]
        return False

    def _read_head(self) -> bool:
        """Read the text behind the marker: a list of calls, one call, or the name of a tool."""
        bare = self._text.lstrip()
        if bare.startswith("["):
            self._keep_lead(bare[1:])
            self._in_list = True
        elif bare.startswith("{"):
            self._keep_lead(bare)
            self._open_reader()
        elif "{" in bare:
            named = _NAMED.match(bare)
            if named is None or named[1] not in self._names:
                self._give_up("")
            else:
                self._keep_lead(bare[named.end() :])
                self._reader = ArgumentsReader(self.calls, named[1], is_enforced=self._is_enforced)
        else:
            return False
        return bool(self._text)

    def _read_list(self) -> bool:
        bare = self._text.lstrip(", \t\r\n")
        if not bare:
            return False
        if bare.startswith("{"):
            self._keep_lead(bare)
            self._open_reader()
        elif bare.startswith("]"):
            self._keep_lead(bare[1:])
            self._in_list = False
            if self.calls:
                self._lead, self._wants_end = "", bool(self._end_marker)
            else:
                self._give_up("")
        else:
            self._give_up("")
        return bool(self._text)

    def _read_call(self, reader: CallReader | ArgumentsReader) -> bool:
        pieces, self._text = reader.push(self._text)
        self._found += pieces
        if reader.is_complete:
            self.calls += 1
            self._lead, self._reader = "", None
            self._wants_end = bool(self._end_marker) and not self._in_list
        elif reader.is_broken:
            self._give_up(reader.raw)
        else:
            return False
        return bool(self._text)

    def _read_end(self) -> bool:
        bare = self._text.lstrip()
        if self._end_marker.startswith(bare) and bare != self._end_marker:
            return False
        self._text = bare.removeprefix(self._end_marker) if bare.startswith(self._end_marker) else self._text
        self._wants_end = False  # it may be missing
        return bool(self._text)

    def _open_reader(self) -> None:
        keys = ("arguments", "parameters")
        self._reader = CallReader(self.calls, self._names, keys, is_enforced=self._is_enforced)

    def _keep_lead(self, rest: str) -> None:
        self._lead += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _give_up(self, raw: str) -> None:
        self._give(self._lead + raw)
        self._lead, self._reader, self._in_list = "", None, False

    def _end(self) -> None:
        if self._reader is not None:
            pieces = self._reader.finish()
            if self._reader.is_complete:
                self._found += pieces
                self.calls += 1
            elif not self._is_enforced:
                self._give_up(self._reader.raw)
        elif self._lead and not (self._in_list and self.calls):
            heads = ("{",) if self._in_list else ("[", "{", *self._names)
            self._give_begun(self._lead, self._text, heads, is_enforced=self._is_enforced)
        elif not self._wants_end and not self._in_list:
            self._give_rest(self._text, (self._start_marker,))


PHI4_START, PHI4_END = "<|tool_call|>", "<|/tool_call|>"
NEMOTRON_START, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"
HUNYUAN_START, HUNYUAN_END = "<tool_calls>", "</tool_calls>"


class Phi4Format(ToolFormat):
    """See `ToolFormat`; calls are a list behind `start`, closed by `end` unless that is empty."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        self.markers: Sequence[str] = (start, end) if end else (start,)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of the calls behind the marker."""
        return MarkedParser(frozenset(tool.name for tool in tools), self._start, self._end, is_enforced=is_enforced)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, and of text before them unless there must be a call."""
        end = asked.specials.get(self._end, quote_lark(self._end)) if self._end else ""
        rules = self.write_rules(asked.tools, end, is_parallel=asked.is_parallel)
        return write_marked_grammar(self._start, rules, asked)

    def write_rules(self, tools: Sequence[Tool], end: str, *, is_parallel: bool) -> str:
        """Return the rule `calls` of a Lark grammar, which ends with `end`, and those below it."""
        return write_list_rules(tools, is_parallel=is_parallel, end=end)


COHERE_START, COHERE_END = "<|START_ACTION|>", "<|END_ACTION|>"


class CohereFormat(Phi4Format):
    """See `ToolFormat`. Answers without calls follow no grammar, as they stand between control tokens."""

    def __init__(self) -> None:
        super().__init__(COHERE_START, COHERE_END)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls if there must be one, or of calls beside a given answer."""
        if not asked.must_call and asked.answer is None:
            return None
        return super()._write_grammar(asked)

    def write_rules(self, tools: Sequence[Tool], end: str, *, is_parallel: bool) -> str:
        """Return the rule `calls`, on lines as the templates write them, and those below it."""
        space, comma, close = (quote_lark(text) for text in ("[\n    ", ",\n    ", "\n]"))
        more = f"({comma} call)*" if is_parallel else ""
        first = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}}
        return f"calls: {space} call {more} {close} {end}\n" + write_call_rules(
            tools, "parameters", name="tool_name", first=first
        )
