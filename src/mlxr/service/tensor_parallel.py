"""Tensor parallelism over the GPUs of one machine: a process (rank) for each. This one, rank 0, plans the steps.

The other processes are started here and run `python -m mlxr.service.tensor_parallel LINK LIFE`, with the descriptors
of a socket to rank 0, and of a pipe whose end tells that rank 0 is gone. They open the same files, keep their shares of
the weights, and compute each step that `engine.tensor_parallel` broadcasts. Sums are all-reduced on the devices.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxr.core.errors import DeviceError, MlxrError, SettingError
from mlxr.core.settings import Settings
from mlxr.engine.runner import Model
from mlxr.engine.tensor_parallel import (
    Ranks,
    TensorParallelModel,
    follow_steps,
    join_first,
    open_first,
    open_other,
    receive_bytes,
    send_bytes,
)
from mlxr.loading import load

VISIBLE = "CUDA_VISIBLE_DEVICES"
STOP_S = 5.0
COMMAND = (sys.executable, "-m", "mlxr.service.tensor_parallel")


class RankProcess:
    """The process of rank `rank`, which runs `command`. It ends with this one, by the end of a pipe that only this
    process holds."""

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
            start_new_session=True,  # an interrupt of this process does not reach that one
        )
        theirs.close()
        os.close(life)

    @property
    def process_id(self) -> int:
        """The number of the process."""
        return self._process.pid

    def wait(self) -> str:
        """Wait for the process; returns how it ended."""
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
    """Return all GPUs that this process sees, in the order for a rank: its own first."""
    given = os.environ.get(VISIBLE)
    names = given.split(",") if given else [str(number) for number in range(count)]
    return ",".join([names[rank], *names[:rank], *names[rank + 1 :]])


class RankGroup:
    """All ranks of one model: `ctx` is this rank's, `free_bytes` the least free memory of the other ranks."""

    def __init__(self, ctx: Any, processes: list[RankProcess]) -> None:
        self.ctx, self.processes = ctx, processes
        self.free_bytes: int | None = None
        self._ranks = Ranks(ctx, processes)

    @property
    def failure(self) -> str | None:
        """The reason why the group can no longer compute; None as long as it can."""
        return self._ranks.failure

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded their shares. Raises DeviceError if one of them has ended."""
        known = []
        for process in self.processes:
            try:
                text = receive_bytes(process.link).decode()
                if not text.isdecimal():
                    self._ranks.fail(f"GPU {process.rank}: {text}")
                    break
                known.append(int(text))
            except (EOFError, OSError):
                self._ranks.fail(f"the process of GPU {process.rank} ended while it loaded the model")
        self._ranks.check()
        self.free_bytes = min((free for free in known if free), default=None)

    def lead(self, model: Model) -> TensorParallelModel:
        """Return the model whose steps the other ranks compute, too, each its share."""
        return TensorParallelModel(model, self._ranks)

    def close(self) -> None:
        """End the other ranks' processes."""
        self._ranks.close()


def start_group(path: Path, device: str, settings: Settings) -> RankGroup:
    """Start the other ranks, which begin to load the model at `path`.

    Raises SettingError if the device is no GPU or there are too few, DeviceError if they cannot reach each other.
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


def run_rank(link: socket.socket, life: int) -> None:
    """Load the share of another rank and compute it with each step, until rank 0 is gone."""
    threading.Thread(target=end_with, args=(life,), daemon=True).start()
    given = json.loads(receive_bytes(link))
    ctx = open_other(given["device"], link, given["rank"], given["count"])
    try:
        loaded = load(given["path"], context_tokens=given["context_tokens"], ctx=ctx)
    except MlxrError as error:  # rank 0 reports it, unless it has found the same by itself
        send_bytes(link, str(error).encode())
        return
    send_bytes(link, str(ctx.read_free_bytes() or 0).encode())
    follow_steps(ctx, loaded.model, link)


def end_with(life: int) -> None:
    """End this process when the pipe ends, even if its device still waits."""
    os.read(life, 1)
    os._exit(0)


if __name__ == "__main__":
    try:
        run_rank(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    except MlxrError as error:
        print(f"mlxr: {error}", file=sys.stderr)
        sys.exit(2)
    except EOFError:
        sys.exit(0)
