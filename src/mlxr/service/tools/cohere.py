"""Calls as Command R7B and Command A write them: a list of JSON objects between the tokens START and END.

An object has `tool_call_id`, `tool_name` and `parameters`. Source: the chat template of Command R7B (12-2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxr.service.requests import Tool
from mlxr.service.tools.format import quote_lark, write_call_rules
from mlxr.service.tools.mistral import Phi4Format

START, END = "<|START_ACTION|>", "<|END_ACTION|>"


class CohereFormat(Phi4Format):
    """See `ToolFormat`. An answer without calls is not bound to a grammar, as it stands between control tokens."""

    def __init__(self) -> None:
        super().__init__(START, END)

    def write_grammar(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        specials: Mapping[str, str],
        answer: str | None = None,
    ) -> str | None:
        """Calls where there must be one, or calls beside a given answer."""
        if not must_call and answer is None:
            return None
        return super().write_grammar(
            tools, must_call=must_call, is_parallel=is_parallel, specials=specials, answer=answer
        )

    def write_rules(self, tools: Sequence[Tool], end: str, *, is_parallel: bool) -> str:
        """The rule `calls`, on lines as the templates write them, and those below it."""
        space, comma, close = (quote_lark(text) for text in ("[\n    ", ",\n    ", "\n]"))
        more = f"({comma} call)*" if is_parallel else ""
        first = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}}
        return f"calls: {space} call {more} {close} {end}\n" + write_call_rules(
            tools, "parameters", name="tool_name", first=first
        )
