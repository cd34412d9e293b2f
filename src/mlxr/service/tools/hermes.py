"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Text may come before and between. Source: the chat templates of NousResearch's Hermes and of Qwen 2.5 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.bare_json import BareJsonParser
from mlxr.service.tools.format import CallParser, Piece, ToolFormat, quote_lark, write_call_rules, write_rule
from mlxr.service.tools.json_call import CallReader

START, END = "<tool_call>", "</tool_call>"
KEYS = ("arguments", "parameters")


class HermesFormat(ToolFormat):
    """Tool calls as Hermes and Qwen write them: JSON between two tags."""

    markers: Sequence[str] = (START, END)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of marked calls that also finds an answer that is JSON from its beginning."""
        names = frozenset(tool.name for tool in tools)
        bare = BareJsonParser(names, KEYS, leads=("```json", "```"), separators=",;`", is_enforced=False)
        return FirstLook(bare, HermesParser(names, is_enforced=is_enforced))

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


class FirstLook(CallParser):
    """Small models forget the markers: an answer that begins as JSON, or as a block of it, may be a call all the same.

    What such an answer turns out to be besides calls is read as any other. A call that has been answered already is
    text: such models write it once more instead of an answer, and a client that ran it again would never end.
    """

    def __init__(self, bare: BareJsonParser, marked: HermesParser) -> None:
        super().__init__()
        self._bare, self._marked = bare, marked
        self._is_bare: bool | None = None  # not known before the first sign that is no space

    def push(self, text: str) -> list[Piece]:
        """Read a piece of text; the beginning of the answer decides which of the two parsers reads on."""
        self._text += text
        begin = self._text.lstrip()[:1]
        if self._is_bare is None and not begin:
            return []
        if self._is_bare is None:
            self._is_bare = begin in "{`"
            self._bare.max_calls = self._marked.max_calls = self.max_calls
            self._bare.answered = self.answered
        text, self._text = self._text, ""
        return self._read(self._bare.push(text) if self._is_bare else [text])

    def flush(self) -> list[Piece]:
        """Read what is left when the answer ends; what looked like a bare call and is none is read again."""
        found = self._read([*self._bare.flush(), self._text] if self._is_bare else [self._text])
        return found if self._bare.calls else found + self._marked.flush()

    def _read(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Let the text among what was found be read for marked calls, unless there were others."""
        found: list[Piece] = []
        for piece in pieces:
            found += self._marked.push(piece) if isinstance(piece, str) and not self._bare.calls else [piece]
        self.calls = self._bare.calls or self._marked.calls
        return [piece for piece in found if piece != ""]

    def _advance(self) -> bool:
        return False

    def _end(self) -> None:
        pass


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
        if bare:
            self._lead += self._text[: len(self._text) - len(bare)]
            self._text = bare
            self._reader = CallReader(self.calls, self._names, KEYS, is_enforced=self._is_enforced)
        return bool(bare)

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
        bare = self._text.lstrip()
        if END.startswith(bare) and bare != END:
            return False
        self._text = bare.removeprefix(END) if bare.startswith(END) else self._text  # forgive one that is missing
        self._wants_end = False
        return bool(self._text)

    def _end(self) -> None:
        if self._reader is not None and not self._is_enforced:
            self._give_up(self._reader)
        elif self._reader is None and not self._wants_end:
            text = self._lead + self._text
            self._give(text if not self.calls or text.strip() else "")
