"""A test's knowledge of the server that it talks to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """A running server: its address, the name of its model, whether that model knows more than the demo, and where
    files of adapters for the demo are: the server has `one.gguf` as "one".
    """

    url: str
    model: str
    is_real: bool
    adapters: str = ""

    @property
    def v1(self) -> str:
        """The address that OpenAI's clients want."""
        return f"{self.url}/v1"
