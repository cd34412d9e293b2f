"""Sounds from strangers: kinds of files, rates, limits and refusals; frames of transformers are in tests/models."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from hearing_models import draw_sound, write_wav

from mlxr.core.errors import InvalidRequest
from mlxr.pictures import sounds
from mlxr.pictures.decoding import Decoder

RULE: dict[str, Any] = {"kind": "samples", "frame": 640, "most": 30 * 16_000}


def make_wav(code: int, bits: int, body: bytes, *, channels: int = 1, rate: int = 16_000, more: bytes = b"") -> bytes:
    form = struct.pack("<HHIIHH", code, channels, rate, 0, 0, bits) + more
    parts = b"fmt " + struct.pack("<I", len(form)) + form + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    return b"RIFF\0\0\0\0WAVE" + parts + b"data" + struct.pack("<I", len(body)) + body


def test_every_kind_of_wav_has_the_same_samples() -> None:
    sound = np.round(draw_sound(800) * 100).astype(np.float32) / np.float32(128)  # that 8 bits can spell
    wide = np.round(sound * 2.0**31).astype("<i8")
    extension = struct.pack("<HHI", 22, 32, 0) + struct.pack("<H", 3) + bytes(14)
    for data in (
        make_wav(1, 8, np.round(sound * 128 + 128).astype(np.uint8).tobytes()),
        make_wav(1, 16, np.round(sound * 2**15).astype("<i2").tobytes()),
        make_wav(1, 24, b"".join(int(one).to_bytes(4, "little", signed=True)[1:] for one in wide)),
        make_wav(1, 32, wide.astype("<i4").tobytes()),
        make_wav(3, 32, sound.tobytes()),
        make_wav(3, 64, sound.astype("<f8").tobytes()),
        make_wav(0xFFFE, 32, sound.tobytes(), more=extension),
        make_wav(3, 32, np.repeat(sound, 2).tobytes(), channels=2),
    ):
        assert sounds.is_sound(data)
        assert np.array_equal(sounds.read(data), sound)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_become_16_khz(rate: int) -> None:
    heard = sounds.resample(np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32), rate)
    assert abs(len(heard) - 16_000) <= 1
    wanted = np.sin(2 * np.pi * 440 * np.arange(len(heard)) / 16_000)
    assert np.abs(heard - wanted)[200:-200].max() < 1e-3
    if rate > 16_000:  # what 16 kHz cannot have is gone
        shrill = sounds.resample(np.sin(2 * np.pi * 9_500 * np.arange(rate) / rate).astype(np.float32), rate)
        assert np.abs(shrill)[200:-200].max() < 1e-2


def test_long_sounds_come_in_pieces() -> None:
    decoder = Decoder()
    rule = RULE | {"most": 16_000}
    found = decoder.decode([write_wav(draw_sound(40_000), channels=2)], ["file"], rule)[0]
    assert [tile.shape for tile in found.tiles] == [(25, 640), (25, 640), (13, 640)]
    assert (found.grid, found.seconds, found.tiles[0].dtype) == ((3, 1), 2.5, np.float32)
    assert decoder.decode([write_wav(draw_sound(40_000), channels=2)], ["file"], rule)[0] is found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", "is a RIFF file without the parts of a WAV file"),
        (make_wav(2, 4, b"abc"), "is a WAV file of kind 2 with 4 bits"),
        (make_wav(1, 16, b"", channels=0), "has 0 channels"),
        (make_wav(1, 16, b"ab", rate=0), "of 0 Hz"),
        (make_wav(1, 8, bytes(8_000_000), rate=4_000), "is 2000 s long; 1800 s are the most"),
        (make_wav(1, 16, b""), "has 0 samples of 16000 Hz, too few to hear"),
        (make_wav(3, 32, struct.pack("<f", float("nan")) * 99), "has samples that are no numbers"),
        (b"\x89PNG", "is none of the kinds that can be read: WAV, FLAC, Ogg, MP3"),
        (b"fLaC" + bytes(99), "is broken or cut off"),
        (b"ID3" + bytes(99), "is broken or cut off"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(data: bytes, message: str) -> None:
    if "broken" in message and not sounds.importlib.util.find_spec("soundfile"):
        message = "other kinds take soundfile: pip install soundfile"
    with pytest.raises(InvalidRequest, match=message) as error:
        Decoder().decode([data], ["messages[0]"], RULE)
    assert error.value.field == "messages[0]"


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_kinds_are_read_by_soundfile(kind: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    target, sound = io.BytesIO(), draw_sound(16_000)
    soundfile.write(target, sound, 16_000, format=kind)
    assert sounds.is_sound(target.getvalue())
    found = Decoder().decode([target.getvalue()], ["file"], RULE)[0]
    heard = np.concatenate(found.tiles).reshape(-1)
    assert abs(found.seconds - 1) < 0.1
    assert kind == "MP3" or np.abs(heard[:16_000] - sound).max() < 0.1
