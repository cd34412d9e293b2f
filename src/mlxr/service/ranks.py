"""Several GPUs as one: a process for each, of which this one, the first rank, plans the steps and draws the tokens.

The others are started here (`rank_process` is what they run). They open the same files, keep their shares, and then do
what `engine.followers` tells them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxr.core.errors import DeviceError, SettingError
from mlxr.core.settings import Settings
from mlxr.engine.followers import Followers, LedModel
from mlxr.engine.rank_joining import join_first, open_first, receive_bytes
from mlxr.engine.runner import Model

VISIBLE = "CUDA_VISIBLE_DEVICES"
STOP_S = 5.0


COMMAND = (sys.executable, "-m", "mlxr.service.rank_process")


class RankProcess:
    """The process of rank `rank`, which runs `command`. It ends with this one: it sees the end of a pipe that nobody
    else holds."""

    def __init__(self, rank: int, device: str, count: int, command: Sequence[str] = ()) -> None:
        self.rank = rank
        self.link, theirs = socket.socketpair()
        life, self._life = os.pipe()
        environment = os.environ | ({VISIBLE: order_devices(rank, count)} if device == "cuda" else {})
        self._process = subprocess.Popen(
            [*(command or COMMAND), str(theirs.fileno()), str(life)],
            pass_fds=(theirs.fileno(), life),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # what interrupts this process does not interrupt that one
        )
        theirs.close()
        os.close(life)

    @property
    def process_id(self) -> int:
        """The number of the process."""
        return self._process.pid

    def wait(self) -> str:
        """Wait for its end, and tell how it ended."""
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End the process at once."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        self._process.kill()
        self._process.wait(STOP_S)
        self.link.close()


def order_devices(rank: int, count: int) -> str:
    """The GPUs that a rank may see, its own first: all that this process sees."""
    given = os.environ.get(VISIBLE)
    names = given.split(",") if given else [str(number) for number in range(count)]
    return ",".join([names[rank], *names[:rank], *names[rank + 1 :]])


class RankGroup:
    """All ranks of one model: `ctx` is this one's, `free_bytes` the least memory that any of the others has left."""

    def __init__(self, ctx: Any, processes: list[RankProcess]) -> None:
        self.ctx, self.processes = ctx, processes
        self.free_bytes: int | None = None
        self._followers = Followers(ctx, processes)

    @property
    def failure(self) -> str | None:
        """Why nothing can be computed any more, None as long as it can."""
        return self._followers.failure

    def wait_ready(self) -> None:
        """Wait until all have loaded their shares. Raises DeviceError where one of them has ended."""
        known = []
        for process in self.processes:
            try:
                text = receive_bytes(process.link).decode()
                if not text.isdecimal():
                    self._followers.fail(f"GPU {process.rank}: {text}")
                    break
                known.append(int(text))
            except (EOFError, OSError):
                self._followers.fail(f"the process of GPU {process.rank} ended while it loaded the model")
        self._followers.check()
        self.free_bytes = min((free for free in known if free), default=None)

    def lead(self, model: Model) -> LedModel:
        """The model, of which the others compute their shares with each step."""
        return LedModel(model, self._followers)

    def close(self) -> None:
        """End the other ranks' processes."""
        self._followers.close()


def start_group(path: Path, device: str, settings: Settings) -> RankGroup:
    """Start the other ranks, which begin to load the model at `path`.

    Raises SettingError where the device is no GPU or there are too few, DeviceError where they cannot reach each other.
    """
    count = settings.gpus
    if settings.store_bytes:
        raise SettingError("store_bytes: several GPUs keep no pages on disk; set it to 0, or gpus to 1")
    if settings.draft not in ("auto", "off"):
        raise SettingError("draft: several GPUs take no drafts; leave it at auto, or set gpus to 1")
    ctx = open_first(device, count)
    processes: list[RankProcess] = []
    given = {"path": str(path), "device": device, "count": count, "context_tokens": settings.context_tokens}
    try:
        processes.extend(RankProcess(rank, device, count) for rank in range(1, count))
        greetings = {process.rank: json.dumps(given | {"rank": process.rank}).encode() for process in processes}
        join_first(ctx, {process.rank: process.link for process in processes}, greetings)
    except BaseException as error:
        for process in processes:
            process.stop()
        if isinstance(error, EOFError | OSError):
            raise DeviceError(
                "the process of another GPU ended before it loaded the model; see what it said"
            ) from error
        raise
    return RankGroup(ctx, processes)
