"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Text may come before and between. Source: the chat templates of NousResearch's Hermes and of Qwen 2.5 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.bare_json import BareJsonParser
from mlxr.service.tools.format import CallParser, ToolFormat, quote_lark, write_call_rules, write_rule
from mlxr.service.tools.json_call import CallReader

START, END = "<tool_call>", "</tool_call>"
KEYS = ("arguments", "parameters")


class HermesFormat(ToolFormat):
    """Tool calls as Hermes and Qwen write them: JSON between two tags."""

    markers: Sequence[str] = (START, END)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of marked calls, also of an answer that is calls without markers from its beginning.

        Small models forget the markers.
        """
        names = frozenset(tool.name for tool in tools)
        marked = HermesParser(names, is_enforced=is_enforced)
        leads = ("```json", "```")
        return BareJsonParser(names, KEYS, leads=leads, separators=",;", is_enforced=False, closing=END, rest=marked)

    def write_grammar(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        specials: Mapping[str, str],
        answer: str | None = None,
    ) -> str | None:
        """Calls, and text before and between them unless there must be a call."""
        end = specials.get(END, quote_lark(END))
        body = f'"\\n" call "\\n" {end}'
        if must_call or answer is not None:
            start = specials.get(START, quote_lark(START))
            blocks = 'block ("\\n" block)*' if is_parallel else "block"
            rules = write_rule("start", [blocks] if must_call or answer is None else [blocks, answer])
            rules += f"block: {start} {body}\n"
        elif START in specials:
            rules = f"start: TEXT? ({specials[START]} {body} TEXT?)*\nTEXT: /(?s:.+)/\n"
        else:
            # `until` ends with the first marker, so text with a marker can only go on as a call.
            rules = (
                f"start: (until {body})* tail\nuntil[suffix={quote_lark(START)}]: /(?s:.*)/\n"
                f"tail: TAIL\nTAIL: /(?s:.*)/ & ~/(?s:.*){START}(?s:.*)/\n"
            )
        return rules + write_call_rules(tools, "arguments")


class HermesParser(CallParser):
    """Text, and calls between their markers."""

    def __init__(self, names: frozenset[str], *, is_enforced: bool) -> None:
        super().__init__()
        self._names, self._is_enforced = names, is_enforced
        self._lead = ""  # the start marker and the space behind it, should the call turn out to be text
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
        """Behind a call: the end marker, which may be missing, a bracket too many before it, or one more call."""
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
