"""Random blocks of a weight type, with scales of a sensible size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxr.core.tables import WEIGHT_TYPES
from mlxr.formats.ggml_types import by_name, decode_blocks, find_halves, put_iq1_m_scales

FACTORED = ("f8_e4m3_128", "nvfp4_scaled")  # whose blocks begin with a factor in f32


def put_scales(type_name: str, blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]) -> None:
    """Write the scale of each block, of a type with f16 scales or a factor."""
    if type_name in FACTORED:
        blocks[:, :4] = scales.astype(np.float32).view(np.uint8).reshape(-1, 4)
    if type_name == "iq1_m":
        put_iq1_m_scales(blocks, scales)
    for at in find_halves(next(row for row in WEIGHT_TYPES if row.name == type_name)):
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)


def make_blocks(type_name: str, shape: tuple[int, ...], random: np.random.RandomState) -> npt.NDArray[np.uint8]:
    """Random blocks of weights (rows, columns) about as large as those of a model: uint8 (bytes,)."""
    row = by_name(type_name)
    count = int(np.prod(shape)) // row.block_size
    blocks = random.randint(0, 256, (count, row.type_size)).astype(np.uint8)
    if type_name in FACTORED:
        blocks[blocks & 127 == 127] ^= 1  # no NaN
    put_scales(type_name, blocks, np.ones(count, np.float16))
    spread = decode_blocks(row, blocks.reshape(-1)).std() * np.sqrt(shape[-1])
    put_scales(type_name, blocks, (random.uniform(0.5, 1.5, count) / spread).astype(np.float16))
    return blocks.reshape(-1)
