"""Calls as Llama 3.1 and later write them: an answer that is `{"name": ..., "parameters": {...}}`.

`<|python_tag|>` may come first, and several calls are separated by semicolons. Source: Meta's prompt format for Llama
3.1 and its chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from mlxr.service.requests import Tool
from mlxr.service.tools.bare_json import BareJsonParser
from mlxr.service.tools.format import CallParser, ToolFormat, write_bare_grammar

PYTHON_TAG = "<|python_tag|>"


class Llama3Format(ToolFormat):
    """Tool calls as Llama 3 writes them: bare JSON, also after a tag."""

    markers: Sequence[str] = (PYTHON_TAG,)
    marks_calls = False

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """One call in a message at most: the template refuses more."""
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

    def write_grammar(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        specials: Mapping[str, str],
        answer: str | None = None,
    ) -> str | None:
        """Calls where there must be one; otherwise an answer in JSON may be just that."""
        del specials
        return write_bare_grammar(
            tools, "parameters", "; ", must_call=must_call, is_parallel=is_parallel, answer=answer
        )
