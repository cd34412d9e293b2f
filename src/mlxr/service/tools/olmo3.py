"""Calls as OLMo 3 writes them: `<function_calls>name(key="value", other=1)</function_calls>`, one call on a line.

Source: the chat template of allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

from mlxr.service.tools.pythonic import PythonicFormat

START, END = "<function_calls>", "</function_calls>"


class Olmo3Format(PythonicFormat):
    """Tool calls as OLMo 3 writes them: as calls in Python, between two tags."""

    def __init__(self) -> None:
        super().__init__(START, END)
