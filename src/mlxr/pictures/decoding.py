"""Decoding of pictures and sounds in a separate process, which is ended if it takes too long.

Without Pillow, which the extra `images` installs, pictures are refused. The last decoded ones are kept, since a
conversation sends its pictures again with each turn.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import json
import re
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.processes import Spare, ask
from mlxr.pictures.fetching import Address
from mlxr.pictures.sounds import is_sound as is_sound  # also for the service

Pixels = npt.NDArray[Any]  # of 8 bits; frames of a sound, (N, numbers), are float32
MAX_FILE_BYTES, MAX_PICTURES, MAX_DECODE_S, MAX_PROCESSES = 20 << 20, 16, 60.0, 2
KEPT_BYTES = 128 << 20
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.ASCII)


def read_base64(text: str, field: str) -> bytes:
    """Return the bytes of a picture in base64. Raises InvalidRequest naming `field`."""
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise InvalidRequest(field, f"is larger than {MAX_FILE_BYTES >> 20} MiB; send a smaller picture")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(field, "is no base64") from None


def read_url(url: str, field: str) -> bytes | Address:
    """Return the bytes of a picture in a data: URL, or its https: address. Raises InvalidRequest for other URLs."""
    if url[:6].lower() == "https:":
        return Address(url)
    match = _DATA_URL.match(url)
    if match is None:
        kind = url[:40].partition(":")[0]
        raise InvalidRequest(
            field, f"must be a data: URL with base64, got {kind!r}: no such address is fetched; send the picture"
        )
    if not match[2].endswith(";base64"):
        raise InvalidRequest(field, "must be a data: URL with ;base64")
    return read_base64(url[match.end() :], field)


Rule = Mapping[str, float | str]  # the rule by which pictures are resized and sounds are cut, see `worker`, `sounds`
_HEARS = ("mel", "samples")  # kinds of rules for sounds


@frozen(eq=False)
class Prepared:
    """A picture as a model's encoder takes it: tiles (height, width, 3), in `grid` rows and columns.

    A picture that is not cut is one tile. One that is cut may have one more tile, which shows all of it. For a sound of
    `seconds`, tiles are its pieces: frames (N, numbers).
    """

    tiles: tuple[Pixels, ...]
    grid: tuple[int, int]
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return sum(tile.nbytes for tile in self.tiles)


class Decoder:
    """The decoder of pictures and sounds for a model. Several threads may use it."""

    _turns = threading.BoundedSemaphore(MAX_PROCESSES)  # for all models together
    _spare = Spare("mlxr.pictures.worker")  # starting one takes longer than decoding most pictures

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, bytes], Prepared] = OrderedDict()

    def prepare(self) -> None:
        """Start a process that waits for pictures, so that the first ones need not wait for it."""
        if _has_pillow():
            self._spare.prepare()

    def decode(self, files: Sequence[bytes], fields: Sequence[str], rule: Rule) -> list[Prepared]:
        """Return each picture or sound prepared by `rule`. Raises InvalidRequest naming its field."""
        if len(files) > MAX_PICTURES:
            raise InvalidRequest(
                "messages", f"have {len(files)} pictures or sounds; {MAX_PICTURES} may be in one request"
            )
        for data, field in zip(files, fields, strict=True):
            if len(data) > MAX_FILE_BYTES:
                raise InvalidRequest(field, f"is larger than {MAX_FILE_BYTES >> 20} MiB; send a smaller picture")
        ruled = json.dumps(dict(rule), sort_keys=True).encode()
        names = [(hashlib.sha256(data).digest(), ruled) for data in files]
        with self._lock:
            found = {name: self._kept[name] for name in names if name in self._kept}
        missing = [place for place, name in enumerate(names) if name not in found]
        if missing:
            made = self._ask([files[place] for place in missing], [fields[place] for place in missing], rule)
            found |= {names[place]: one for place, one in zip(missing, made, strict=True)}
        with self._lock:
            for name in names:
                self._kept[name] = found[name]
                self._kept.move_to_end(name)
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return [found[name] for name in names]

    def _ask(self, files: Sequence[bytes], fields: Sequence[str], rule: Rule) -> list[Prepared]:
        hears = rule["kind"] in _HEARS
        if not hears and not _has_pillow():
            raise InvalidRequest(fields[0], "cannot be read: Pillow is not installed; pip install pillow")
        asked = json.dumps({"sizes": [*map(len, files)], "rule": dict(rule)}).encode() + b"\n" + b"".join(files)
        with self._turns:
            try:
                answers = (
                    ask("mlxr.pictures.sounds", asked, MAX_DECODE_S) if hears else self._spare.ask(asked, MAX_DECODE_S)
                )
            except subprocess.TimeoutExpired:
                raise InvalidRequest(
                    fields[0], f"took longer than {MAX_DECODE_S:g} s to decode; it was stopped"
                ) from None
        return _read_answers(answers, fields)


def _has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def _read_answers(answers: bytes, fields: Sequence[str]) -> list[Prepared]:
    pictures, at = list[Prepared](), 0
    for field in fields:
        end = answers.find(b"\n", at)
        if end < 0:
            raise InvalidRequest(field, "could not be decoded: its process used too much memory or time, or was ended")
        said = json.loads(answers[at:end])
        if isinstance(said, str):
            raise InvalidRequest(field, said)
        tiles, at, hears = list[Pixels](), end + 1, "seconds" in said
        for height, width in said["sizes"]:
            first, at = at, at + height * width * (4 if hears else 3)
            part = answers[first:at]  # a copy, so that keeping one picture does not keep the others
            if len(part) != at - first:
                raise InvalidRequest(field, "could not be decoded: its process was ended")
            shape = (height, width) if hears else (height, width, 3)
            tiles.append(np.frombuffer(part, "<f4" if hears else np.uint8).reshape(shape))
        rows, columns = said["grid"]
        pictures.append(Prepared(tuple(tiles), (rows, columns), said.get("seconds", 0.0)))
    return pictures
