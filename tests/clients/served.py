"""A running server, as tests know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """Address of the server, name of its model, whether that knows more than the demo, and the folder of adapters for
    the demo; the server has `one.gguf` as "one".
    """

    url: str
    model: str
    is_real: bool
    adapters: str = ""

    @property
    def v1(self) -> str:
        """The address that OpenAI's clients want."""
        return f"{self.url}/v1"
