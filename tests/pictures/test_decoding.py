"""Pictures as `transformers` would prepare them, and hostile pictures."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxr.core.errors import InvalidRequest
from mlxr.pictures import decoding
from mlxr.pictures.decoding import Decoder, read_base64, read_url
from mlxr.pictures.fetching import Address

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
Image = pytest.importorskip("PIL.Image")

from vision_models import draw_picture  # noqa: E402 -- needs the path

PIXELS = Path(__file__).parents[1] / "models" / "vision_pixels.json"
LEAST, MOST = 256, 1 << 20


def save(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode(*files: bytes, factor: int = 16, least: int = LEAST, most: int = MOST) -> list[Any]:
    rule = {"kind": "near", "factor": factor, "least": least, "most": most}
    made = Decoder().decode(files, [f"picture {place}" for place in range(len(files))], rule)
    return [tile for one in made for tile in one.tiles]


@pytest.mark.parametrize("stated", json.loads(PIXELS.read_text()), ids=lambda stated: json.dumps(stated["rule"])[:60])
def test_pixels_are_those_of_transformers_byte_for_byte(stated: dict[str, Any]) -> None:
    rule, rows = stated["rule"], stated["rows"]
    files = [save(Image.fromarray(draw_picture(*row[:2], seed))) for seed, row in enumerate(rows)]
    named = [f"{rule} {row}" for row in rows]
    for at in range(0, len(rows), decoding.MAX_PICTURES):
        part = slice(at, at + decoding.MAX_PICTURES)
        for row, made in zip(rows[part], Decoder().decode(files[part], named[part], rule), strict=True):
            digest = hashlib.sha256(b"".join(tile.tobytes() for tile in made.tiles)).hexdigest()[:32]
            sizes = [[*tile.shape[:2]] for tile in made.tiles]
            assert [list(made.grid), sizes, digest] == row[2:], row


def paint(mode: str, colour: Any) -> Any:
    return Image.new(mode, (32, 32), colour)


def test_every_kind_of_picture_becomes_three_colours() -> None:
    palette = paint("RGB", (200, 10, 30)).quantize(4)
    clear = paint("RGBA", (200, 10, 30, 0))
    half = paint("LA", (0, 128))
    wide = Image.frombytes("I;16", (32, 32), struct.pack("<H", 0x8040) * 1024)
    seen = {
        "palette": (save(palette), (200, 10, 30)),
        "clear": (save(clear), (255, 255, 255)),
        "clear palette": (save(clear.quantize(4)), (255, 255, 255)),
        "half": (save(half), (127, 127, 127)),
        "gray": (save(paint("L", 77)), (77, 77, 77)),
        "bits": (save(paint("1", 1)), (255, 255, 255)),
        "16 bits": (save(wide), (0x80, 0x80, 0x80)),
        "bmp": (save(paint("RGB", (1, 2, 3)), "BMP"), (1, 2, 3)),
        "gif": (save(paint("P", 0), "GIF", save_all=True, append_images=[paint("P", 9)]), (0, 0, 0)),
        "webp": (save(paint("RGB", (9, 9, 9)), "WEBP", lossless=True), (9, 9, 9)),
        "cmyk": (save(paint("CMYK", (0, 0, 0, 0)), "JPEG"), (255, 255, 255)),
        "icc": (save(paint("RGB", (5, 6, 7)), icc_profile=b"not a profile"), (5, 6, 7)),
    }
    for (name, (_, colour)), pixels in zip(seen.items(), decode(*(file for file, _ in seen.values())), strict=True):
        assert pixels.shape == (32, 32, 3), name
        assert np.abs(pixels[16, 16].astype(int) - colour).max() <= 1, (name, pixels[16, 16])


def test_a_photo_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by a quarter to the right
    picture = Image.new("RGB", (64, 32), (255, 255, 255))
    picture.paste((0, 0, 0), (0, 0, 32, 32))  # its left half is black
    (pixels,) = decode(save(picture, "PNG", exif=exif))
    assert pixels.shape == (64, 32, 3)
    assert pixels[8, 16].tolist() == [0, 0, 0]
    assert pixels[56, 16].tolist() == [255, 255, 255]


def lie(width: int, height: int) -> bytes:
    """Make a PNG whose header states another size than its data have."""
    data = bytearray(save(paint("RGB", (1, 2, 3))))
    data[16:24] = struct.pack(">2I", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


GOOD = save(Image.fromarray(draw_picture(40, 40)))
HOSTILE = {
    "nothing": (b"", "none of the kinds"),
    "text": (b"hello", "none of the kinds"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of the kinds"),
    "tiff": (save(Image.new("RGB", (8, 8)), "TIFF"), "none of the kinds"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of the kinds"),
    "bomb": (lie(60000, 60000), "pixels"),
    "wide bomb": (lie(20000, 1), "its sides may differ by a factor of 200"),
    "too many": (lie(9000, 9000), "has 9000 x 9000 pixels, more than"),
    "a larger size": (lie(4000, 4000), "is broken or cut off"),
    "cut off": (GOOD[: len(GOOD) // 2], "is broken or cut off"),
    "cut jpeg": (save(Image.fromarray(draw_picture(99, 99)), "JPEG")[:900], "is broken or cut off"),
    "only a head": (GOOD[:33], "none of the kinds"),
    "changed": (GOOD[:60] + bytes(40) + GOOD[100:], "is broken or cut off"),
}


def test_slivers_are_seen_or_refused_by_name() -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "square", "side": 56, "resample": 2},
        {"kind": "budget", "factor": 48, "most": 70},
        {"kind": "grid", "tile": 32, "most_tiles": 6},
        {"kind": "tiles", "tile": 224, "longest": 1568, "most": 99},
        {"kind": "tiles", "tile": 490, "longest": 1470, "most": 99},
    ]
    slivers = [save(Image.new("L", size)) for size in ((20_000, 1), (1, 20_000), (1, 5000))]
    for rule in kinds:
        assert all(made.tiles for made in Decoder().decode(slivers, ["a sliver"] * 3, rule))
        for size in ((20_001, 1), (1, 30_000_000)):
            with pytest.raises(InvalidRequest, match="its sides may differ by a factor of 20000"):
                Decoder().decode([lie(*size)], ["a sliver"], rule)


def test_what_is_no_picture_is_refused_by_name() -> None:
    for data, message in HOSTILE.values():
        with pytest.raises(InvalidRequest, match="picture 1: .*" + message):
            decode(GOOD, data)


def test_pieces_of_pictures_never_do_more_than_fail() -> None:
    random = np.random.RandomState(1)
    kinds = [save(Image.fromarray(draw_picture(30, 50)), kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP")]
    for file in kinds:
        changed = bytearray(file)
        for place in random.randint(0, len(file), 8):
            changed[place] = random.randint(256)
        with contextlib.suppress(InvalidRequest):  # anything else fails
            assert decode(bytes(changed))[0].shape[2] == 3


def test_a_process_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_DECODE_S", 0.001)
    with pytest.raises(InvalidRequest, match="took longer than"):
        decode(GOOD)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="17 pictures or sounds; 16 may be"):
        decode(*[GOOD] * 17)
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 100)
    with pytest.raises(InvalidRequest, match="picture 0: is larger than"):
        decode(GOOD)
    with pytest.raises(InvalidRequest, match="url: is larger than"):
        read_base64("A" * 300, "url")
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match="pip install pillow"):
        decode(b"x")


def test_urls_are_data_alone() -> None:
    text = base64.b64encode(GOOD).decode()
    assert read_url(f"data:image/png;base64,{text}", "url") == GOOD
    assert read_url(f"data:;charset=x;base64,{text[:40]}\n{text[40:]}", "url") == GOOD
    assert read_url("https://example.com/a.png", "url") == Address("https://example.com/a.png")
    for url in ("http://169.254.169.254/", "file:///etc/passwd", "", "data:image/png", "ftp://a/https:"):
        with pytest.raises(InvalidRequest, match="no such address is fetched"):
            read_url(url, "url")
    with pytest.raises(InvalidRequest, match="with ;base64"):
        read_url("data:image/png,abc", "url")
    with pytest.raises(InvalidRequest, match="is no base64"):
        read_url("data:image/png;base64,a*b", "url")


def test_a_picture_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rule = Decoder(), {"kind": "square", "side": 16, "resample": 2}
    first = decoder.decode([GOOD, GOOD], ["a", "b"], rule)
    assert first[0] is first[1]
    monkeypatch.setattr(Decoder, "_ask", None)
    assert decoder.decode([GOOD], ["a"], rule)[0] is first[0]
    with pytest.raises(TypeError):
        decoder.decode([GOOD], ["a"], rule | {"side": 17})


def test_a_picture_that_is_kept_holds_no_others() -> None:
    small, large = (save(Image.fromarray(draw_picture(side, side))) for side in (16, 320))
    pixels, _ = decode(small, large)
    held: Any = pixels
    while isinstance(held, np.ndarray):
        held = held.base
    assert len(held) == pixels.nbytes


def get_spare() -> Any:
    spare = Decoder._spare._process
    assert spare is not None
    return spare


def test_a_process_waits_for_pictures_and_is_replaced() -> None:
    Decoder().prepare()
    first = get_spare()
    Decoder().prepare()
    assert get_spare() is first
    decode(GOOD)
    assert first.returncode == 0  # it has answered
    second = get_spare()
    second.kill()
    second.wait()
    decode(GOOD)
    third = get_spare()
    assert third is not second
    assert third.poll() is None
    Decoder._spare.stop()
    assert third.returncode == -signal.SIGKILL


def test_who_waits_ends_with_whoever_would_ask() -> None:
    """It also ends if the asking process has exited while a fork of that lives on."""
    program = (
        "import os, sys\n"
        "from mlxr.pictures.decoding import Decoder\n"
        "Decoder().prepare()\n"
        "print(Decoder._spare._process.pid, flush=True)\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "assert Decoder._spare._process is None\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        waiting = process.stdout.readline().strip()
        end_s = time.monotonic() + 60
        while (state := list_states(waiting)) and not state.startswith("Z"):
            assert time.monotonic() < end_s, state
            time.sleep(0.02)
        process.communicate()


def list_states(process_id: str) -> str:
    """Return the system's state of a process, or "" if it has ended."""
    return subprocess.run(["ps", "-o", "stat=", "-p", process_id], capture_output=True, text=True, check=False).stdout
