"""Reads what a SentencePiece `tokenizer.model` file says: pieces with score and type, and how texts are prepared.

The file is a protocol buffer (source: sentencepiece_model.proto); the few fields needed are read here, because the
library shows neither a piece's type nor the normaliser. Every length is checked against the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from mlxr.core.errors import TokenizerError
from mlxr.tokenizers.base import TokenType

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto


class ModelKind(IntEnum):
    """The algorithm of the model (TrainerSpec.ModelType)."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The contents of a tokenizer.model; ids as in TrainerSpec, -1 for none."""

    pieces: list[str]
    scores: list[float]
    types: list[TokenType]
    kind: ModelKind
    unknown_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    normalizer: str
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


def parse_sentencepiece_model(data: bytes, name: str) -> SentencePieceModel:
    """The model in `data`; `name` is what errors call it. Raises TokenizerError for anything malformed."""
    try:
        return _parse_model(data, name)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise TokenizerError(f"{name} is not a SentencePiece model: {error}") from error


def _parse_model(data: bytes, name: str) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[TokenType] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _read_fields(data):
        if field == _PIECES and isinstance(value, bytes):
            piece = dict(_read_fields(value))
            pieces.append(_as_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _as_bytes(piece.get(2, bytes(4))))[0])
            types.append(TokenType(_as_int(piece.get(3, TokenType.NORMAL))))
        elif field == _TRAINER and isinstance(value, bytes):
            trainer |= dict(_read_fields(value))  # parts of a message merge
        elif field == _NORMALIZER and isinstance(value, bytes):
            normalizer |= dict(_read_fields(value))
    if not pieces:
        raise TokenizerError(f"{name} is not a SentencePiece model: it has no pieces")
    # The second arguments are the defaults of the protocol's definition.
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        kind=ModelKind(_as_int(trainer.get(3, ModelKind.UNIGRAM))),
        unknown_id=_as_int(trainer.get(40, 0)),
        bos_id=_as_int(trainer.get(41, 1)),
        eos_id=_as_int(trainer.get(42, 2)),
        pad_id=_as_int(trainer.get(43, -1)),
        normalizer=_as_bytes(normalizer.get(1, b"")).decode(),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
        escape_whitespaces=bool(normalizer.get(5, True)),
        whitespace_as_suffix=bool(trainer.get(24, False)),
    )


def hide_repeats(data: bytes) -> bytes:
    """The same model for the library, which refuses a piece that comes twice: the later ones are unused and renamed."""
    taken: set[bytes] = set()
    written: list[bytes] = []
    for field, value in _read_fields(data):
        if field == _PIECES and isinstance(value, bytes):
            text = _as_bytes(dict(_read_fields(value)).get(1, b""))
            if text in taken:
                name = b"[REPEATED_%d]" % len(written)
                # Of two values of one field the later one counts: the name, and the type.
                value += b"\x0a" + _write_varint(len(name)) + name + b"\x18%c" % TokenType.UNUSED
            taken.add(text)
        tag = _write_varint(field << 3 | (_BYTES if isinstance(value, bytes) else _VARINT))
        written.append(tag + (_write_varint(len(value)) + value if isinstance(value, bytes) else _write_varint(value)))
    return b"".join(written)


def _write_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers with their values: whole numbers for varints, bytes for the other wire types."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            number, position = _read_varint(data, position)
            yield field, number
            continue
        if wire == _BYTES:
            length, position = _read_varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if length > len(data) - position:
            raise ValueError(f"a field of {length} bytes at byte {position} reaches beyond the end")
        yield field, data[position : position + length]
        position += length


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number at byte {position} does not end")


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    # int32 fields carry -1 as a 64-bit number.
    return value - (1 << 64) if value >= 1 << 63 else value
