"""Calls as LFM 2 and 2.5 write them: `<|tool_call_start|>[name(key="value"), other()]<|tool_call_end|>`.

Most of their templates show no calls; these become the text of the message. Source: the chat templates of LFM2-8B-A1B,
LFM2.5-8B-A1B and LFM2.5-Instruct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from mlxr.service.requests import Tool
from mlxr.service.tools.pythonic import PythonicFormat

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
RECOGNISED_BY = (START, "<|tool_list_start|>", "List of tools: [")


class Lfm2Format(PythonicFormat):
    """Tool calls as LFM 2 writes them: as a list of calls in Python; `shows_calls` says that the template does, too."""

    def __init__(self, *, shows_calls: bool) -> None:
        super().__init__(START, END, "[]", ", ")
        self._shows_calls = shows_calls

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Earlier calls as the text that the model wrote, where the template leaves them out."""
        del tools
        return messages if self._shows_calls else [self._write_message(message) for message in messages]

    def _write_message(self, message: dict[str, object]) -> dict[str, object]:
        if "tool_calls" not in message:
            return message
        calls = self.write_calls(cast("Sequence[object]", message["tool_calls"]))
        return {**message, "content": f"{message['content']}{calls}"}
