"""GGUF models: metadata and tensors, from one file or from all parts of a split one.

Knows how parts belong together; the inside of a part is `gguf_header`'s, and what keys mean is the models'. `open_gguf`
maps the files and gives tensors whose `data` are views of the mapping: nothing is copied.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxr.core.errors import FormatError, NotFound

from .gguf_header import Header, read_header
from .mapped_file import MappedFile
from .tensor import TensorSource
from .weight_files import WeightFiles

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Part:
    """One file of a model, mapped, its header read and checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        self.header: Header = read_header(self.file)

    def read_split_key(self, key: str, default: int) -> int:
        """One of SPLIT_KEYS as an integer."""
        value = self.header.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.complain(key, f"is {str(value)[:80]}, not a count")
        return value

    def complain(self, key: str, reason: str) -> FormatError:
        """The error that says what is wrong with a metadata entry of this part."""
        return FormatError(self.path, f"metadata {key!r}", self.header.metadata_offsets.get(key), reason)


class GGUFFile(WeightFiles):
    """An open GGUF model.

    metadata: key to int, float, bool, str, list (of the same; arrays may nest), or NumPy array for long numeric ones.
    metadata_types: key to its type in words (`u32`, `array[string]`), for a writer that wants to keep them.
    tensors: name to TensorSource, in file order. paths: the files, in order. The keys that describe how a model is
    split over files are left out of the metadata, as all parts are here.
    """

    def __init__(self, parts: list[_Part]) -> None:
        super().__init__([part.file for part in parts])
        first = parts[0].header
        self.version = first.version
        self.metadata = {key: value for key, value in first.metadata.items() if key not in SPLIT_KEYS}
        self.metadata_types = {key: first.metadata_types[key] for key in self.metadata}
        for part in parts:
            for info in part.header.infos:
                if info.name in self.tensors:
                    reason = "is in an earlier part too"
                    raise FormatError(part.path, f"tensor {info.name[:80]!r}", info.info_offset, reason)
                data = part.file.bytes[info.start : info.start + info.nbytes]
                self.tensors[info.name] = TensorSource(info.name, info.row.name, info.shape, data, part.file)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, or all parts of a split one given any of them (`model-00001-of-00003.gguf`).

    NotFound: the file or a part is missing. FormatError: a file is broken, of another kind, or holds a type that is
    not supported.
    """
    opened = _Part(Path(path))
    count = opened.read_split_key("split.count", 1)
    if count <= 1:
        return GGUFFile([opened])
    parts = []
    for number, part_path in enumerate(_name_parts(opened, count)):
        part = opened if part_path == opened.path else _Part(part_path)
        if part.read_split_key("split.count", 1) != count:
            raise part.complain("split.count", f"differs from the {count} of {opened.path.name}")
        if part.read_split_key("split.no", 0) != number:
            raise part.complain("split.no", f"is not {number}, as the file's name has it")
        parts.append(part)
    _check_total(parts)
    return GGUFFile(parts)


def _name_parts(opened: _Part, count: int) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(opened.path.name)
    if match is None or int(match["count"]) != count:
        reason = f"is {count}, but the file name does not end in -00001-of-{count:05d}.gguf; give it its own name back"
        raise opened.complain("split.count", reason)
    paths = []
    for number in range(1, count + 1):
        path = opened.path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise NotFound(f"{path}: part {number} of {count} is missing; all parts belong in one folder")
        paths.append(path)
    return paths


def _check_total(parts: list[_Part]) -> None:
    found = sum(len(part.header.infos) for part in parts)
    stated = parts[0].read_split_key("split.tensors.count", found)
    if stated != found:
        raise parts[0].complain("split.tensors.count", f"is {stated}, the parts hold {found} tensors")
