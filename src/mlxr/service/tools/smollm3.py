"""Calls as SmolLM3 writes them: as Hermes, with a template that takes tools as `xml_tools` and shows no calls.

Source: the chat template and the model card of HuggingFaceTB/SmolLM3-3B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from mlxr.service.json_text import write_json
from mlxr.service.requests import Tool
from mlxr.service.tools.hermes import END, START, HermesFormat

TOOLS_VARIABLE = "xml_tools"


class SmolLM3Format(HermesFormat):
    """Tool calls as SmolLM3 writes them: as Hermes does, where the template shows none."""

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Earlier calls as the text that the model wrote."""
        del tools
        return [_write_calls(message) if "tool_calls" in message else message for message in messages]


def _write_calls(message: Mapping[str, object]) -> dict[str, object]:
    calls = cast("list[dict[str, dict[str, object]]]", message["tool_calls"])
    lines = [str(message["content"])] if message["content"] else []
    for call in calls:
        body = write_json({key: call["function"][key] for key in ("name", "arguments")})
        lines.append(f"{START}\n{body}\n{END}")
    return {**message, "content": "\n".join(lines)}
