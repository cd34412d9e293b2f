"""The process of another rank, which writes down what it computes: a line with a digest of the logits of each step."""

from __future__ import annotations

import json
import sys
import threading
import zlib
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np

from mlxr.engine.tensor_parallel import follow_steps, open_other, receive_bytes, send_bytes
from mlxr.loading import load
from mlxr.service.tensor_parallel import end_with


class Digests:
    """A model whose logits and states are written down; `write` takes the digest of each."""

    def __init__(self, model: Any, write: Any) -> None:
        self._model, self._write = model, write
        self.config = model.config

    def forward(self, *arguments: Any) -> Any:
        return self._note(self._model.forward(*arguments))

    def forward_hidden(self, *arguments: Any) -> Any:
        return self._note(self._model.forward_hidden(*arguments))

    def project(self, *arguments: Any) -> Any:
        return self._note(self._model.project(*arguments))

    def _note(self, result: Any) -> Any:
        self._write(f"{zlib.crc32(np.ascontiguousarray(np.asarray(result, np.float32)).tobytes()):08x}\n")
        return result


def main(folder: Path, link: socket, life: int) -> None:
    threading.Thread(target=end_with, args=(life,), daemon=True).start()
    given = json.loads(receive_bytes(link))
    ctx = open_other(given["device"], link, given["rank"], given["count"])
    loaded = load(given["path"], context_tokens=given["context_tokens"], ctx=ctx)
    send_bytes(link, b"0")
    with (folder / f"rank-{given['rank']}").open("w", buffering=1) as file:
        follow_steps(ctx, Digests(loaded.model, file.write), link)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
