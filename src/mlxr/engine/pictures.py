"""Pictures and sounds in prompts: their places, their names in the cache, and the rows that a tower makes of them.

A picture's name is a hash of its pixels as the tower sees them, their shape and the tower; nothing else in its file
matters. A sound is treated alike: its frames are its pixels. A picture is encoded when a prompt reaches it and the
cache does not have its pages: some layers at a time, between the engine's steps, so that other answers go on. Rows are
kept while there is room; made again, they have the same bits.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxr.cache.prefix import KEY_BYTES
from mlxr.core.frozen import frozen
from mlxr.kernels.ragged import NO_AXES, NO_STATES, RowsOver
from mlxr.kernels.tensor import FloatArray, IntArray

ROWS_BYTES = 256 << 20  # of encoded pictures that are kept
TOGETHER_TOKENS = 4096, 1024  # of pictures that a GPU encodes at once; the host gains nothing from many
TOGETHER_SHARE = 1 / 16  # of the free memory that encoding the larger number may take; else the smaller one is used
STEP_S = 0.05  # that encoding takes between two steps while answers grow; the part under way is finished
Pixels = npt.NDArray[Any]  # uint8; frames of a sound are float32


@frozen(eq=False, slots=False)
class Picture:
    """A picture as its tower sees it, (height, width, 3), and the grid of the rows that it becomes.

    For a sound, `pixels` are the frames (N, numbers) in float32 that its ear hears, and the grid has one column.
    """

    pixels: Pixels
    grid: tuple[int, int]  # rows and columns
    tower: bytes  # fingerprint of what encodes it

    @property
    def tokens(self) -> int:
        """Tokens that stand for it in a prompt."""
        return self.grid[0] * self.grid[1]

    @property
    def is_sound(self) -> bool:
        """True for a sound. Each of its rows sees only those before it, like tokens of a text."""
        return self.pixels.dtype == np.float32

    @cached_property
    def name(self) -> bytes:
        """BLAKE2b-256 of the tower, the shapes and the pixels."""
        digest = hashlib.blake2b(self.tower, digest_size=KEY_BYTES, person=b"mlxr-picture")
        digest.update(struct.pack("<4i", *self.pixels.shape[:2], *self.grid))
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()


@frozen(eq=False)
class Placed:
    """A picture in a prompt: its tokens are those from `start` to before `stop`."""

    picture: Picture
    start: int
    first: int = 0  # of its rows that stands there; others may stand elsewhere, with words between them
    rows: int | None = None  # how many of its rows stand there; None: all that follow

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + (self.picture.tokens - self.first if self.rows is None else self.rows)


@frozen(eq=False, slots=False)
class Pictures:
    """All pictures of one prompt of `tokens` tokens, in their order."""

    placed: tuple[Placed, ...]
    tokens: int

    def overlap(self, start: int, stop: int) -> Iterator[Placed]:
        """Yield the pictures that have tokens in [start, stop)."""
        return (one for one in self.placed if one.start < stop and start < one.stop)

    def name_page(self, start: int, stop: int) -> bytes:
        """Return what is added to the key of a page besides its tokens: the pictures among them; empty for text."""
        return b"".join(
            one.picture.name
            + struct.pack("<2i", one.start - start, stop - start)
            + (struct.pack("<i", one.first) if one.first else b"")
            for one in self.overlap(start, stop)
        )

    @cached_property
    def _axes(self) -> IntArray:
        """(3, tokens): time, row and column of each token of the prompt; for text all three are the same.

        All tokens of a picture have the time at which it begins; the text after it goes on behind the longer of its
        sides.
        """
        axes, at, place = np.empty((3, self.tokens), np.int32), 0, 0
        for one in self.placed:
            text = one.start - at
            axes[:, at : one.start] = place + np.arange(text, dtype=np.int32)
            place += text
            rows, columns = np.indices(one.picture.grid, dtype=np.int32).reshape(2, -1)
            axes[:, one.start : one.stop] = place + np.stack([np.zeros_like(rows), rows, columns])
            place, at = place + max(one.picture.grid), one.stop
        axes[:, at:] = place + np.arange(self.tokens - at, dtype=np.int32)
        return axes

    def find_axes(self, start: int, count: int) -> IntArray:
        """Return (3, count): time, row and column of the tokens from `start` on, in the prompt or behind it."""
        inside = self._axes[:, start : start + count]
        shift = int(self._axes[0, -1]) - (self.tokens - 1)
        behind = np.arange(max(start, self.tokens), start + count, dtype=np.int32) + np.int32(shift)
        return np.concatenate([inside, np.broadcast_to(behind, (3, len(behind)))], axis=1)


class Part(Protocol):
    """A sequence's part of a batch, as far as pictures need it."""

    @property
    def start_token(self) -> int:
        """The position of its first token in the sequence."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the part."""

    @property
    def pictures(self) -> Pictures | None:
        """The pictures of the sequence's prompt, if it has any."""


Encoding = Generator[None, None, FloatArray]


