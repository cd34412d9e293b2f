"""The process in which sounds are decoded: `python -m mlxr.pictures.sounds`. It answers once and ends.

Requests and answers are as those of the process for pictures (`mlxr.pictures.worker`), but `sizes` are those of a
sound's pieces, [frames, numbers], whose float32 numbers follow, and `seconds` is the length of the whole sound. WAV is
read here (PCM of 8 to 32 bits and floats); FLAC, Ogg and MP3 by soundfile, which the extra `audio` installs. A file's
stated length is checked first; then channels are averaged, and it is resampled to 16 kHz. Frames are those of
transformers' extractors (models/gemma4 and gemma4_unified, feature_extraction_*.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import resource
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.processes import limit

MAX_SECONDS, MAX_MEMORY_BYTES, MAX_PROCESSOR_S = 30 * 60, 2 << 30, 30
MAX_CHANNELS, LOWEST_RATE, HIGHEST_RATE, RATE = 8, 4_000, 384_000, 16_000
KINDS = "WAV, FLAC, Ogg, MP3"
_CROSSINGS, _SHAPE = 32, 9.0  # the resampling filter: zeros of its sinc to each side, and Kaiser's beta
Samples = npt.NDArray[np.float32]


class SoundRefused(Exception):
    """The sound cannot be read. The message says why, and continues "the sound"."""


def read(data: bytes) -> Samples:
    """Return the samples of a sound, one channel of 16 kHz. Raises SoundRefused."""
    samples, rate = _read_wav(data) if data[:4] == b"RIFF" else _read_other(data)
    mono = samples.mean(axis=1, dtype=np.float32) if samples.shape[1] > 1 else samples[:, 0]
    if not np.isfinite(mono).all():
        raise SoundRefused("has samples that are no numbers")
    return resample(np.ascontiguousarray(mono, np.float32), rate)


def check_length(frames: int, rate: int, channels: int) -> None:
    """Raise SoundRefused if a sound is too long, or has a rate or number of channels outside the limits."""
    if not LOWEST_RATE <= rate <= HIGHEST_RATE or not 1 <= channels <= MAX_CHANNELS:
        raise SoundRefused(
            f"has {channels} channels of {rate} Hz, expected 1 to {MAX_CHANNELS} of {LOWEST_RATE} to {HIGHEST_RATE}"
        )
    if frames > MAX_SECONDS * rate:
        raise SoundRefused(f"is {frames / rate:.0f} s long; {MAX_SECONDS} s are the most, so send a part of it")


def _read_wav(data: bytes) -> tuple[Samples, int]:
    """Return the samples (frames, channels) of a WAV file, and its sampling rate in Hz."""
    form, body, at = b"", None, 12
    while at + 8 <= len(data) and body is None:
        name, size = struct.unpack_from("<4sI", data, at)
        part = data[at + 8 : at + 8 + size]
        form, body = (part if name == b"fmt " else form), (part if name == b"data" else None)
        at += 8 + size + size % 2
    if data[8:12] != b"WAVE" or len(form) < 16 or body is None:
        raise SoundRefused("is a RIFF file without the parts of a WAV file")
    code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if code == 0xFFFE and len(form) >= 26:  # the format's code is in the extension
        code = struct.unpack_from("<H", form, 24)[0]
    if (code, bits) not in ((1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)):
        raise SoundRefused(f"is a WAV file of kind {code} with {bits} bits; PCM of 8 to 32 bits and floats are read")
    if not 1 <= channels <= MAX_CHANNELS:
        raise SoundRefused(f"has {channels} channels, expected 1 to {MAX_CHANNELS}")
    frames = len(body) // (channels * bits // 8)
    check_length(frames, rate, channels)
    body = body[: frames * channels * bits // 8]
    if code == 3:
        made = np.frombuffer(body, f"<f{bits // 8}").astype(np.float32)
    elif bits == 8:
        made = (np.frombuffer(body, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    elif bits == 24:
        parts = np.frombuffer(body, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(parts), 4), np.uint8)
        wide[:, 1:] = parts
        made = (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    else:
        made = (np.frombuffer(body, f"<i{bits // 8}") / 2.0 ** (bits - 1)).astype(np.float32)
    return made.reshape(frames, channels), rate


def _read_other(data: bytes) -> tuple[Samples, int]:
    if not is_sound(data):
        raise SoundRefused(f"is none of the kinds that can be read: {KINDS}")
    if importlib.util.find_spec("soundfile") is None:
        raise SoundRefused("is no WAV file, and other kinds take soundfile: pip install soundfile")
    soundfile: Any = importlib.import_module("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            check_length(file.frames, file.samplerate, file.channels)
            made: Samples = file.read(MAX_SECONDS * file.samplerate, dtype="float32", always_2d=True)
            return made, int(file.samplerate)
    except (SoundRefused, MemoryError):
        raise
    except Exception as error:  # a stranger's file can be wrong in any way
        raise SoundRefused(f"is broken or cut off: {' '.join(str(error).split())[:200]}") from None


def is_sound(data: bytes) -> bool:
    """Return True if a file begins like a sound of the kinds that are read."""
    if data[:4] == b"RIFF":
        return data[8:12] == b"WAVE"
    return data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")


def resample(samples: Samples, rate: int) -> Samples:
    """Return the samples at 16 kHz, by a sinc filter with Kaiser's window."""
    if rate == RATE or not len(samples):
        return samples
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    band = min(1.0, up / down)  # share of the samples' frequencies that both rates can have
    half = math.ceil(_CROSSINGS / band)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(samples, half), 2 * half + 1)
    made = np.empty(-(-len(samples) * up // down), np.float32)
    for phase in range(min(up, len(made))):
        whole, part = divmod(phase * down, up)
        away = np.arange(-half, half + 1) - part / up
        shape = np.i0(_SHAPE * np.sqrt(np.maximum(0.0, 1 - (away / (half + 1)) ** 2))) / np.i0(_SHAPE)
        taps = (band * np.sinc(band * away) * shape).astype(np.float32)
        own = made[phase::up]
        own[:] = windows[whole::down][: len(own)] @ taps
    return made


def cut(samples: Samples, rule: dict[str, Any]) -> list[Samples]:
    """Return the frames (N, numbers) of each piece of a sound."""
    least = rule["frame"] // 2 + 1 if rule["kind"] == "mel" else 1
    pieces = [samples[first : first + rule["most"]] for first in range(0, len(samples), rule["most"])]
    kept = [piece for piece in pieces if len(piece) >= least]
    if not kept:
        raise SoundRefused(f"has {len(samples)} samples of {RATE} Hz, too few to hear")
    return [(_take_mel if rule["kind"] == "mel" else _take_samples)(piece, rule) for piece in kept]


def _take_samples(samples: Samples, rule: dict[str, Any]) -> Samples:
    """Return the samples themselves, padded to whole frames (gemma4_unified)."""
    return np.pad(samples, (0, -len(samples) % rule["frame"])).reshape(-1, rule["frame"])


def _take_mel(samples: Samples, rule: dict[str, Any]) -> Samples:
    """Logarithms of the magnitudes in bands of the mel scale (gemma4): frames whose samples are all there."""
    frame, step = rule["frame"], rule["step"]
    padded = np.pad(samples, (frame // 2, 0))
    count = (len(padded) - frame - 1) // step + 1
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)).astype(np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(padded, frame)[::step][:count] * window
    magnitudes = np.abs(np.fft.rfft(frames, n=rule["fft"], axis=1))
    total = np.zeros((count, rule["bands"]))
    for number, shares in enumerate(make_bands(rule["bands"], rule["fft"])):  # one after another: the bits are the same
        chosen = np.flatnonzero(shares)
        if len(chosen):
            total[:, chosen] += magnitudes[:, number, None] * shares[chosen]
    made: Samples = np.log(total + rule["floor"]).astype(np.float32)
    return made


def make_bands(bands: int, fft: int) -> npt.NDArray[np.float64]:
    """Return the share of each frequency in each band, (fft / 2 + 1, bands): triangles on the mel scale of HTK."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    away = edges - np.linspace(0, RATE // 2, fft // 2 + 1)[:, None]
    widths = np.diff(edges)
    shares: npt.NDArray[np.float64] = np.minimum(-away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:])
    return np.maximum(shares, 0)


def prepare(data: bytes, rule: dict[str, Any]) -> tuple[list[Samples], float]:
    """Return the frames of each piece of a sound, by `rule`, and its length in seconds."""
    samples = read(data)
    return cut(samples, rule), len(samples) / RATE


def list_answers(source: Any) -> Iterator[bytes]:
    """Yield the answers to a request, file by file."""
    asked: dict[str, Any] = json.loads(source.readline())
    for size in asked["sizes"]:
        try:
            pieces, seconds = prepare(source.read(size), asked["rule"])
        except SoundRefused as error:
            yield json.dumps(str(error)).encode() + b"\n"
        except MemoryError:
            yield json.dumps(f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory").encode() + b"\n"
        else:
            said = {"grid": [len(pieces), 1], "sizes": [piece.shape for piece in pieces], "seconds": seconds}
            yield json.dumps(said).encode() + b"\n"
            yield from (piece.astype("<f4").tobytes() for piece in pieces)


def main() -> None:
    """Read the files, answer and end."""
    limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    limit(resource.RLIMIT_CPU, MAX_PROCESSOR_S)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        limit(kind, 0)
    for answer in list_answers(sys.stdin.buffer):
        sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
