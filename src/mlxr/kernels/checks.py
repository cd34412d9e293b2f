"""Checks of the operators' arguments: shapes, types and strides; each costs a fraction of a microsecond.

All raise ValueError, which names the operator, the argument and both values. Implementations check the values inside
arrays, which they read anyway.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mlxr.kernels.gpu.deferred import Deferred
from mlxr.kernels.gpu.kernel import name_type
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.recording import Buffer
from mlxr.kernels.tensor import FLOAT32, INT32, POOL_DTYPES, UINT32

AnyArray = npt.NDArray[Any]
_DEVICE_FLOATS = frozenset({"float32", "float16", "bfloat16"})


def refuse(operator: str, argument: str, has: object, wants: object) -> NoReturn:
    """Raise the ValueError that all checks raise."""
    raise ValueError(f"{operator}: {argument} is {has}, expected {wants}")


def check_floats(operator: str, argument: str, array: AnyArray, dimensions: int) -> None:
    """Check that `array` is float32, C-contiguous and has `dimensions` axes; MLX arrays may have any float type."""
    if is_device_array(array):
        return _check_device(operator, argument, array, _DEVICE_FLOATS, dimensions)
    _check_kind(operator, argument, array, FLOAT32, dimensions)
    if not array.flags.c_contiguous:
        refuse(operator, argument, f"an array with strides {array.strides}", "a C-contiguous one")
    return None


def check_ints(operator: str, argument: str, array: AnyArray, dimensions: int = 1) -> None:
    """Check that `array` is int32, C-contiguous and has `dimensions` axes."""
    _check_kind(operator, argument, array, INT32, dimensions)
    if not array.flags.c_contiguous:
        refuse(operator, argument, f"an array with strides {array.strides}", "a C-contiguous one")


def check_mask(operator: str, argument: str, array: AnyArray) -> None:
    """Check that `array` is uint32, C-contiguous and has one axis."""
    _check_kind(operator, argument, array, UINT32, 1)
    if not array.flags.c_contiguous:
        refuse(operator, argument, f"an array with strides {array.strides}", "a C-contiguous one")


def check_heads(operator: str, argument: str, array: AnyArray) -> None:
    """Check that `array` is float32 (tokens, heads, head_dim) with contiguous last axes; the token stride is free."""
    if is_device_array(array):
        return _check_device(operator, argument, array, _DEVICE_FLOATS, 3)
    _check_kind(operator, argument, array, FLOAT32, 3)
    tokens, heads, head_dim = array.shape
    token_stride, head_stride, element_stride = array.strides
    packed = element_stride == 4 and (head_stride == 4 * head_dim or heads == 1)
    if not packed or (tokens > 1 and (token_stride < 4 * heads * head_dim or token_stride % 4)):
        refuse(operator, argument, f"an array of strides {array.strides}", "heads and head_dim contiguous")
    return None


def check_pools(operator: str, k_pool: AnyArray, v_pool: AnyArray) -> None:
    """Check that both pools have 4 axes, one shape, one of the pool types, and are C-contiguous.

    The axes are (pages, kv_heads, page_size, head_dim); in q8 the last also has the bytes of the scale.
    """
    if isinstance(k_pool, Pool) and isinstance(v_pool, Pool):
        if k_pool.shape != v_pool.shape or k_pool.kind != v_pool.kind:
            refuse(operator, "v_pool", f"{v_pool.kind} {v_pool.shape}", f"as k_pool: {k_pool.kind} {k_pool.shape}")
        return
    for argument, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.dtype not in POOL_DTYPES.values():
            refuse(operator, argument, pool.dtype, "float16, float32, uint16 (bf16) or int8 (q8)")
        if pool.ndim != 4 or not pool.flags.c_contiguous:
            refuse(operator, argument, f"of shape {pool.shape} with strides {pool.strides}", "4 dimensions, contiguous")
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        refuse(operator, "v_pool", f"{v_pool.dtype} {v_pool.shape}", f"as k_pool: {k_pool.dtype} {k_pool.shape}")


def check_size(operator: str, argument: str, has: int, wants: int) -> None:
    """Check that a length is `wants`."""
    if has != wants:
        refuse(operator, argument, has, wants)


def is_device_array(array: object) -> bool:
    """Return True if `array` is an MLX array, or stands for a future one."""
    return isinstance(array, (Deferred, Buffer)) or type(array).__module__ == "mlx.core"


def _check_device(operator: str, argument: str, array: Any, kinds: frozenset[str], dimensions: int) -> None:
    if name_type(array.dtype) not in kinds:
        refuse(operator, argument, array.dtype, " or ".join(sorted(kinds)))
    if array.ndim != dimensions:
        refuse(operator, argument, f"of shape {array.shape}", f"{dimensions} dimensions")


def _check_kind(operator: str, argument: str, array: AnyArray, dtype: np.dtype[Any], dimensions: int) -> None:
    if not isinstance(array, np.ndarray):
        refuse(operator, argument, f"a {type(array).__name__}", "an array")
    if array.dtype != dtype:
        refuse(operator, argument, array.dtype, dtype)
    if array.ndim != dimensions:
        refuse(operator, argument, f"of shape {array.shape}", f"{dimensions} dimensions")
