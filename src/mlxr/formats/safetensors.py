"""Safetensors models: one file, or a folder with one file or several and an index, and their `config.json`.

Knows the container and how shards belong together; nothing of models. `open_safetensors` maps the files and gives
tensors whose `data` are views of the mapping. Headers are not trusted: a bad file raises FormatError(file, field,
offset, reason).
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import FormatError, NotFound
from mlxr.formats.ggml_types import GGMLType, by_name
from mlxr.formats.tensor import MappedFile, TensorSource, WeightFiles

# Headers and indexes of the largest models have some 10 MB; parsed objects take up to 20 times the text.
LARGEST_JSON_BYTES = 25_000_000


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file. Raises NotFound if there is no file."""
    return parse_json_object(path, "file", 0, _read(path))


def read_json_list(path: Path) -> list[object]:
    """Return the list in a JSON file. Raises NotFound if there is no file."""
    parsed = _parse(path, "file", 0, _read(path))
    if not isinstance(parsed, list):
        raise FormatError(path, "file", 0, f"is a JSON {type(parsed).__name__}, not a list")
    return parsed


def _read(path: Path) -> bytes:
    file = MappedFile(path)
    try:
        if file.size_bytes > LARGEST_JSON_BYTES:
            raise FormatError(path, "file", None, f"has {file.size_bytes} bytes; {LARGEST_JSON_BYTES} are allowed")
        return bytes(file.bytes)
    finally:
        file.close()


