"""Says what the fields of Ollama's Go templates are called in the conversation that chat templates get.

A table: the kinds of values there are, the fields of each, and how a value of that kind is written out.
Names: https://github.com/ollama/ollama/blob/main/docs/template.md and api/types.go there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values. `fields`: name in Go → (key here, kind). `item` is the kind of its entries, `is_map` says that
    they have names. `writes` is how it is written: as it is, as JSON, as true or false, or not at all ("").
    """

    name: str
    fields: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    item: str = ""
    is_map: bool = False
    writes: str = ""


_ROWS = (
    Kind("text", writes="plain"),
    Kind("number", writes="plain"),
    Kind("bool", writes="bool"),
    Kind("value", writes="plain", item="value"),
    Kind("texts", item="text"),
    Kind(
        "message",
        {
            "Role": ("role", "text"),
            "Content": ("content", "text"),
            "Thinking": ("thinking", "text"),
            "Images": ("images", "texts"),
            "ToolCalls": ("tool_calls", "calls"),
            "ToolName": ("name", "text"),
            "ToolCallID": ("tool_call_id", "text"),
        },
    ),
    Kind("messages", item="message"),
    Kind("call", {"ID": ("id", "text"), "Function": ("function", "called")}),
    Kind("calls", item="call"),
    Kind("called", {"Name": ("name", "text"), "Arguments": ("arguments", "arguments"), "Index": ("index", "number")}),
    Kind("arguments", item="value", is_map=True, writes="json"),
    Kind("tool", {"Type": ("type", "text"), "Function": ("function", "function")}, writes="json"),
    Kind("tools", item="tool", writes="json"),
    Kind(
        "function",
        {
            "Name": ("name", "text"),
            "Description": ("description", "text"),
            "Parameters": ("parameters", "parameters"),
        },
        writes="json",
    ),
    Kind(
        "parameters",
        {
            "Type": ("type", "text"),
            "Required": ("required", "texts"),
            "Properties": ("properties", "properties"),
        },
    ),
    Kind("properties", item="property", is_map=True),
    Kind(
        "property",
        {
            "Type": ("type", "text"),
            "Description": ("description", "text"),
            "Enum": ("enum", "value"),
            "Items": ("items", "value"),
        },
    ),
)
KINDS: Mapping[str, Kind] = {row.name: row for row in _ROWS}
# Fields of the whole: the expression here and its kind. A chat template fills no gap between a prefix and a suffix.
ROOT: Mapping[str, tuple[str, str]] = {
    "Messages": ("turns", "messages"),
    "System": ("system", "text"),
    "Prompt": ("''", "text"),
    "Response": ("''", "text"),
    "Suffix": ("''", "text"),
    "Tools": ("(tools or [])", "tools"),
    "Think": ("(enable_thinking is defined and enable_thinking)", "bool"),
    "IsThinkSet": ("(enable_thinking is defined)", "bool"),
    "ThinkLevel": ("(reasoning_effort or '')", "text"),
}
# A template without Messages is rendered turn by turn, with these three alone.
TURN: Mapping[str, tuple[str, str]] = {
    **ROOT,
    "Prompt": ("prompt", "text"),
    "Response": ("response", "text"),
    "Tools": ("[]", "tools"),
}
