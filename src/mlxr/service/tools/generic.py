"""Calls for models whose chat template knows no tools: described in the system message, written as plain JSON.

A call is a line `{"name": ..., "arguments": {...}}`. Earlier calls and their results are shown as plain messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from mlxr.service.json_text import write_json
from mlxr.service.requests import Tool
from mlxr.service.tools.bare_json import BareJsonParser
from mlxr.service.tools.format import CallParser, ToolFormat, describe_tool, write_bare_grammar

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
        """Tools, calls and results as plain text; results that follow each other become one message."""
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
        return write_bare_grammar(tools, "arguments", "\n", must_call=must_call, is_parallel=is_parallel, answer=answer)


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
