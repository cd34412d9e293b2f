"""The process of another rank than the first: it loads its share of the model, then does what it is told.

`python -m mlxr.service.rank_process LINK LIFE`: the descriptors of a socket to the first rank, and of a pipe whose end
says that the first rank is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from socket import socket

from mlxr.core.errors import MlxrError
from mlxr.engine.followers import follow
from mlxr.engine.rank_joining import open_other, receive_bytes, send_bytes
from mlxr.loading import load


def main(link: socket, life: int) -> None:
    """Run until the first rank is gone."""
    threading.Thread(target=end_with, args=(life,), daemon=True).start()
    given = json.loads(receive_bytes(link))
    ctx = open_other(given["device"], link, given["rank"], given["count"])
    try:
        loaded = load(given["path"], context_tokens=given["context_tokens"], ctx=ctx)
    except MlxrError as error:  # the first rank says so, unless it has found the same by itself
        send_bytes(link, str(error).encode())
        return
    send_bytes(link, str(ctx.read_free_bytes() or 0).encode())
    follow(ctx, loaded.model, link)


def end_with(life: int) -> None:
    """End this process, whatever its device waits for, when the pipe does."""
    os.read(life, 1)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    except MlxrError as error:
        print(f"mlxr: {error}", file=sys.stderr)
        sys.exit(2)
    except EOFError:
        sys.exit(0)
