"""Weight types and activations as kernels know them. Written by tools/write_tables.py: change csrc/tables."""

from typing import Literal, NamedTuple


class WeightType(NamedTuple):
    """A weight type that the CPU multiplies and a GPU takes."""

    name: str
    code: int  # in GPU sources: ggml's number, or our own
    block_size: int  # values that share a block
    block_bytes: int


WEIGHT_TYPES = (
    WeightType("f32", 0, 1, 4),
    WeightType("f16", 1, 1, 2),
    WeightType("bf16", 30, 1, 2),
    WeightType("q4_0", 2, 32, 18),
    WeightType("q4_1", 3, 32, 20),
    WeightType("q5_0", 6, 32, 22),
    WeightType("q5_1", 7, 32, 24),
    WeightType("q8_0", 8, 32, 34),
    WeightType("q2_k", 10, 256, 84),
    WeightType("q3_k", 11, 256, 110),
    WeightType("q4_k", 12, 256, 144),
    WeightType("q5_k", 13, 256, 176),
    WeightType("q6_k", 14, 256, 210),
    WeightType("q8_k", 15, 256, 292),
    WeightType("iq4_nl", 20, 32, 18),
    WeightType("iq4_xs", 23, 256, 136),
    WeightType("mxfp4", 39, 32, 17),
    WeightType("affine4_32", 432, 32, 24),
    WeightType("affine4_64", 464, 64, 40),
    WeightType("affine8_32", 832, 32, 40),
    WeightType("affine8_64", 864, 64, 72),
)

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu_squared", "clamped_swiglu", "xielu"]
# How many numbers a layer states of an activation.
PARAMETER_COUNTS: dict[Activation, int] = {"xielu": 4}