class Encoder:
    """Keeps rows of pictures in `nbytes`, and makes missing ones with `encode`, which returns the rows of all the
    pictures that it is given, one after another.

    With `turns`, tokens of pictures stand on three axes. With `is_whole`, they see all of their picture, so all of its
    tokens must be computed in one step. Pictures of up to `together` tokens in all are encoded at once, those of
    several requests and those further behind in a prompt; a larger one is encoded alone, and with 0 each is. Belongs to
    the engine's thread.
    """

    def __init__(
        self,
        encode: Callable[..., Encoding],
        *,
        turns: bool = True,
        is_whole: bool = False,
        nbytes: int = ROWS_BYTES,
        together: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encode, self._turns, self._most_bytes, self._clock = encode, turns, nbytes, clock
        self.is_whole, self._together = is_whole, together
        self._rows: OrderedDict[bytes, FloatArray] = OrderedDict()
        self._wanted: dict[bytes, Picture] = {}
        self._later: dict[bytes, Picture] = {}  # pictures that prompts reach after those
        self._open: tuple[list[Picture], Encoding] | None = None
        self.encoded = 0  # pictures, since the start

    @property
    def is_wanted(self) -> bool:
        """True if a prompt waits for a picture."""
        return bool(self._wanted)

    def begin_step(self) -> None:
        """Forget which pictures are wanted; `limit` is called again for each prompt."""
        self._wanted.clear()
        self._later.clear()

    def limit(self, pictures: Pictures, start: int, tokens: int) -> int:
        """Return how many of the next `tokens` tokens after `start` can be computed; want the picture behind them.

        The result may be more than `tokens` if a picture must be computed as a whole.
        """
        for one in pictures.overlap(start, start + tokens):
            if one.picture.name in self._rows:
                self._rows.move_to_end(one.picture.name)
            else:
                self._wanted.setdefault(one.picture.name, one.picture)
                if self._together:
                    behind = pictures.overlap(one.stop, pictures.tokens)
                    self._later |= {more.picture.name: more.picture for more in behind}
                return max(0, one.start - start)
            if self.is_whole and not one.picture.is_sound and one.stop > start + tokens:
                return one.start - start if one.start > start else one.stop - start
        return tokens

    def waits_for(self, pictures: Pictures) -> bool:
        """Return True if `advance` would go on with one of these pictures."""
        names = {one.name for one in self._next}
        return any(one.picture.name in names for one in pictures.placed)

    @property
    def _next(self) -> list[Picture]:
        """The pictures to encode next: those begun, as long as one is wanted; else the first wanted, and others that
        fit."""
        if self._open is not None and any(one.name in self._wanted for one in self._open[0]):
            return self._open[0]
        chosen, tokens = list[Picture](), 0
        for one in (self._wanted | self._later).values():
            is_shown = not (one.is_sound or (chosen and chosen[0].is_sound))
            fits = is_shown and tokens + one.tokens <= self._together
            if not chosen or (fits and one.name not in self._rows):
                chosen.append(one)
                tokens += one.tokens
        return chosen

    def advance(self, *, is_alone: bool) -> None:
        """Encode the pictures begun or wanted first, for STEP_S or a little more; four times as long if `is_alone`.

        If encoding one picture fails, it is given up and the error is raised. If several were encoded at once, nothing
        is raised: from then on each is encoded by itself.
        """
        chosen = self._next
        assert chosen, "nobody waits"
        if self._open is None or self._open[0] is not chosen:
            self._open = chosen, self._encode(*(one.pixels for one in chosen))
        end_s = self._clock() + STEP_S * (4 if is_alone else 1)
        try:
            while self._clock() < end_s:
                next(self._open[1])
        except StopIteration as done:
            self._open = None
            self._keep(chosen, done.value)
            self.encoded += len(chosen)
        except BaseException as error:
            self._open = None
            if len(chosen) == 1 or not isinstance(error, Exception):
                raise
            self._together = 0

    def _keep(self, pictures: Sequence[Picture], rows: FloatArray) -> None:
        ends = np.cumsum([one.tokens for one in pictures[:-1]], dtype=np.intp)
        parts = [part.copy() for part in np.split(rows, ends)] if len(pictures) > 1 else [rows]
        for one, part in zip(reversed(pictures), reversed(parts), strict=True):  # the first one is kept longest
            self._rows[one.name] = part
        while len(self._rows) > 1 and sum(kept.nbytes for kept in self._rows.values()) > self._most_bytes:
            self._rows.popitem(last=False)

    def place(self, parts: Sequence[Part]) -> tuple[RowsOver | None, IntArray, IntArray]:
        """Return the rows over the tokens of a batch of these parts, the three axes of all its tokens, and the end of
        what each token sees."""
        places, values, axes, ends, first = list[IntArray](), list[FloatArray](), list[IntArray](), list[IntArray](), 0
        for part in parts:
            start, count = part.start_token, len(part.token_ids)
            ends.append(np.arange(start + 1, start + count + 1, dtype=np.int32))
            if part.pictures is None or not self._turns:
                axes.append(np.broadcast_to(np.arange(start, start + count, dtype=np.int32), (3, count)))
            else:
                axes.append(part.pictures.find_axes(start, count))
            if part.pictures is not None:
                for one in part.pictures.overlap(start, start + count):
                    low, high = max(start, one.start), min(start + count, one.stop)
                    if not one.picture.is_sound:
                        ends[-1][low - start : high - start] = one.stop
                    places.append(np.arange(low, high, dtype=np.int32) + np.int32(first - start))
                    shift = one.first - one.start
                    values.append(self._rows[one.picture.name][low + shift : high + shift])
            first += count
        rows = RowsOver(np.concatenate(places), np.concatenate(values)) if places else None
        turned = np.ascontiguousarray(np.concatenate(axes, axis=1)) if self._turns else NO_AXES
        return rows, turned, np.concatenate(ends) if self.is_whole else NO_STATES
