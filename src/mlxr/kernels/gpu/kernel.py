"""Descriptions of GPU kernels, and their source text for each target.

A kernel is a body (the inside of a function) and the headers it needs, in files beside the operator that launches it.
The names of its arrays, its compile-time constants and the types behind its type names come from the launch. For
launches through MLX, MLX writes the function around the body; for the host, and for CUDA's own compiler, this module
does. It knows no arrays.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from mlxr.core.frozen import frozen

Target = Literal["metal", "cuda", "emulated"]
HostWords = Literal["emulated", "apple"]  # a kernel's words on the host: our own, or Metal's
TARGETS: tuple[str, ...] = get_args(Target)
LANES = 32
_PRELUDES: Mapping[Target | HostWords, tuple[str, ...]] = {
    "metal": ("metal/metal.h",),
    "apple": ("emulated/fibers.h", "emulated/msl.h", "metal/metal.h"),
    "cuda": ("cuda/cuda.h",),
    "emulated": ("emulated/fibers.h", "emulated/emulated.h"),
}
_ON_HOST = (  # words of metal.h that C++ does not have
    ("#include <metal_.*\n", ""),
    ("#define PRIVATE thread", "#define PRIVATE"),
    ("#define SHARED .*", '#define SHARED alignas(16) __attribute__((section("mlxr_shared"))) static'),
    ("#define TABLE constant", "#define TABLE static const"),
)
_LINES: Mapping[Target | HostWords, tuple[str, ...]] = {
    "metal": (),
    "apple": (),
    "cuda": ("cuda/lines.h", "ranks.h"),
    "emulated": ("emulated/lines.h", "ranks.h"),
}
_RINGS: Mapping[Target | HostWords, tuple[str, ...]] = {
    "metal": (),
    "apple": (),
    "cuda": ("cuda/rings.h",),
    "emulated": ("emulated/rings.h",),
}

# Indices of a thread, by target. MLX finds Metal's attributes by looking for their names in the body.
_PLACES: Mapping[str, Mapping[str, str]] = {
    "metal": {
        "group_x": "threadgroup_position_in_grid.x",
        "group_y": "threadgroup_position_in_grid.y",
        "group_z": "threadgroup_position_in_grid.z",
        "thread_id": "thread_position_in_threadgroup.x",
        "simd_id": "simdgroup_index_in_threadgroup",
        "lane_id": "thread_index_in_simdgroup",
    },
    "cuda": {
        "group_x": "blockIdx.x",
        "group_y": "blockIdx.y",
        "group_z": "blockIdx.z",
        "thread_id": "threadIdx.x",
        "simd_id": "(threadIdx.x / 32)",
        "lane_id": "(threadIdx.x % 32)",
    },
    "emulated": {
        "group_x": "emulated::group.x",
        "group_y": "emulated::group.y",
        "group_z": "emulated::group.z",
        "thread_id": "emulated::group.running->thread",
        "simd_id": "(emulated::group.running->thread / 32)",
        "lane_id": "(emulated::group.running->thread % 32)",
    },
}
_HOST_TYPES = {
    "float32": "float",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "int",
    "int64": "long long",
    "uint8": "uint8_t",
}
_CUDA_TYPES = {**_HOST_TYPES, "float16": "__half", "bfloat16": "__nv_bfloat16"}
_CUDA_WORDS = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
"""
# A launch may start before the previous one has ended. It waits for that one's results at its start, or where its body
# says so.
_AWAIT = "await_inputs()"
OPENS = "OPENS"
_OPEN = '  asm volatile("griddepcontrol.launch_dependents;");\n'


@cache
def name_type(kind: object) -> str:
    """Return MLX's name of a type of numbers."""
    return str(kind).rpartition(".")[2]


@frozen(eq=False)
class Kernel:
    """A kernel: `body` and `headers` are files in `folder`; `inputs` and `outputs` name the arrays in the body.

    `type_names` names the types that constants TYPE_A and TYPE_B may be. `boxed` are the inputs that it loads in boxes,
    into rings in its memory; a launch has a `Box` for each. A kernel without them has the words of rings only if it
    `has_rings`, and those of lines between devices if it `has_lines`. A kernel that `opens_late` lets the next launch
    start only when it has waited for earlier launches, so that the next one can read their results from its start. If
    it `counts_rows`, the rows of its first output are experts' rows, and the ledger counts them. A `cuda_only` kernel
    needs what Metal lacks: the words of rings or lines, or matrix units with documented fragments; tests emulate it. A
    `metal_only` kernel multiplies squares.
    """

    name: str
    folder: Path
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()
    boxed: tuple[str, ...] = ()
    has_rings: bool = False
    has_lines: bool = False
    opens_late: bool = False
    counts_rows: bool = False
    cuda_only: bool = False
    metal_only: bool = False
    operator: str = ""  # the operator in the ledger; by default the folder's name
    type_names: Mapping[int, str] = field(default_factory=dict, repr=False)

    def count_rows(self, shape: Sequence[int]) -> int:
        """Return the rows of experts in a first output of this shape; 0 if the kernel does not count them."""
        return math.prod(shape[:-1]) if self.counts_rows else 0


