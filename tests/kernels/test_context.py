"""The base of every operator: context, ledger, choice of implementations, ragged batch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxr.core.errors import DeviceError
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import MAX_THREADS, Context, hash_interface
from mlxr.kernels.ledger import Dispatch, Ledger
from mlxr.kernels.norms import rms_norm
from mlxr.kernels.ragged import RaggedBatch


def make_module(isas: list[str], interface: str | None = None, left_out: Sequence[str] = ()) -> Any:
    """A stand-in for the native module, built from these sources unless `interface` is another stamp."""
    return SimpleNamespace(
        interface=interface or hash_interface(),
        available_isas=lambda: isas,
        left_out_isas=lambda: list(left_out),
        best_isa=lambda: isas[-1],
        default_threads=lambda: 3,
        Runtime=lambda threads, isa: SimpleNamespace(threads=threads, isa=isa, list_ran=list, list_expert_rows=list),
    )


def test_cpu_takes_best_isa_and_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxr._native", make_module(["portable", "avx2"]))
    ctx = Context()
    assert (ctx.device, ctx.threads, ctx.isa) == ("cpu", 3, "avx2")
    chosen = Context("cpu", threads=1, isa="portable")
    assert (chosen.native.threads, chosen.native.isa) == (1, "portable")
    assert repr(chosen) == "Context(device='cpu', threads=1, isa='portable')"


def test_isa_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxr._native", make_module(["portable", "avx2"]))
    with pytest.raises(DeviceError, match="lacks instruction set 'avx512'; it has portable, avx2"):
        Context(isa="avx512")


def test_isa_the_build_left_out_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module(["avx2"], left_out=["portable", "avx512"])
    monkeypatch.setitem(sys.modules, "mlxr._native", module)
    assert Context().isa == "avx2"
    with pytest.raises(
        DeviceError, match=r"'portable' is not in this build, .* alone and has avx2; `make tiers` in the"
    ):
        Context(isa="portable")
    with pytest.raises(DeviceError, match="lacks instruction set 'neon'; it has avx2"):
        Context(isa="neon")


def test_module_of_another_machine_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(
            "it was built for another machine, with avx512 kernels alone, which this processor cannot run"
        )

    monkeypatch.setattr("mlxr.kernels.context.importlib.import_module", refuse)
    with pytest.raises(DeviceError, match=r"with avx512 kernels alone, .*; `make tiers` in the sources builds"):
        Context("cpu")


SOURCES = Path(__file__).parents[2] / "csrc"
TIERS_PROGRAM = """
#include <cstdio>
#include "runtime/cpu_features.h"
int main() {
    for (int i = 0; i < mlxr::kIsaCount; ++i) {
        const auto isa = static_cast<mlxr::Isa>(i);
        std::printf("%d%d%d ", mlxr::isa_built(isa), mlxr::isa_left_out(isa), mlxr::isa_available(isa));
    }
    std::printf("%s", mlxr::isa_name(mlxr::best_isa()));
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="c++ is not installed")
@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ("TIER(portable) TIER(avx2)", "101 100 000 000 000 000 portable"),
        ("TIER(portable) LEFT_OUT(avx2)", "101 010 000 000 000 000 portable"),
        ("LEFT_OUT(portable) TIER(avx2)", "010 100 000 000 000 000 portable"),  # which is not available: it was moved
    ],
)
def test_tiers_that_were_left_out_are_not_available(tiers: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "tiers.def").write_text(tiers.replace(" ", "\n"))
    (tmp_path / "main.cpp").write_text(TIERS_PROGRAM)
    sources = [str(SOURCES / "runtime" / "cpu_features.cpp"), str(tmp_path / "main.cpp")]
    command = ["c++", "-std=c++20", "-O0", "-pthread", f"-I{SOURCES}", f"-I{tmp_path}", *sources]  # only portable runs
    subprocess.run([*command, "-o", str(tmp_path / "main")], check=True)
    assert subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout == expected


def test_module_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxr._native", make_module(["portable"], interface="of other sources"))
    with pytest.raises(DeviceError, match="built from other sources than these; `make run` builds them anew"):
        Context("cpu")


