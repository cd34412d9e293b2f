"""Checks the source of a kernel as Metal's compiler would: by clang's syntax checker over `declarations`, and by
further rules of MSL. It does not see what only Apple's compiler knows (registers, its code, its macros); on a Mac with
Xcode `compile_by_apple` asks that compiler.

A source is parsed twice, in both standards that MLX may ask for: as MLX writes it, and with its template arguments as
constants in front, so that types have sizes.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from clang.cindex import (
    Cursor,
    CursorKind,
    Diagnostic,
    Index,
    StorageClass,
    TranslationUnit,
    TypeKind,
)
from msl.declarations import MLX_HEADER, make_headers
from msl.stand_in import Source

from mlxr.kernels.gpu.emulator import MOST_BUFFERS, MOST_SHARED_BYTES, MOST_THREADS

OLD, NEW = ("c++14", 310), ("c++17", 400)  # standards, and the version of MSL that has each
_FILE = "kernel.cpp"
_INCLUDE = f"#include <{MLX_HEADER}>\n"
_DEVICE, _CONSTANT, _THREADGROUP = 1, 2, 3  # address spaces, see `declarations`
_FLAGS = (
    "-x", "c++", "-nostdinc", "-nostdinc++", "-ffreestanding", "-fsyntax-only", "-ferror-limit=0", "-fno-exceptions",
    "-fno-rtti", "-Wno-everything", "-Wvla", "-Wvla-extension", "-Wdouble-promotion", "-Wimplicit-float-conversion",
)  # fmt: skip
_FORBIDDEN = {
    CursorKind.CXX_NEW_EXPR: "new",
    CursorKind.CXX_DELETE_EXPR: "delete",
    CursorKind.CXX_THROW_EXPR: "throw",
    CursorKind.CXX_TRY_STMT: "try",
    CursorKind.CXX_DYNAMIC_CAST_EXPR: "dynamic_cast",
    CursorKind.CXX_TYPEID_EXPR: "typeid",
    CursorKind.GOTO_STMT: "goto",
    CursorKind.LAMBDA_EXPR: "a lambda",
}
_NO_TYPES = (TypeKind.DOUBLE, TypeKind.LONGDOUBLE, TypeKind.LONGLONG, TypeKind.ULONGLONG)
_ARRAYS = (TypeKind.CONSTANTARRAY, TypeKind.INCOMPLETEARRAY, TypeKind.DEPENDENTSIZEDARRAY, TypeKind.VARIABLEARRAY)
_SCOPES = (
    CursorKind.TRANSLATION_UNIT,
    CursorKind.NAMESPACE,
    CursorKind.STRUCT_DECL,
    CursorKind.CLASS_DECL,
    CursorKind.CLASS_TEMPLATE,
)
_FUNCTIONS = (
    CursorKind.FUNCTION_DECL,
    CursorKind.FUNCTION_TEMPLATE,
    CursorKind.CXX_METHOD,
    CursorKind.CONSTRUCTOR,
)


class Checker:
    """Finds the problems of sources. The declarations are written to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, Index.create()
        for name, text in make_headers().items():
            (folder / name).write_text(text)
        self._units: dict[tuple[str, int], TranslationUnit] = {}
        self._walked: set[str] = set()  # headers, which many sources have
        self._found: dict[str, list[str]] = {}  # by the text of a source
        self._checked: dict[Source, list[str]] = {}  # mostly the same are asked for again, and texts are long

    def check(self, source: Source) -> list[str]:
        """List the problems of a source; none if Metal would compile it."""
        if source in self._checked:
            return self._checked[source]
        text = source.text
        if text not in self._found:
            problems, resolved = [*self._read_diagnostics(self._parse(OLD, text), text)], _resolve(source)
            unit = self._parse(NEW, resolved)
            problems += self._read_diagnostics(unit, resolved)
            problems += self._walk(unit, source)
            self._found[text] = [*dict.fromkeys(problems)]
        self._checked[source] = [*_check_limits(source), *self._found[text]]
        return self._checked[source]

    def _parse(self, standard: tuple[str, int], text: str) -> TranslationUnit:
        """Parse a text; texts of one standard share a unit that is parsed again, for which clang keeps the headers."""
        prepared = [(_FILE, _INCLUDE + _prepare(text))]
        if standard in self._units:
            self._units[standard].reparse(prepared)
        else:
            name, version = standard
            flags = [*_FLAGS, f"-std={name}", f"-DMSL_VERSION={version}", "-I", str(self._folder)]
            keep = TranslationUnit.PARSE_PRECOMPILED_PREAMBLE | 0x100  # from the first parse on
            self._units[standard] = self._index.parse(_FILE, flags, prepared, keep)
        return self._units[standard]

    def _read_diagnostics(self, unit: TranslationUnit, text: str) -> Iterator[str]:
        lines = text.split("\n")
        for found in unit.diagnostics:
            if found.severity >= Diagnostic.Error or _is_forbidden(found):
                line = lines[found.location.line - 2].strip() if 1 < found.location.line <= len(lines) + 1 else ""
                yield f"{found.spelling}: {line}"

    def _walk(self, unit: TranslationUnit, source: Source) -> Iterator[str]:
        """Yield the problems that the rules find in the kernel, and in the header unless that was walked before."""
        shared = 0
        for cursor in unit.cursor.get_children():
            if cursor.location.file is None or cursor.location.file.name != _FILE:
                continue
            if cursor.spelling == source.name:
                shared = sum(_round(size) for size in _list_shared(cursor))
                yield from _apply_rules(cursor, is_kernel=True)
            elif source.header not in self._walked:
                yield from _apply_rules(cursor)
        self._walked.add(source.header)
        if shared > MOST_SHARED_BYTES:
            yield f"{shared} bytes of threadgroup memory, of which there are {MOST_SHARED_BYTES}"


