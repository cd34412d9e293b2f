"""What a test knows of the server that it talks to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """A running server: its address, the name of its model, and whether that model knows more than the demo."""

    url: str
    model: str
    is_real: bool

    @property
    def v1(self) -> str:
        """The address that OpenAI's clients want."""
        return f"{self.url}/v1"