@frozen
class Box:
    """A matrix (rows, columns) of 16-bit numbers that is loaded in boxes of `box_rows` and `blocks` of 64 columns."""

    rows: int
    columns: int
    box_rows: int
    blocks: int


@frozen
class Variant:
    """One way to compile a kernel: constants by name, types by name, and the types of the arrays, as MLX names them."""

    constants: tuple[tuple[str, int], ...]
    types: tuple[tuple[str, str], ...]
    input_types: tuple[str, ...]
    output_types: tuple[str, ...]

    @staticmethod
    def of(
        constants: Mapping[str, int], types: Mapping[str, object], inputs: Iterable[object], outputs: Iterable[object]
    ) -> Variant:
        """Return the variant of a launch; `inputs` and `outputs` are MLX's types of its arrays."""
        return Variant(
            constants=tuple((name, int(value)) for name, value in constants.items()),
            types=tuple((name, name_type(kind)) for name, kind in types.items()),
            input_types=tuple(map(name_type, inputs)),
            output_types=tuple(map(name_type, outputs)),
        )

    def opening(self) -> Variant:
        """Return the same variant with OPENS, see `make_cuda_source`."""
        return replace(self, constants=(*self.constants, (OPENS, 1)))

    @property
    def suffix(self) -> str:
        """The part of an identifier that distinguishes the variants of a kernel."""
        parts = [*(str(value).replace("-", "m") for _, value in self.constants)]
        parts += [kind for _, kind in self.types]
        return "_".join([*parts, *self.input_types, *self.output_types])


@cache
def read_prelude(target: Target | HostWords) -> str:
    """Return the beginning of the source of every kernel for `target`."""
    text = "\n".join((Path(__file__).parent / name).read_text() for name in _PRELUDES[target])
    if target == "apple":
        for word, other in _ON_HOST:
            text = re.sub(word, other, text)
        text = f"#define MLXR_MEASURES\n{text}"
    return text


@cache
def read_header(kernel: Kernel, target: Target | HostWords) -> str:
    """Return the prelude of `target`, the words of rings and lines if needed, and the kernel's headers and types."""
    rings = _RINGS[target] if kernel.boxed or kernel.has_rings else ()
    lines = _LINES[target] if kernel.has_lines else ()
    parts = [
        *(Path(__file__).parent / name for name in (*rings, *lines)),
        *(kernel.folder / name for name in kernel.headers),
    ]
    text = "\n".join([read_prelude(target), *(part.read_text() for part in parts)])
    if "struct Blocks" not in text:
        return text
    types = (
        f"template <> struct Blocks<{n}> {{ typedef {name.upper()} type; }};" for n, name in kernel.type_names.items()
    )
    return "\n".join([text, *types, ""])


@cache
def read_body(kernel: Kernel, target: Target | HostWords) -> str:
    """Return the body, after declarations of the thread indices that it uses."""
    text = (kernel.folder / kernel.body).read_text()
    found = _PLACES["emulated" if target == "apple" else target]
    places = [f"  const uint {name} = {value};\n" for name, value in found.items() if name in text]
    return "".join(places) + text


@cache
def write_metal(kernel: Kernel, types: frozenset[int]) -> tuple[str, str]:
    """Return header and body for Metal, with only what this kernel needs for these types of weights.

    That saves time: MLX hashes both at every launch, and Metal parses them in every process.
    """
    header, body = (_strip(text) for text in (read_header(kernel, "metal"), read_body(kernel, "metal")))
    chunks, used, wanted = _cut(header), set[int](), {*re.findall(r"\w+", body)}
    places: dict[str, list[int]] = {}
    for index, chunk in enumerate(chunks):
        kind = re.match(r"template <> struct Blocks<(\d+)>", chunk)
        names = _list_defined(chunk)
        if (kind is not None and int(kind[1]) in types) or not names:
            used.add(index)
            wanted.update(re.findall(r"\w+", chunk))
        for name in names if kind is None else ():
            places.setdefault(name, []).append(index)
    while wanted:
        for index in places.get(wanted.pop(), ()):
            if index not in used:
                used.add(index)
                wanted.update(re.findall(r"\w+", chunks[index]))
    return "\n".join([*(chunks[index] for index in sorted(used)), ""]), body


def _strip(text: str) -> str:
    """Return the text without comments, indents and empty lines."""
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "\n".join([*filter(None, lines), ""])