def compile_by_apple(text: str, standard: str, include: Path) -> str:
    """Return the errors of `xcrun metal` for a source behind MLX's utils.h, or "" if it compiles. `include` is the
    folder of MLX's headers, `standard` such as "metal3.1". Raises OSError if there is no xcrun.
    """
    command = f"xcrun -sdk macosx metal -x metal -std={standard} -w -c - -o {os.devnull} -I".split()
    given = f'#include "mlx/backend/metal/kernels/utils.h"\n{text}'
    done = subprocess.run([*command, str(include)], input=given, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"xcrun ended with {done.returncode}"


def _check_limits(source: Source) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z_]\w*", source.name):
        yield f"{source.name} is no name of a function"
    if not source.text.isascii():
        yield "there is a character beyond ASCII, as which MLX hands the source on"
    if source.buffers > MOST_BUFFERS:
        yield f"{source.buffers} buffers, of which there are {MOST_BUFFERS}"
    if source.threads > MOST_THREADS:
        yield f"{source.threads} threads, of which there are {MOST_THREADS}"


def _prepare(text: str) -> str:
    """The text as clang takes it: without attributes, and with variables in an address space static."""
    text = re.sub(r"(#define SHARED .*)\bthreadgroup\b", r"\1static threadgroup", text)
    return re.sub(r"\[\[[a-z_]+(\([^\]]*\))?\]\]", "", text)


def _resolve(source: Source) -> str:
    kinds = {"typename": "using {} = {};", "int": "constant constexpr int {} = {};"}
    told = [
        kinds.get(kind, "constant constexpr bool {} = {};").format(name, value)
        for kind, name, value in source.constants
    ]
    constants = "\n".join(told)
    return f"{source.header}\nnamespace {{\n{constants}\n}}\n{source.signature}{source.body}\n}}\n"


def _is_forbidden(found: Diagnostic) -> bool:
    if found.option == "-Wimplicit-float-conversion":
        return "__bf16" in found.spelling
    return found.option in ("-Wvla", "-Wvla-extension", "-Wdouble-promotion")


def _round(size: int) -> int:
    return -(-size // 16) * 16


def _list_shared(kernel: Cursor) -> Iterator[int]:
    """Yield the bytes of each variable of the kernel in the threadgroup's memory."""
    for cursor in kernel.walk_preorder():
        if cursor.kind == CursorKind.VAR_DECL and _find_space(cursor) == _THREADGROUP:
            yield cursor.type.get_size()


def _find_space(cursor: Cursor) -> int:
    kind = cursor.type
    while kind.kind in _ARRAYS:
        kind = kind.element_type
    return kind.get_address_space()


def _apply_rules(root: Cursor, *, is_kernel: bool = False) -> Iterator[str]:
    for cursor in root.walk_preorder():
        if cursor.kind in _FORBIDDEN:
            yield f"line {cursor.location.line}: {_FORBIDDEN[cursor.kind]}"
        elif cursor.kind in (CursorKind.VAR_DECL, CursorKind.PARM_DECL, CursorKind.FIELD_DECL):
            yield from _check_declared(cursor, is_kernel)
        elif cursor.kind == CursorKind.FLOATING_LITERAL and cursor.type.kind == TypeKind.DOUBLE:
            yield f"line {cursor.location.line}: a literal that is double"
        elif cursor.kind == CursorKind.CXX_METHOD and cursor.is_virtual_method():
            yield f"{cursor.spelling} is virtual"


def _check_declared(cursor: Cursor, is_kernel: bool) -> Iterator[str]:
    name, space = cursor.spelling, _find_space(cursor)
    if cursor.type.get_canonical().kind in _NO_TYPES:
        yield f"{name} is {cursor.type.spelling}"
    if cursor.type.kind in (TypeKind.POINTER, TypeKind.LVALUEREFERENCE) and not _has_space(cursor):
        yield f"{name}, a pointer or reference, has no address space"
    if cursor.kind != CursorKind.VAR_DECL:
        return
    if cursor.type.kind == TypeKind.VARIABLEARRAY:
        yield f"{name} is an array of a length that is not constant"
    if cursor.semantic_parent.kind in _SCOPES:
        if space != _CONSTANT:
            yield f"{name}, outside of functions, is not constant"
    elif space == _THREADGROUP and not is_kernel:
        yield f"{name} is threadgroup memory outside of the kernel"
    elif cursor.storage_class == StorageClass.STATIC and space not in (_CONSTANT, _THREADGROUP):
        yield f"{name} is static"


def _has_space(cursor: Cursor) -> bool:
    if cursor.type.get_pointee().get_address_space() or not cursor.spelling:
        return True
    pointee = cursor.type.get_pointee()
    while pointee.kind in _ARRAYS:
        pointee = pointee.element_type
    return pointee.get_address_space() != 0 or any(
        child.kind == CursorKind.ANNOTATE_ATTR and child.spelling == "thread" for child in cursor.get_children()
    )
