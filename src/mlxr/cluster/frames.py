"""Streams of frames that are begun anew elsewhere and go on where they broke off.

An answer does not depend on where it is computed, so the second stream has the same frames as the first, but for times
and for what the cache had. `Continuation` keeps a short mark of each frame that was passed on, drops as many of the
repeated stream and compares them. Knows the two framings, server-sent events and lines of JSON, and of all dialects
only the names of what may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from typing import Any

from mlxr.core.errors import RequestFailed

MARK_BYTES = 8
# Times, speeds, and tokens found in the cache: these may differ when an answer is repeated.
VOLATILE = frozenset(
    {
        "created",
        "created_at",
        "completed_at",
        "timings",
        "usage",
        "total_duration",
        "load_duration",
        "prompt_eval_count",
        "prompt_eval_duration",
        "eval_duration",
        "tokens_cached",
    }
)
PROGRESS = "prompt_progress"  # frames with it tell how far the prompt is computed, and are no part of the answer
# Types of frames that are sent as soon as a request is accepted, before its prompt is computed.
OPENINGS = frozenset({"message_start", "ping", "response.created", "response.queued", "response.in_progress"})


class FrameReader:
    """Cuts the bytes of a stream into whole frames, each with the end mark that it came with."""

    def __init__(self, separator: bytes) -> None:
        self._separator, self._rest = separator, b""

    def push(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes."""
        *frames, self._rest = (self._rest + data).split(self._separator)
        return [frame + self._separator for frame in frames]

    def take_rest(self) -> bytes:
        """What the stream ends with behind its last whole frame."""
        rest, self._rest = self._rest, b""
        return rest


class Continuation:
    """Remembers how much of a stream a client has got. `begin` is called for each try, and `take` for each frame of it.

    `is_computed` once the current try has brought a token, so that its prompt is computed.
    """

    def __init__(self) -> None:
        self.is_computed = False
        self._passed: dict[int, list[bytes]] = {}  # marks by answer
        self._due: dict[int, deque[bytes]] = {}  # of the frames that the current try must repeat first
        self._is_repeat = False

    @property
    def has_begun(self) -> bool:
        """Whether the client has got any part of the answer."""
        return bool(self._passed)

    def begin(self) -> None:
        """The stream is made once more, from its start."""
        self._is_repeat, self.is_computed = self.has_begun, False
        self._due = {answer: deque(marks) for answer, marks in self._passed.items()}

    def take(self, frame: bytes) -> bool:
        """Whether the client gets the frame; raises RequestFailed where a repeated one is not what it was."""
        if frame.startswith(b":"):
            return True
        values = _read_values(frame)
        self.is_computed = self.is_computed or not values or not all(map(_is_opening, values))
        if any(PROGRESS in value for value in values):
            return not self._is_repeat
        answer, mark = _find_answer(values), _make_mark(frame, values)
        due = self._due.get(answer)
        if not due:
            self._passed.setdefault(answer, []).append(mark)
            return True
        if due.popleft() != mark:
            raise RequestFailed("error", "the answer broke off, and what was to go on from there is another answer")
        return False


def _read_values(frame: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a frame: of its lines of data, or the line that it is."""
    values = []
    for line in frame.splitlines():
        text = line[5:] if line.startswith(b"data:") else line
        if text.lstrip().startswith(b"{"):
            values.append(json.loads(text))
    return values


def _is_opening(value: dict[str, Any]) -> bool:
    """Whether an object may come before the first token."""
    choices = value.get("choices") or [{}]
    says_turn = "role" in choices[0].get("delta", {})
    return says_turn or PROGRESS in value or value.get("type") in OPENINGS


def _find_answer(values: list[dict[str, Any]]) -> int:
    """Which of several answers in one stream a frame belongs to: they may come in another order next time."""
    for value in values:
        choices = value.get("choices")
        if choices:
            return int(choices[0].get("index", 0))
        if isinstance(value.get("index"), int) and "content" in value:  # llama.cpp's
            return int(value["index"])
    return 0


def _make_mark(frame: bytes, values: list[dict[str, Any]]) -> bytes:
    text = json.dumps(list(map(_drop_volatile, values)), sort_keys=True).encode() if values else frame
    return hashlib.blake2b(text, digest_size=MARK_BYTES).digest()


def _drop_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_volatile(part) for name, part in value.items() if name not in VOLATILE}
    return list(map(_drop_volatile, value)) if isinstance(value, list) else value


def separator_of(media_type: str) -> bytes | None:
    """What ends a frame of a stream of that type; None for what is no stream."""
    kind = media_type.partition(";")[0].strip()
    return {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}.get(kind)
