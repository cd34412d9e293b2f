"""The demo with a longer context in its header, for tests that need long prompts or answers, good or not."""

from __future__ import annotations

import struct
from pathlib import Path

DEMO = Path(__file__).parents[2] / "src" / "mlxr" / "assets" / "demo.gguf"
CONTEXT_TOKENS = 131_072


def write_long_demo(path: Path) -> Path:
    """Write the model to `path` and return that."""
    content = bytearray(DEMO.read_bytes())
    key = b"llama.context_length"
    place = content.index(key) + len(key) + 4  # behind the name of its type
    struct.pack_into("<I", content, place, CONTEXT_TOKENS)
    path.write_bytes(content)
    return path
