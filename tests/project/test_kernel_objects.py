"""Objects of kernels, which are compiled once per instruction set, share no code by linkage.

The linker keeps only one of many copies of an inline function, and that may use instructions that the machine lacks. So
a kernel object defines nothing weak, and exports its tables only.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_KINDS = set("WwVvuC")  # weak functions and objects, unique ones, common ones


def find_objects() -> list[Path]:
    """Find the objects of kernels of all tiers, in every build of this checkout; sanitizers add code of their own."""
    found = sorted(ROOT.glob("build/**/mlxr_*.dir/**/*.o"))
    return [path for path in found if "sanitized" not in path.parts]


def list_symbols(path: Path) -> list[tuple[str, str]]:
    """Kind and name of each symbol that the object defines."""
    nm = shutil.which("nm")
    assert nm is not None
    lines = subprocess.run([nm, "--defined-only", path], capture_output=True, text=True, check=True).stdout.splitlines()
    return [(kind, name) for _, kind, name in (line.split(maxsplit=2) for line in lines)]


def find_faults(symbols: list[tuple[str, str]]) -> list[str]:
    """List the symbols that an object of another instruction set could share or provide."""
    return [
        f"{kind} {name}"
        for kind, name in symbols
        if kind in SHARED_KINDS or (kind.isupper() and not name.startswith("mlxr_"))
    ]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_no_kernel_object_defines_shared_code() -> None:
    objects = find_objects()
    if not objects:
        pytest.skip("no objects under build/: the module was built elsewhere")
    faults = {str(path.relative_to(ROOT)): find_faults(list_symbols(path)) for path in objects}
    assert not {path: found for path, found in faults.items() if found}


@pytest.mark.skipif(shutil.which("nm") is None or shutil.which("c++") is None, reason="nm or c++ is not installed")
def test_a_weak_symbol_is_found(tmp_path: Path) -> None:
    source = tmp_path / "weak.cpp"
    source.write_text("#include <vector>\nint sum(int n) { std::vector<int> v; v.push_back(n); return v[0]; }\n")
    subprocess.run(["c++", "-O0", "-c", source, "-o", tmp_path / "weak.o"], check=True)
    faults = find_faults(list_symbols(tmp_path / "weak.o"))
    assert any(fault.startswith("W ") for fault in faults)
    assert any("sum" in fault for fault in faults)
