"""Thousands of model files that lie in places where it matters: each is refused with an error of ours, or runs.

Files are made of the tiny models: dense ones, experts, hybrids. Their metadata are changed key by key, and mostly their
tensors are made anew to fit the changed metadata, so that many files load and run with sizes that no real model has.
Then the header may lie about shapes, types, places and counts. `make sanitize` runs these files under sanitizers, on
all instruction sets. If a file ends the process, it stays in the test's folder.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import amounts
import numpy as np
import pytest
import tiny_models
from random_model import make_weights
from tiny_models import CASES, TinyRun, read_golden

from mlxr.core.errors import MlxrError
from mlxr.formats import GGML_TYPES, TensorSource, by_name, open_gguf
from mlxr.kernels.context import ISAS, Context, load_native
from mlxr.kernels.sample import SampleRow, sample
from mlxr.models import Decoder, model_from_gguf
from mlxr.models.weights import expected_tensors, gguf_name

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U32,
    U64,
    make_gguf,
    pack_array,
    pack_entry,
    pack_info,
    pack_text,
)

PARTS = 4
FILES = 160 if amounts.is_thorough else 40
SOURCES = tuple(CASES)
MOST_NUMBERS = 1 << 21  # of all tensors of a file
TYPES = tuple(row for row in GGML_TYPES if row.id is not None)
PLAIN = ("f64", "i8", "i16", "i32", "i64")  # types that no weight has
TRIES = 6
WHOLE = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 96, 255, 256, 257, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
REAL = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e-5, 0.5, 2.0, 1e30, float("inf"), float("-inf"), float("nan"))
LONGEST, TOKENS = 64, 13


@dataclass
class File:
    """The contents of a file: `metadata`, and the tensors' names, shapes, types and blocks."""

    metadata: dict[str, Any]
    tensors: list[TensorSource]

    def pack(self, random: np.random.Generator) -> bytes:
        """The bytes; one in four has a header that lies."""
        lie = int(random.integers(28))
        liar = int(random.integers(len(self.tensors)))
        infos, data = [], bytearray()
        for index, tensor in enumerate(self.tensors):
            dims, kind, place, count = [*tensor.shape[::-1]], by_name(tensor.type_name).id, len(data), None
            if index == liar and lie == 0 and dims:
                dims[0] = change_number(random, dims[0])
            elif index == liar and lie == 1 and dims:
                dims[-1] = change_number(random, dims[-1])
            elif index == liar and lie == 2:
                kind = int(random.choice([99, *(row.id for row in TYPES)]))
            elif index == liar and lie == 3:
                place = change_number(random, place // 32) * 32
            elif index == liar and lie == 4:
                count = int(random.integers(6))
            infos.append(pack_info(tensor.name, dims, kind or 0, place, dim_count=count))
            data += bytes(np.ascontiguousarray(tensor.data))
            data += bytes(-len(data) % 32)
        entries = [pack_value(key, value) for key, value in self.metadata.items()]
        known = {"tensor_count": len(infos), "entry_count": len(entries)}
        name = str(random.choice([*known]))
        counts = {name: change_number(random, known[name])} if lie == 5 else {}
        content = make_gguf(entries, infos, bytes(data), **counts)  # type: ignore[arg-type]
        return content[: random.integers(len(content))] if lie == 6 else content


def pack_value(key: str, value: Any) -> bytes:
    """An entry of a type that suits the value."""
    kind, payload = _pack(value)
    return pack_entry(key, kind, payload)


def _pack(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return BOOL, bytes([value])
    if isinstance(value, int):
        if value < 0:
            return I64, struct.pack("<q", max(value, -(1 << 63)))
        return (U32, struct.pack("<I", value)) if value < 1 << 32 else (U64, struct.pack("<Q", min(value, 2**64 - 1)))
    if isinstance(value, float):
        return (F64, struct.pack("<d", value)) if 3e38 < abs(value) < np.inf else (F32, struct.pack("<f", value))
    if isinstance(value, str):
        return STRING, pack_text(value)
    packed = [_pack(item) for item in value]
    kind = packed[0][0] if packed else I32
    same = [payload for own, payload in packed if own == kind]
    return ARRAY, pack_array(kind, same)


def change_number(random: np.random.Generator, value: int) -> int:
    """Return a number near this one, twice or half of it, or one that breaks naive arithmetic."""
    near = (value - 1, value + 1, 2 * value, value // 2, 3 * value, value + 32)
    return abs(int(random.choice(near) if random.random() < 0.85 else random.choice(WHOLE)))


def change_value(random: np.random.Generator, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return change_number(random, value) if random.random() < 0.97 else -value
    if isinstance(value, float):
        return float(random.choice([*REAL, value / 2, value * 2]))
    if isinstance(value, str):
        return str(random.choice(["none", "linear", "yarn", "longrope", "", value + "x"]))
    items = [*value]
    if not items or random.random() < 0.2:
        return [*items, *items[:1]] if random.random() < 0.5 else items[:-1]
    place = int(random.integers(len(items)))
    items[place] = change_value(random, items[place])
    return items


def make_file(seed: int) -> File:
    """The file of a seed."""
    random = np.random.default_rng(seed)
    config, weights_seed, _, _ = read_golden(str(random.choice(SOURCES)))
    metadata, tensors = tiny_models.make_gguf(make_weights(config, weights_seed), config)
    shapes = None
    for _ in range(TRIES if random.random() < 0.9 else 1):
        changed = change_metadata(random, metadata)
        shapes = list_wanted(changed, tensors)
        if shapes is not None:
            break
    if shapes is None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    kinds = [row for row in TYPES if random.random() < 0.3]
    kinds = [row for row in kinds if row.name not in PLAIN or random.random() < 0.03]
    made = [
        tensors[name] if name.startswith("rope_") else make_blocks(random, name, shape, kinds)
        for name, shape in shapes.items()
    ]
    return File(changed, made)


def change_metadata(random: np.random.Generator, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Change up to three values; the sizes of keys and values, which must be equal, mostly change together."""
    changed = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    keys = [key for key in metadata if key != "general.architecture"]
    for key in map(str, random.choice(keys, int(random.integers(4)), replace=False)):
        changed[key] = change_value(random, changed[key])
        twin = key.replace("attention.key_length", "attention.value_length")
        if twin in changed and random.random() < 0.9:
            changed[twin] = changed[key]
    if random.random() < 0.02:
        del changed[str(random.choice(keys))]
    return changed


def list_wanted(metadata: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of all tensors of a file with these metadata; None if no model fits, or only a large one."""
    try:
        config = model_from_gguf(metadata, tensors)
        wanted = expected_tensors(config, tensors)
    except MlxrError:
        return None
    shapes = {gguf_name(name, config): tuple(shape) for name, shape in wanted.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("rope_")}
    return shapes if sum(np.prod(shape, dtype=object) for shape in shapes.values()) < MOST_NUMBERS else None


def make_blocks(random: np.random.Generator, name: str, shape: tuple[int, ...], kinds: Sequence[Any]) -> TensorSource:
    """Make small numbers, or random blocks of one of the types that fit the columns."""
    fitting = [row for row in kinds if len(shape) > 1 and shape[-1] and shape[-1] % row.block_size == 0]
    numbers = int(np.prod(shape))
    if not fitting or random.random() < 0.2:
        values = random.standard_normal(numbers, np.float32) / np.float32(max(1, shape[-1] if shape else 1)) ** 0.5
        return TensorSource(name, "f32", shape, values.astype(np.float32).view(np.uint8))
    row = fitting[int(random.integers(len(fitting)))]
    blocks = random.integers(0, 256, numbers // row.block_size * row.type_size, np.uint8)
    return TensorSource(name, row.name, shape, blocks)


def run_file(path: Path, ctx: Context, random: np.random.Generator) -> bool:
    """Return True if the file could be run: a prompt and some tokens of two sequences, whose next tokens are chosen."""
    try:
        with open_gguf(path) as file:
            config = model_from_gguf(file.metadata, file.tensors)
            tensors: dict[str, Any] = dict(file.tensors)
            if random.random() < 0.5:  # each in memory of its own, whose ends a sanitizer knows
                tensors = {
                    name: TensorSource(tensor.name, tensor.type_name, tensor.shape, np.array(tensor.data))
                    for name, tensor in tensors.items()
                }
            model = Decoder(ctx, replace(config, context_length=min(config.context_length, LONGEST)), tensors)
            pages = str(random.choice(["f32", "f16", "bf16", "q8"]))
            run = TinyRun(model, sequences=2, longest=LONGEST, kv_type=pages)  # type: ignore[arg-type]
            ids = random.integers(0, config.vocab_size, TOKENS).astype(np.int32)
            for chunks in ({0: ids[:7]}, {0: ids[7:8]}, {1: ids[:3], 0: ids[8:9]}, {1: ids[3:4], 0: ids[9:10]}):
                logits = run.step(chunks)
                choose(ctx, logits)
    except MlxrError:
        return False
    return True


def choose(ctx: Context, logits: Any) -> None:
    """Choose the next token of each row; rows with NaN are refused."""
    if np.isfinite(logits).all():
        sample(ctx, logits, [SampleRow()] * logits.shape[0])
    else:
        with pytest.raises(ValueError, match="logits"):
            sample(ctx, logits, [SampleRow()] * logits.shape[0])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("isa", ISAS)
def test_mutated_models_run_or_are_refused(
    isa: str, part: int, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    files, available = request.config.getoption("--mutated-files"), load_native().available_isas()
    if isa not in available:
        pytest.skip(f"this machine or build lacks {isa}")
    if files is None and isa != available[-1]:
        pytest.skip("lower instruction sets run with --mutated-files N, as make sanitize has it")
    ctx, ran = Context("cpu", threads=2, isa=isa), 0
    seeds = range(part, FILES if files is None else files, PARTS)
    for seed in seeds:
        random = np.random.default_rng([seed, 1])
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(make_file(seed).pack(random))
        with np.errstate(all="ignore"):
            ran += run_file(path, ctx, random)
        path.unlink()
    record_property("ran", ran)
    assert ran >= len(seeds) // 2
