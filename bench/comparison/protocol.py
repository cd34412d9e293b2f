"""The protocol between bench/compare.py and a side: one JSON object per line in, one out. Standard library only, as the
other engine's interpreter need not have our packages."""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[..., object]
FIRST_TOKEN = 259  # lower ids are the control tokens and bytes of the synthetic vocabularies


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer the lines of stdin until it ends; all other output goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": handlers[request["action"]](**request["arguments"])}
        except Exception as error:  # the other end decides about any error
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")


def draw_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """Random token ids, the same on both sides."""
    draw = random.Random(seed)
    low = FIRST_TOKEN if vocab_size > 2 * FIRST_TOKEN else 0
    return [draw.randrange(low, vocab_size) for _ in range(count)]


def read_memory() -> dict[str, Any]:
    """The peak of resident bytes so far, with mapped files; None if the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {"peak_memory_bytes": None}
    peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    return {"peak_memory_bytes": peak}