def parse_json_object(path: Path, field: str, offset: int, text: bytes) -> dict[str, object]:
    """Parse the object at `offset` of the file; errors call it `field`."""
    parsed = _parse(path, field, offset, text)
    if not isinstance(parsed, dict):
        raise FormatError(path, field, offset, f"is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _parse(path: Path, field: str, offset: int, text: bytes) -> object:
    def refuse(reason: str) -> NoReturn:
        raise FormatError(path, field, offset, reason)

    def make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            refuse(f"has the key {key[:80]!r} twice")
        return result

    try:
        parsed: object = json.loads(text.decode(), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 ({error.reason} in its byte {error.start})")
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not JSON: {error}")
    return parsed


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MODELOPT = "hf_quant_config.json"  # ModelOpt's file for the quantisation that others have in config.json
MAX_DIMENSIONS = 8
_TYPE_NAMES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "U32": "u32"}  # u32: see mlx_affine
# Types of weights that config.json says are quantised: see packed.
_QUANTISED_TYPE_NAMES = {"I8": "i8", "U8": "u8", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2"}
# Kinds that a checkpoint may carry beside its weights (position ids, masks): served, but not as weights.
_BUFFER_TYPE_NAMES = {"BOOL": "u8", "U8": "u8", "I8": "i8", "I16": "i16", "I32": "i32", "I64": "i64", "F64": "f64"}


class SafetensorsFolder(WeightFiles):
    """An open safetensors model.

    config: `config.json` beside the weights, empty when a single file has none. tensors: name to TensorSource, in file
    order. paths: the weight files.
    """

    def __init__(self, paths: list[Path], config: dict[str, object]) -> None:
        files = [MappedFile(path) for path in paths]
        super().__init__(files)
        self.config = config
        self.shard_of: dict[str, Path] = {}
        for file in files:
            for name, source in _read_tensors(file, config.get("quantization_config") is not None).items():
                if name in self.tensors:
                    earlier = self.shard_of[name].name
                    raise FormatError(file.path, f"tensor {name[:80]!r}", None, f"is in {earlier} too")
                self.tensors[name], self.shard_of[name] = source, file.path


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFolder:
    """Open a `.safetensors` file, or a folder as Hugging Face lays it out.

    Raises NotFound if the file, the folder's weights, its `config.json` or a shard is missing, FormatError if a file
    is broken or holds a type that is not supported.
    """
    place = Path(path)
    if not place.is_dir():
        config_path = place.with_name("config.json")
        return SafetensorsFolder([place], read_json_object(config_path) if config_path.exists() else {})
    config = read_json_object(place / "config.json")
    if "quantization_config" not in config and (place / _MODELOPT).exists():
        quantization = read_json_object(place / _MODELOPT).get("quantization")
        config["quantization_config"] = {"quant_method": "modelopt"} | (
            dict(quantization) if isinstance(quantization, dict) else {}
        )
    if not (place / INDEX_NAME).exists():
        return SafetensorsFolder([_find_single(place)], config)
    weight_map = _read_index(place / INDEX_NAME)
    folder = SafetensorsFolder([place / name for name in dict.fromkeys(weight_map.values())], config)
    for name, shard in weight_map.items():
        if folder.shard_of.get(name) != place / shard:
            reason = f"says {shard} has tensor {name[:80]!r}, which is not there"
            raise FormatError(place / INDEX_NAME, "weight_map", None, reason)
    return folder


def _find_single(folder: Path) -> Path:
    if (folder / SINGLE_NAME).exists():
        return folder / SINGLE_NAME
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{folder / INDEX_NAME}: no such file, and without it {len(found)} files cannot be put together")
    raise NotFound(f"{folder / SINGLE_NAME}: no such file; a model folder holds it, or {INDEX_NAME} and its shards")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name; the names must stay within the folder."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(path, "weight_map", None, "is missing or no object with tensors in it")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or {"/", "\\", "\0"} & set(shard):
            raise FormatError(path, f"weight_map {name[:80]!r}", None, f"{shard!r:.80} is no file of this folder")
        if not (path.parent / shard).exists():
            raise NotFound(f"{path.parent / shard}: no such file; {path.name} says it holds {name[:80]!r}")
    return weight_map


def _read_tensors(file: MappedFile, is_quantised: bool) -> dict[str, TensorSource]:
    """The tensors of one file, in the order of their data."""
    if file.size_bytes < 8:
        raise FormatError(file.path, "header length", 0, f"wants 8 bytes, the file has {file.size_bytes}")
    length = int.from_bytes(file.bytes[:8].tobytes(), "little")
    if length > min(file.size_bytes - 8, LARGEST_JSON_BYTES):
        reason = f"is {length}, the file has {file.size_bytes - 8} bytes left and {LARGEST_JSON_BYTES} are allowed"
        raise FormatError(file.path, "header length", 0, f"{reason}; is it truncated?")
    header = parse_json_object(file.path, "header", 8, file.bytes[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    places = [_read_entry(file, name, entry, 8 + length, is_quantised) for name, entry in header.items()]
    places.sort(key=lambda place: place[1])
    end, previous = 8 + length, "the header"
    for name, start, row, shape in places:
        if start != end:
            reason = f"starts at byte {start}, but {previous} ends at {end}: tensors may neither overlap nor leave gaps"
            raise FormatError(file.path, f"tensor {name[:80]!r} data_offsets", 8, reason)
        end, previous = start + math.prod(shape) * row.type_size, repr(name[:80])
    if end != file.size_bytes:
        raise FormatError(file.path, "file", end, f"has {file.size_bytes} bytes, the tensors end at {end}")
    return {name: _make_source(file, name, start, row, shape) for name, start, row, shape in places}


def _make_source(file: MappedFile, name: str, start: int, row: GGMLType, shape: tuple[int, ...]) -> TensorSource:
    return TensorSource(name, row.name, shape, file.bytes[start : start + math.prod(shape) * row.type_size], file)


def _read_entry(
    file: MappedFile, name: str, entry: object, data_start: int, is_quantised: bool
) -> tuple[str, int, GGMLType, tuple[int, ...]]:
    """One entry of the header, checked: name, start in the file, type, shape."""

    def refuse(field: str, reason: str) -> FormatError:
        return FormatError(file.path, f"tensor {name[:80]!r} {field}".rstrip(), 8, reason)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("", "is not described by dtype, shape and data_offsets")
    shape, offsets = _counts(entry["shape"]), _counts(entry["data_offsets"])
    if shape is None or len(shape) > MAX_DIMENSIONS or 0 in shape:
        raise refuse("shape", f"is {entry['shape']!r:.80}; up to {MAX_DIMENSIONS} sizes, none zero, are allowed")
    row = _find_type(name, entry["dtype"], is_quantised)
    if row is None:
        known = ", ".join(_TYPE_NAMES)
        raise refuse("dtype", f"{entry['dtype']!r:.80} is not supported; weights may be {known}")
    if offsets is None or len(offsets) != 2:
        raise refuse("data_offsets", f"are {entry['data_offsets']!r:.80}, not two counts")
    wanted = math.prod(shape) * row.type_size
    if offsets[1] - offsets[0] != wanted or data_start + offsets[1] > file.size_bytes:
        reason = f"are {list(offsets)}; shape {list(shape)} takes {wanted} bytes, the file has"
        raise refuse("data_offsets", f"{reason} {file.size_bytes - data_start} of data; is it truncated?")
    return name, data_start + offsets[0], row, shape or (1,)


def _counts(value: object) -> tuple[int, ...] | None:
    """A JSON list of whole numbers from 0 to 2**63, or None."""
    if not isinstance(value, list):
        return None
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 63 for item in value):
        return None
    return tuple(value)


MAX_SMALL_BYTES = 1 << 28  # of a small torch file
_STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2"}
_Numbers = NDArray[np.float32]


class _TensorTable(pickle.Unpickler):
    """Lists the tensors of a torch file. It calls no function that the file names but those for dicts and arrays."""

    def __init__(self, text: bytes, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(text))
        self._archive, self._prefix = archive, prefix

    def find_class(self, module: str, name: str) -> object:
        known: dict[tuple[str, str], object] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            **{("torch", storage): storage for storage in _STORAGES},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"names {module}.{name}"[:120])
        return known[module, name]

    def persistent_load(self, pid: object) -> _Numbers:
        if not isinstance(pid, tuple) or len(pid) < 3 or pid[0] != "storage" or pid[1] not in _STORAGES:
            raise pickle.UnpicklingError("has numbers that are no floats")
        raw = np.frombuffer(self._archive.read(f"{self._prefix}data/{pid[2]}"), _STORAGES[pid[1]])
        wide: _Numbers = (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype.kind == "u" else raw.astype("f4")
        return wide


def _rebuild_tensor(storage: _Numbers, offset: int, shape: tuple[int, ...], strides: object, *_: object) -> _Numbers:
    ordered = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if strides != ordered or min((offset, *shape)) < 0 or offset + math.prod(shape) > len(storage):
        raise pickle.UnpicklingError("has a tensor whose numbers do not lie in its order")
    return storage[offset : offset + math.prod(shape)].reshape(shape)


def read_torch_tensors(path: Path) -> dict[str, _Numbers]:
    """Read the tensors of a small file that torch wrote (a zip archive), as float32, without running code in it.

    Raises FormatError if the file is broken or has anything else. Format: docs of `torch.save`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_SMALL_BYTES:
                raise FormatError(path, "file", None, f"has more than {MAX_SMALL_BYTES} bytes")
            table = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            read = _TensorTable(archive.read(table), archive, table.removesuffix("data.pkl")).load()
    except FormatError:
        raise
    except Exception as error:  # a broken pickle or archive can raise anything
        raise FormatError(path, "file", None, f"is no torch file of floats: {error}"[:200]) from None
    if not isinstance(read, dict) or not all(isinstance(one, np.ndarray) for one in read.values()):
        raise FormatError(path, "file", None, "holds no tensors by their names")
    return {str(name): value for name, value in read.items()}


def _find_type(name: str, dtype: object, is_quantised: bool) -> GGMLType | None:
    """The type of a tensor, None if it is not supported: whole numbers and doubles only if it is no weight."""
    known, part = _TYPE_NAMES, name.rsplit(".", 1)[-1]
    if is_quantised:
        known = known | _QUANTISED_TYPE_NAMES
    if part != "weight" if is_quantised else "weight" not in part:
        known = known | _BUFFER_TYPE_NAMES
    type_name = known.get(dtype) if isinstance(dtype, str) else None
    return None if type_name is None else by_name(type_name)
