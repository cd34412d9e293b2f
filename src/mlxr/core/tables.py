"""Weight types and activations as kernels know them. Written by tools/write_tables.py: change csrc/tables."""

from typing import Literal, NamedTuple

OWN_CODES = 256  # from here on codes are our own, of types that no GGUF file has


class WeightType(NamedTuple):
    """A weight type that the CPU multiplies and a GPU takes."""

    name: str
    code: int  # in files and GPU sources: ggml's number, or our own
    block_size: int  # values that share a block
    block_bytes: int
    fields: tuple[tuple[str, int, int], ...] = ()  # of the kernels' layout: kind, offset in the block, how many


WEIGHT_TYPES = (
    WeightType("f32", 0, 1, 4, ()),
    WeightType("f16", 1, 1, 2, (("words", 1, 64), ("bytes", 0, 1))),
    WeightType("bf16", 30, 1, 2, ()),
    WeightType("q4_0", 2, 32, 18, (("words", 2, 4), ("halves", 0, 1))),
    WeightType("q4_1", 3, 32, 20, (("words", 4, 4), ("halves", 0, 2))),
    WeightType("q5_0", 6, 32, 22, (("words", 6, 4), ("fifth_bits", 2, 1), ("halves", 0, 1))),
    WeightType("q5_1", 7, 32, 24, (("words", 8, 4), ("fifth_bits", 4, 1), ("halves", 0, 2))),
    WeightType("q8_0", 8, 32, 34, (("words", 2, 8), ("halves", 0, 1))),
    WeightType("q2_k", 10, 256, 84, (("words", 16, 16), ("words", 0, 4), ("halves", 80, 2))),
    WeightType("q3_k", 11, 256, 110, (("words", 32, 16), ("words", 0, 8), ("words", 96, 3), ("halves", 108, 1))),
    WeightType("q4_k", 12, 256, 144, (("words", 16, 32), ("words", 4, 3), ("halves", 0, 2))),
    WeightType("q5_k", 13, 256, 176, (("words", 48, 32), ("words", 16, 8), ("words", 4, 3), ("halves", 0, 2))),
    WeightType("q6_k", 14, 256, 210, (("six_bits", 0, 48), ("bytes", 192, 16), ("halves", 208, 1))),
    WeightType("q8_k", 15, 256, 292, (("words", 4, 64), ("words", 0, 1))),
    WeightType("iq4_nl", 20, 32, 18, (("words", 2, 4), ("halves", 0, 1))),
    WeightType("iq4_xs", 23, 256, 136, (("words", 8, 32), ("words", 4, 1), ("halves", 0, 2))),
    WeightType("iq1_s", 19, 256, 50, (("words", 2, 8), ("high_threes", 34, 4), ("halves", 0, 1))),
    WeightType("iq1_m", 29, 256, 56, (("words", 0, 8), ("high_fours", 32, 4), ("words", 48, 2))),
    WeightType("iq2_xxs", 16, 256, 66, (("index_sevens", 2, 16), ("halves", 0, 1))),
    WeightType("iq2_xs", 17, 256, 74, (("index_nines", 2, 16), ("words", 66, 2), ("halves", 0, 1))),
    WeightType("iq2_s", 22, 256, 82, (("words", 2, 8), ("masks", 34, 8), ("high_pairs", 66, 4), ("halves", 0, 1))),
    WeightType("iq3_xxs", 18, 256, 98, (("words", 2, 16), ("sign_sevens", 66, 8), ("halves", 0, 1))),
    WeightType("iq3_s", 21, 256, 110, (("words", 2, 16), ("masks", 66, 10), ("words", 106, 1), ("halves", 0, 1))),
    WeightType("tq1_0", 34, 256, 54, (("words", 0, 12), ("words", 48, 1), ("halves", 52, 1))),
    WeightType("tq2_0", 35, 256, 66, (("words", 0, 16), ("halves", 64, 1))),
    WeightType("q1_0", 41, 128, 18, (("fifth_bits", 2, 4), ("halves", 0, 1))),
    WeightType("q2_0", 42, 64, 18, (("two_bits", 2, 4), ("halves", 0, 1))),
    WeightType("pq2_0", 142, 128, 34, (("two_bits", 2, 8), ("halves", 0, 1))),
    WeightType("ptq1_0", 143, 128, 28, (("words", 0, 6), ("halves", 24, 2))),
    WeightType("mxfp4", 39, 32, 17, (("words", 1, 4), ("bytes", 0, 1))),
    WeightType("nvfp4", 40, 64, 36, (("words", 4, 8), ("words", 0, 1))),
    WeightType("nvfp4_scaled", 296, 64, 40, (("words", 8, 8), ("words", 4, 1), ("words", 0, 1))),
    WeightType("f8_e4m3_128", 384, 128, 132, (("words", 4, 32), ("words", 0, 1))),
    WeightType("affine4_32", 432, 32, 24, (("words", 8, 4), ("words", 0, 2))),
    WeightType("affine4_64", 464, 64, 40, (("words", 8, 8), ("words", 0, 2))),
    WeightType("affine8_32", 832, 32, 40, (("words", 8, 8), ("words", 0, 2))),
    WeightType("affine8_64", 864, 64, 72, (("words", 8, 16), ("words", 0, 2))),
)

Activation = Literal[
    "silu", "gelu_tanh", "gelu_erf", "relu_squared", "clamped_swiglu", "xielu", "relu", "limited_swiglu", "clamp"
]
# How many numbers a layer states of an activation.
PARAMETER_COUNTS: dict[Activation, int] = {"xielu": 4, "limited_swiglu": 1, "clamp": 1}
