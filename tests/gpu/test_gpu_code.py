"""Machine code for NVIDIA GPUs: compiled once for a source, a compiler and a chip, kept on disk, launched by MLX."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.cuda.driver import CudaCode, prune_folder
from mlxr.kernels.gpu.kernel import Variant
from mlxr.kernels.gpu.launcher import Launcher
from mlxr.kernels.gpu.pool import COPY_PAGE

VARIANT = Variant((("THREADS", 256),), (), ("bfloat16", "bfloat16", "int32", "int32"), ("float32",))
WIDE = Variant((("THREADS", 512),), (), VARIANT.input_types, VARIANT.output_types)


class FakeCompiler:
    """Compiles a source to itself."""

    def __init__(self, compiler: str = "one", architecture: str = "sm_90a") -> None:
        self.compiler, self.architecture, self.starts_early = compiler, architecture, True
        self.compiled = 0

    def compile(self, source: str) -> bytes:
        self.compiled += 1
        return f"{self.compiler} {self.architecture} {source}".encode()


def test_what_was_used_last_is_kept(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "used", "old")):
        path = tmp_path / f"{name}.cubin"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "other").write_bytes(bytes(1000))
    prune_folder(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.cubin", "other", "used.cubin"]


@pytest.mark.smoke
def test_code_is_compiled_once_for_a_folder(tmp_path: Path) -> None:
    first, second = FakeCompiler(), FakeCompiler()
    for compiler in (first, second):
        code = CudaCode(compiler, tmp_path / "kernels")
        found = [*code.find_all([(COPY_PAGE, VARIANT), (COPY_PAGE, WIDE)]), code.find(COPY_PAGE, VARIANT)]
        assert found[0] == found[2] != found[1]
        for name, compiled in found:
            assert f"{name}(" in compiled.decode()
    assert (first.compiled, second.compiled) == (2, 0)
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".cubin"}


@pytest.mark.parametrize("other", [FakeCompiler("two"), FakeCompiler(architecture="sm_100a")], ids=["compiler", "chip"])
def test_code_of_another_compiler_or_chip_is_another(tmp_path: Path, other: FakeCompiler) -> None:
    before = CudaCode(FakeCompiler(), tmp_path).find(COPY_PAGE, VARIANT)
    assert CudaCode(other, tmp_path).find(COPY_PAGE, VARIANT) != before
    assert other.compiled == 1


def test_a_folder_that_cannot_be_made_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    code = CudaCode(FakeCompiler(), tmp_path / "file" / "kernels")
    assert code.find(COPY_PAGE, VARIANT)[1]
    assert "compiled kernels are not kept" in caplog.text


def test_mlx_is_given_the_code(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    asked: list[dict[str, Any]] = []

    class FakeMlx:
        class fast:  # noqa: N801 -- as MLX calls it
            @staticmethod
            def precompiled_cuda_kernel(**given: Any) -> list[Any]:
                asked.append(given)
                return [None]

    code = CudaCode(FakeCompiler(), tmp_path)
    arrays = [mx.zeros((8,), kind) for kind in (mx.bfloat16, mx.bfloat16, mx.int32, mx.int32)]
    options = {"groups": (3, 2, 1), "threads": 256, "outputs": [((8,), mx.float32)]}
    Launcher(FakeMlx, "cuda", code=code).launch(COPY_PAGE, arrays, **options)
    (given,) = asked
    assert (given["name"], given["compiled_source"]) == code.find(COPY_PAGE, VARIANT)
    assert (given["grid"], given["threadgroup"]) == ((768, 2, 1), (256, 1, 1))
    assert (given["output_shapes"], given["output_dtypes"]) == ([(8,)], [mx.float32])
    assert given["ensure_row_contiguous"]


@pytest.mark.smoke
def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    class Refusing(FakeCompiler):
        def compile(self, source: str) -> bytes:
            raise DeviceError("CUDA: a kernel does not compile")

    with pytest.raises(DeviceError, match="does not compile"):
        CudaCode(Refusing(), tmp_path).find(COPY_PAGE, VARIANT)
    assert not list(tmp_path.iterdir())
