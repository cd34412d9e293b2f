"""`hadamard` follows its definition, with equal bits in NumPy, on all tiers and threads, alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
from variants import assert_equal_bits, random_floats, run_everywhere

from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import Hadamard, hadamard
from mlxr.kernels.ledger import Dispatch

REFERENCE = Context("reference")


def make(columns: int, block: int, *, signed: bool = True, ordered: bool = False) -> Hadamard:
    rng = np.random.default_rng(columns)
    signs = rng.choice(np.array([-1, 1], np.float32), columns) if signed else None
    return Hadamard(columns, block, signs, rng.permutation(columns).astype(np.int32) if ordered else None)


@pytest.mark.parametrize(
    ("columns", "block"), [(6, 1), (6, 2), (12, 4), (40, 8), (48, 16), (96, 32), (2048, 1024), (8192, 8192)]
)
def test_rows_are_multiplied_by_the_matrix(columns: int, block: int) -> None:
    x, rotation = random_floats(1, 5, columns), make(columns, block, ordered=True)
    made = run_everywhere(lambda ctx: hadamard(ctx, x, rotation))
    assert_equal_bits(hadamard(REFERENCE, x, rotation), made)
    step = max(1, block // 8)  # a few rows of the matrix
    odd = np.array([[(i & j).bit_count() % 2 for j in range(block)] for i in range(0, block, step)])
    wanted = (x[:, rotation.order] * rotation.signs).astype(np.float64).reshape(5, -1, block)
    exact = np.einsum("rbj,ij->rbi", wanted, 1.0 - 2.0 * odd) / np.sqrt(block)
    np.testing.assert_allclose(made.reshape(5, -1, block)[:, :, ::step], exact, rtol=0, atol=1e-5)
    alone = [hadamard(Context("cpu"), x[row : row + 1], rotation) for row in range(5)]
    assert_equal_bits(np.concatenate(alone), made)


def test_the_inverse_takes_it_back(cpu: Context) -> None:
    x, rotation = random_floats(2, 3, 640), make(640, 128)
    back = run_everywhere(lambda ctx: hadamard(ctx, hadamard(ctx, x, rotation), rotation.invert()))
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)
    assert np.abs(hadamard(cpu, hadamard(cpu, x, rotation), rotation) - x).max() > 1
    unsigned = make(640, 128, signed=False)
    assert_equal_bits(hadamard(cpu, x, unsigned), hadamard(cpu, x, unsigned.invert()))
    assert hadamard(cpu, x, None) is x
    assert Dispatch("scale", "cpu", "inverse hadamard", 1) in cpu.ledger.snapshot().dispatches


def test_what_does_not_fit_is_refused(cpu: Context) -> None:
    for columns, block in ((96, 24), (96, 64), (96, 0), (1 << 14, 1 << 14)):
        with pytest.raises(ValueError, match=f"hadamard: block is {block}, expected a power of two"):
            Hadamard(columns, block)
    with pytest.raises(ValueError, match="hadamard: length of signs is 3, expected 4"):
        Hadamard(4, 4, np.ones(3, np.float32))
    x, out = random_floats(1, 2, 8), np.empty((2, 8), np.float32)
    with pytest.raises(ValueError, match="hadamard: columns of x is 8, expected 16"):
        hadamard(cpu, x, Hadamard(16, 4))
    with pytest.raises(ValueError, match="hadamard: block is 3, expected"):
        cpu.module.hadamard(cpu.native, x, None, None, 3, False, out)
    with pytest.raises(ValueError, match=r"hadamard: order\[2\] is 9, expected 0 to 7"):
        cpu.module.hadamard(cpu.native, x, None, np.array([0, 1, 9, 3, 4, 5, 6, 7], np.int32), 4, False, out)
