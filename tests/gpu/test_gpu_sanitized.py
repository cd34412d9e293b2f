"""Every kernel once under the address sanitizer, and a check that the emulator sees errors that a GPU would hide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_cases import REFERENCE, Scene, make_tensor, play, random_floats, relative_error

from mlxr.core.errors import DeviceError
from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.norms import rms_norm

EXACT = 3e-6
NARROW = 8e-3  # products of 16-bit numbers


@pytest.mark.parametrize("tokens", [3, 9])
def test_products_stay_within_their_arrays(sanitized: Context, tokens: int) -> None:
    tensors = [make_tensor("q4_k", 21, 1280), make_tensor("q6_k", 5, 1280)]
    x = random_floats(1, tokens, 1280)
    result = settle(linear(sanitized, sanitized.gpu.mx.array(x), prepare(sanitized, tensors)))
    assert relative_error(result, linear(REFERENCE, x, prepare(REFERENCE, tensors))) < EXACT


@pytest.mark.parametrize("tokens", [1, 3])
def test_tiles_stay_within_their_arrays(sanitized: Context, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and product of two types on matrix units; one row goes through shared memory."""
    monkeypatch.setattr(sanitized.gpu, "has_tiles", True)
    mx, x, weight = sanitized.gpu.mx, random_floats(1, tokens, 512), random_floats(2, 512)
    tensors = [make_tensor("q4_k", 21, 512), make_tensor("q6_k", 5, 512)]

    def run(ctx: Context, array: object) -> object:
        normed, _ = rms_norm(ctx, array, weight, 1e-5)  # type: ignore[arg-type]
        return settle(linear(ctx, normed, prepare(ctx, tensors)))

    assert relative_error(run(sanitized, mx.array(x)), np.asarray(run(REFERENCE, x))) < NARROW


def test_fused_layer_stays_within_its_arrays(sanitized: Context) -> None:
    """Norm, product and gate in one launch, then product and sum in one."""
    mx, x, weight = sanitized.gpu.mx, random_floats(1, 2, 256), random_floats(2, 256)
    up, down = [make_tensor("q5_k", 2 * 256, 256)], [make_tensor("q8_0", 256, 256)]

    def run(ctx: Context, array: object) -> object:
        normed, stream = rms_norm(ctx, array, weight, 1e-5)  # type: ignore[arg-type]
        made = activate(ctx, linear(ctx, normed, prepare(ctx, up)))
        return rms_norm(ctx, stream, weight, 1e-5, linear(ctx, made, prepare(ctx, down)))[1]

    assert relative_error(run(sanitized, mx.array(x)), np.asarray(run(REFERENCE, x))) < EXACT


@pytest.mark.parametrize(
    "scene",
    [
        Scene(4, 2, 80, 8, (21, 3), (1, 1), normed=True),
        Scene(4, 2, 64, 8, (600,), (1,), window=515),
        Scene(4, 2, 64, 32, (600,), (1,), window=515),
        Scene(6, 2, 128, 16, (37, 5, 60), (1, 5, 19)),
        Scene(6, 2, 128, 16, (37, 5, 60), (1, 5, 19), softcap=0.7, sunk=True),
        Scene(4, 2, 64, 8, (600,), (1,), window=515, softcap=0.7, sunk=True),
    ],
)
def test_attention_stays_within_its_arrays(sanitized: Context, scene: Scene) -> None:
    allowed = EXACT if scene.page_size == 8 else NARROW
    assert relative_error(play(sanitized, scene), play(REFERENCE, scene)) < allowed


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[thread_id] = x[thread_id + 1];", "heap-buffer-overflow"),
        ("if (thread_id < 16) barrier(); out[thread_id] = x[thread_id];", "others never reach"),
        ("if (lane_id < 16) out[lane_id] = sum_lanes(x[lane_id]);", "others never reach"),
        ("float v[4]; load<4>(x + 1, v); out[thread_id] = v[0];", "not aligned"),
        ("SLOTS(slots, 1); open_slots<1, 1>(slots); out[0] = x[0];", "(?s)does not compile.*open_slots"),  # not boxed
    ],
)
def test_what_is_wrong_in_a_kernel_is_seen(sanitized: Context, body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.body").write_text(body + "\n")
    kernel, mx = Kernel("broken", tmp_path, "broken.body", ("x",), ("out",)), sanitized.gpu.mx
    with pytest.raises(DeviceError, match=message):
        sanitized.gpu.launcher.launch(
            kernel, [mx.zeros(32)], groups=(1, 1, 1), threads=32, outputs=[((32,), mx.float32)]
        )


def test_copies_are_there_once_they_are_awaited(sanitized: Context, tmp_path: Path) -> None:
    """Only one of two bundles is awaited, and the other one is not read as if it had come."""
    (tmp_path / "copies.body").write_text("""
      SHARED uint words[2 * 32 * 4];
      const DEVICE uint8_t *bytes = reinterpret_cast<const DEVICE uint8_t *>(x);
      for (int i = 0; i < 2; ++i) {
        copy_words(bytes + 16 * (32 * i + lane_id), words + 4 * (32 * i + lane_id));
        seal_copies();
      }
      await_copies<1>();
      simd_barrier();
      for (int i = 0; i < 2; ++i)
        out[32 * i + lane_id] = bits_to_float(words[4 * (32 * i + 31 - lane_id)]);
    """)
    kernel, mx = Kernel("copies", tmp_path, "copies.body", ("x",), ("out",)), sanitized.gpu.mx
    (out,) = sanitized.gpu.launcher.launch(
        kernel, [mx.arange(256.0)], groups=(1, 1, 1), threads=32, outputs=[((64,), mx.float32)]
    )
    seen = np.asarray(out)
    assert seen[:32].tolist() == list(range(124, -1, -4))
    assert np.isnan(seen[32:]).all()