def test_missing_native_module_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxr._native", None)
    with pytest.raises(DeviceError, match=r"build them with `pip install \.`"):
        Context("cpu")
    assert Context("reference").native is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu",), "device 'gpu' is not known; known are cpu, reference, metal, cuda, mlx-cpu, emulated"),
        (("cpu", 0), f"threads must be from 1 to {MAX_THREADS}, got 0"),
        (("cpu", MAX_THREADS + 1), "threads must be"),
        (("cpu", 1, "sse2"), "instruction set 'sse2' is not known"),
        (("reference", 2), "takes no threads, got 2"),
        (("reference", None, "avx2"), "takes no instruction set"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        Context(*arguments)


def test_ledger_counts_sorts_and_resets() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.count("linear", "cpu", "q4_k")
    ledger.count("attend", "reference", "f32")
    ledger.add_copied_bytes(100)
    ledger.add_copied_bytes(28)
    snapshot = ledger.snapshot()
    assert snapshot.dispatches == [Dispatch("attend", "reference", "f32", 1), Dispatch("linear", "cpu", "q4_k", 3)]
    assert snapshot.copied_bytes == 128
    ledger.reset()
    assert ledger.snapshot().dispatches == []
    assert ledger.snapshot().copied_bytes == 0
    assert snapshot.dispatches[1].count == 3


def test_functions_without_a_native_one_run_their_reference() -> None:
    def run_numpy() -> str:
        return "reference"

    def run_native() -> str:
        return "cpu"

    plain, native = Choice("plain", run_numpy), Choice("native", run_numpy, run_native)
    assert plain.pick("cpu") == plain.pick("reference") == ("reference", run_numpy)
    assert native.pick("cpu") == ("cpu", run_native)
    assert native.pick("reference") == ("reference", run_numpy)
    assert (plain.has("cpu"), native.has("cpu"), native.has("gpu")) == (False, True, False)
    with pytest.raises(DeviceError, match="operator native has no implementation for device 'cuda'"):
        native.pick("cuda")


def test_operators_count_what_ran(reference: Context) -> None:
    x = np.ones((2, 8), np.float32)
    rms_norm(reference, x, x[0], 1e-5)
    rms_norm(reference, x, x[0], 1e-5, x)
    assert reference.ledger.snapshot().dispatches == [
        Dispatch("rms_norm", "reference", "f32", 1),
        Dispatch("rms_norm", "reference", "f32+residual", 1),
    ]


def make_batch(**changes: Any) -> RaggedBatch:
    """Sequence 0: tokens at positions 3 to 5; sequence 1: one token at position 9."""
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4],
        "positions": [3, 4, 5, 9],
        "slots": [67, 68, 69, 9],
        "query_starts": [0, 3, 4],
        "context_lengths": [6, 10],
        "page_table": [[2, -1], [0, -1]],
        "output_rows": [2, 3],
    }
    fields |= changes
    return RaggedBatch(**{k: v if isinstance(v, np.ndarray) else np.array(v, np.int32) for k, v in fields.items()})


def test_ragged_batch_knows_its_sizes() -> None:
    batch = make_batch()
    assert (batch.tokens, batch.sequences, batch.longest_context) == (4, 2, 10)
    assert make_batch(output_rows=[]).output_rows.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([1, 2, 3, 4], np.int64)}, "token_ids is int64, expected int32"),
        ({"slots": [1, 2]}, "length of slots is 2, expected 4"),
        ({"positions": [3, 4, 5]}, "length of positions is 3, expected 4"),
        ({"query_starts": [0, 4]}, "length of query_starts is 2, expected 3"),
        ({"query_starts": [0, 0, 4]}, "no sequence empty"),
        ({"query_starts": [1, 3, 4]}, "ascending from 0 to 4"),
        ({"query_starts": [0, 3, 5]}, "ascending from 0 to 4"),
        ({"positions": [3, 4, 6, 9]}, "positions is .* the last ones"),
        ({"positions": [-1, 0, 1, 9], "context_lengths": [2, 10]}, "positions is .* the last ones"),
        ({"page_table": [[2, -1]]}, "rows of page_table is 1, expected 2"),
        ({"page_table": [2, -1]}, "page_table is of shape .* expected 2 dimensions"),
        ({"page_table": np.zeros((4, 2), np.int32)[::2]}, "page_table is an array with strides"),
        ({"output_rows": [4]}, "output_rows is .* rows from 0 to 3"),
        ({"output_rows": [-1]}, "output_rows is .* rows from 0 to 3"),
    ],
)
def test_ragged_batch_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(**changes)


def test_ragged_batch_refuses_emptiness() -> None:
    nothing = np.empty(0, np.int32)
    batch = make_batch()
    with pytest.raises(ValueError, match="at least one of each"):
        replace(
            batch,
            token_ids=nothing,
            positions=nothing,
            slots=nothing,
            query_starts=np.zeros(1, np.int32),
            context_lengths=nothing,
            page_table=np.empty((0, 2), np.int32),
            output_rows=nothing,
        )
