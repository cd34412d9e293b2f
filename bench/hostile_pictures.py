"""Pictures made to hurt a server: each `index` always gives the same one.

Bombs that are small and claim, or hold, very much; files that are cut, that lie about their sizes, or whose parts are
changed; nonsense in EXIF and ICC; two formats in one; thousands of frames; unsupported kinds. Needs Pillow.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from PIL import Image

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SIDES = (1, 2, 3, 200, 20000, 65535, 1 << 24, (1 << 31) - 1, (1 << 32) - 1)


def make_picture(index: int) -> tuple[str, bytes]:
    """Make picture number `index`: its fault in a word, and the file."""
    draw = random.Random(index)
    kind, make = draw.choice([*_MAKERS.items()])
    return kind, make(draw)


def _save(image: Any, kind: str, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def _good(draw: random.Random, kind: str | None = None) -> bytes:
    size = draw.choice([(1, 1), (7, 90), (64, 48), (200, 1), (300, 200)])
    mode = draw.choice(["RGB", "L", "P", "1"]) if kind in (None, "PNG") else "RGB"
    image = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).convert(mode)
    return _save(image if kind == "PNG" else image.convert("RGB"), kind or draw.choice(KINDS))


def _chunk(name: bytes, data: bytes, *, crc: int | None = None) -> bytes:
    found = zlib.crc32(name + data) if crc is None else crc
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", found)


def _png(width: int, height: int, depth: int, colour: int, *chunks: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + _chunk(b"IEND", b"")


def _bomb(draw: random.Random) -> bytes:
    """Zeros that deflate to almost nothing: within the limit of pixels, beyond it, or in other chunks."""
    side = draw.choice([8000, 8192, 9000, 60000])
    pressed = _press()
    text = _chunk(b"zTXt", b"a\0\0" + pressed)
    body = _chunk(b"IDAT", pressed * draw.choice([1, 4]))
    return _png(side, side, draw.choice([1, 8, 16]), draw.choice([0, 2, 6]), *[text] * draw.choice([0, 1, 40]), body)


@cache
def _press() -> bytes:
    return zlib.compress(bytes(1 << 24), 9)


def _lie(draw: random.Random) -> bytes:
    """A wrong size in one of the formats."""
    sides = draw.choice(_SIDES), draw.choice(_SIDES)
    data = bytearray(_good(draw, kind := draw.choice(["PNG", "BMP", "GIF"])))
    if kind == "PNG":
        data[16:24] = struct.pack(">II", *sides)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "BMP":
        data[18:26] = struct.pack("<II", *sides)
    else:
        data[6:10] = struct.pack("<HH", sides[0] & 0xFFFF, sides[1] & 0xFFFF)
    return bytes(data)


def _cut(draw: random.Random) -> bytes:
    data = _good(draw)
    return data[: draw.randrange(len(data))]


def _change(draw: random.Random) -> bytes:
    data = bytearray(_good(draw))
    for _ in range(draw.choice([1, 5, 60])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def _turn(draw: random.Random) -> bytes:
    """Nonsense in EXIF: invalid orientations, offsets into nowhere, endless entries."""
    value = draw.choice([0, 1, 5, 8, 9, 255, 65535])
    count, place = draw.choice([1, 0xFFFF, 0xFFFFFFFF]), draw.choice([8, 0, 0xFFFFFFF0])
    entry = struct.pack("<HHIHH", 0x0112, draw.choice([3, 4, 7, 99]), count, value, 0)
    tiff = (
        b"II*\0" + struct.pack("<I", place) + struct.pack("<H", draw.choice([1, 65535])) + entry * draw.choice([1, 99])
    )
    return _save(Image.new("RGB", (40, 20)), draw.choice(["JPEG", "PNG", "WEBP"]), exif=b"Exif\0\0" + tiff)


def _profile(draw: random.Random) -> bytes:
    profile = draw.choice([b"", b"junk", draw.randbytes(3000), bytes(1 << 20), struct.pack(">I", 1 << 31) + bytes(124)])
    kind = draw.choice(["JPEG", "PNG", "WEBP"])
    return _save(Image.new("RGB", (40, 20)), kind, icc_profile=profile)


def _join(draw: random.Random) -> bytes:
    """Two files in one: a picture after or before a page, a program or another picture."""
    other = draw.choice([b"<html><script>", b"%PDF-1.4", b"PK\x03\x04", b"<svg xmlns='a'>", b"\x7fELF", _good(draw)])
    return draw.choice([_good(draw) + other * 99, other + _good(draw)])


def _move(draw: random.Random) -> bytes:
    """Many frames, of which only one is used."""
    frames = [Image.new("P", (60, 60), shade % 256) for shade in range(draw.choice([2, 200, 2000]))]
    kind = draw.choice(["GIF", "WEBP", "PNG"])
    return _save(
        frames[0].convert("RGB"), kind, save_all=True, append_images=[one.convert("RGB") for one in frames[1:60]]
    )


def _other(draw: random.Random) -> bytes:
    """Kinds that are refused, even if a decoder could read them."""
    image = Image.new("RGB", (20, 20))
    kinds = [_save(image, kind) for kind in ("TIFF", "EPS", "PPM", "ICO", "TGA", "PCX", "PDF")]
    fits = b"SIMPLE  =                    T" + b" " * 2850
    return draw.choice(
        [*kinds, fits, b"8BPS" + bytes(30), b"<svg/>", b"", b"\0", draw.randbytes(9999), b"qoif" + bytes(99)]
    )


def _large(draw: random.Random) -> bytes:
    """The first bytes of a format, then 1 MiB of zeros, or more bytes than a file may have."""
    return draw.choice([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF", b"BM"]) + bytes(
        draw.choice([1, 20]) << 20
    )


def _wide(draw: random.Random) -> bytes:
    """A picture so long and thin that a tower would get a line."""
    long = draw.choice([201, 20000, 60000])
    return _save(Image.new("L", draw.choice([(1, long), (long, 1), (3, long)])), draw.choice(["PNG", "BMP"]))


def _deep(draw: random.Random) -> bytes:
    """Rare shades and channels: 16 bits, CMYK, palettes that are too short, masks."""
    made = draw.choice(["16", "cmyk", "palette", "mask", "one"])
    if made == "16":
        return _png(3, 3, 16, draw.choice([0, 2, 4, 6]), _chunk(b"IDAT", zlib.compress(draw.randbytes(200))))
    if made == "cmyk":
        return _save(Image.new("CMYK", (30, 20), (255, 0, 9, 200)), "JPEG")
    if made == "palette":
        return _png(3, 3, 8, 3, _chunk(b"PLTE", b"abc"), _chunk(b"IDAT", zlib.compress(b"\0\xff\xfe\xfd" * 3)))
    if made == "mask":
        return _save(Image.new("P", (20, 20), 9), "PNG", transparency=draw.choice([b"\0", bytes(256)]))
    return _png(1, 1, draw.choice([0, 3, 8, 255]), draw.choice([1, 3, 5, 255]), _chunk(b"IDAT", b""))


_MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "bomb": _bomb,
    "lying size": _lie,
    "cut": _cut,
    "changed": _change,
    "exif": _turn,
    "icc": _profile,
    "polyglot": _join,
    "animated": _move,
    "foreign": _other,
    "large": _large,
    "long side": _wide,
    "deep": _deep,
}