def _cut(text: str) -> list[str]:
    """Return a header as a list of its definitions, and of the preprocessor's lines between them."""
    chunks, lines, depth = [], list[str](), 0
    for line in text.splitlines():
        if line.startswith("#") and not lines:
            chunks.append(line)
            continue
        lines.append(line)
        depth += line.count("{") - line.count("}")
        if not depth and line.endswith((";", "}")):
            chunks.append("\n".join(lines))
            lines = []
    return chunks


def _list_defined(chunk: str) -> list[str]:
    """Return the names that a definition makes; none if it must stay in any case."""
    head = re.sub(r"^template <[^>]*>\s*", "", chunk)
    if head.startswith("enum"):
        return re.findall(r"(\w+)(?: = [^,}]*)?[,} ]", head.partition("{")[2])
    for pattern in (
        r"struct (\w+)",
        r"typedef [^;]*?(\w+);",
        r"using (\w+) =",
        r"TABLE [\w ]+?(\w+)\[",
        r"GRID\((\w+)",
    ):
        if found := re.match(pattern, head):
            return [found[1]]
    found = re.match(r"FUNCTION [^(]*?(\w+)\(", head)
    return [] if found is None else [found[1]]


def make_host_source(kernel: Kernel, variant: Variant, words: HostWords = "emulated") -> str:
    """Return a whole C++ file for the host, whose `mlxr_run` runs every threadgroup, one after another."""
    arrays = _declare_arrays(kernel.inputs, variant.input_types, 0, "const ")
    arrays += _declare_arrays(kernel.outputs, variant.output_types, len(kernel.inputs), "")
    return (
        f"{read_header(kernel, words)}\nstatic void body(void **arrays) {{\n"
        f"{''.join(arrays)}{_declare_constants(variant, _HOST_TYPES)}{read_body(kernel, words)}\n}}\n\n"
        'extern "C" void mlxr_run(void **arrays, const int *groups, int threads) {\n'
        "  emulated::run(body, arrays, groups[0], groups[1], groups[2], threads);\n}\n"
    )


def name_cuda_function(kernel: Kernel, variant: Variant) -> str:
    """Return a name that no other variant has."""
    told = repr((kernel.body, kernel.headers, variant))
    return f"mlxr_{kernel.name}_{hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}"


def make_cuda_source(kernel: Kernel, variant: Variant, *, starts_early: bool) -> str:
    """Return a CUDA C++ file with one kernel, `name_cuda_function`, whose arguments are the addresses of its arrays.

    With `starts_early`, it may start before the previous launch has ended. If that launch has the constant OPENS, it
    may start as soon as all threadgroups of that launch run, or, if that kernel `opens_late`, as soon as they have
    waited for earlier launches.
    """
    inputs, outputs = (
        [f"{_CUDA_TYPES[kind]} *{name}" for name, kind in zip(names, kinds, strict=True)]
        for names, kinds in ((kernel.inputs, variant.input_types), (kernel.outputs, variant.output_types))
    )
    for index, name in enumerate(kernel.inputs):
        if name in kernel.boxed:
            inputs[index] = f"__grid_constant__ Box {name}"
    arrays = ", ".join([*(f"const {one}" for one in inputs), *outputs])
    constants = dict(variant.constants)
    opens, defines = OPENS in constants, "#define MLXR_STARTS_EARLY\n" if starts_early else ""
    if opens and kernel.opens_late:
        defines += "#define MLXR_OPENS_LATE\n"
    threads, resident = constants["THREADS"], constants.get("RESIDENT", 1)
    return (
        f"{_CUDA_WORDS}{defines}{read_header(kernel, 'cuda')}\n"
        f'extern "C" __global__ void __launch_bounds__({threads}, {resident}) '
        f"{name_cuda_function(kernel, variant)}({arrays}) {{\n"
        f"{_declare_constants(variant, _CUDA_TYPES)}{_OPEN if opens and not kernel.opens_late else ''}"
        f"{_begin_early(kernel) if starts_early else ''}"
        f"{read_body(kernel, 'cuda')}\n}}\n"
    )


def _begin_early(kernel: Kernel) -> str:
    own = "".join((kernel.folder / name).read_text() for name in (kernel.body, *kernel.headers))
    return "" if _AWAIT in own else f"  {_AWAIT};\n"


def _declare_constants(variant: Variant, types: Mapping[str, str]) -> str:
    lines = [f"  constexpr int {name} = {value};\n" for name, value in variant.constants]
    return "".join([*lines, *(f"  using {name} = {types[kind]};\n" for name, kind in variant.types)])


def _declare_arrays(names: Sequence[str], types: Sequence[str], first: int, qualifier: str) -> list[str]:
    return [
        f"  {qualifier}{_HOST_TYPES[kind]} *{name} = static_cast<{qualifier}{_HOST_TYPES[kind]} *>(arrays[{index}]);\n"
        for index, (name, kind) in enumerate(zip(names, types, strict=True), first)
    ]
