"""The parts around the layers of an encoder: what is added to the embeddings of tokens, and products of the one vector
that a text becomes. Decoders that make vectors or rank pairs have the latter, too."""

from __future__ import annotations

from typing import Literal

from mlxr.core.frozen import frozen
from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import scale
from mlxr.kernels.layers.operators import NormWeight
from mlxr.kernels.layers.reference import norm
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.sources import Decoded
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers
from mlxr.models import limits
from mlxr.models.components.weights import LayerWeights, Tensors, check_range, list_product

POSITIONS, TYPES, EMBEDDING_NORM = "position_embd.weight", "token_types.weight", "token_embd_norm"
CLASSIFIER, CLASSIFIER_NORM, CLASSIFIER_OUTPUT = "cls", "cls.norm", "cls.output"
DENSE = ("dense_2", "dense_3")
DenseActivation = Literal["none", "tanh", "gelu_erf", "gelu_tanh", "silu"]


@frozen
class Embeddings:
    """Rows that are added to the embeddings of tokens before the first layer, and the norm after that."""

    positions: int = 0  # rows of the table of positions, 0 for none
    types: int = 0  # rows of the table of the types of tokens: 0 for a text, or the first of two, 1 for the second
    normed: bool = True
    has_weight: bool = True  # of the norm

    def __post_init__(self) -> None:
        check_range("positions", self.positions, 0, limits.MAX_CONTEXT)
        check_range("token types", self.types, 0, 16)

    def tensors(self, hidden: int, *, bias: bool) -> Tensors:
        """List the tensors; `bias`: the norm has one."""
        if self.positions:
            yield POSITIONS, (self.positions, hidden)
        if self.types:
            yield TYPES, (self.types, hidden)
        if self.normed and self.has_weight:
            yield f"{EMBEDDING_NORM}.weight", (hidden,)
            if bias:
                yield f"{EMBEDDING_NORM}.bias", (hidden,)

    def load(self, w: LayerWeights) -> tuple[TensorSource | None, NormWeight | None]:
        """Return the table that is added, (types * positions, hidden) of all positions for each type, and the norm.

        Without positions the table has a row for each type.
        """
        table: FloatArray | None = read_numbers(w.take(POSITIONS)) if self.positions else None
        if self.types:
            types = read_numbers(w.take(TYPES))
            table = types if table is None else (table[None] + types[:, None]).reshape(-1, types.shape[1])
        added = None if table is None else Decoded(POSITIONS, table)
        return added, w.norm(EMBEDDING_NORM, has_weight=self.has_weight) if self.normed else None


@frozen
class Dense:
    """A product of a pooled vector, and the activation and norm that follow it."""

    name: str  # of its tensors
    features: int
    inputs: int
    bias: bool = False
    activation: DenseActivation = "none"
    normed: bool = False  # by the classifier's norm, after the activation

    def __post_init__(self) -> None:
        check_range(f"features of {self.name}", self.features, 1, limits.MAX_WIDTH)

    def tensors(self) -> Tensors:
        """List the tensors of the product."""
        yield from list_product(self.name, self.features, self.inputs, bias=self.bias)
        if self.normed:
            yield f"{CLASSIFIER_NORM}.weight", (self.features,)

    def load(self, w: LayerWeights) -> LoadedDense:
        """Prepare the weights; products are in float32."""
        return LoadedDense(
            w.exact_product(self.name, bias=self.bias),
            self.activation,
            w.norm(CLASSIFIER_NORM) if self.normed else None,
        )


@frozen(eq=False)
class LoadedDense:
    """`Dense` with its weights."""

    weight: LinearWeight
    activation: DenseActivation
    norm: NormWeight | None

    def run(self, ctx: Context, x: FloatArray) -> FloatArray:
        """Return the result for x (1, inputs): (1, features)."""
        x = linear(ctx, x, self.weight)
        if self.activation == "tanh":
            x = scale(ctx, x, softcap=1.0)
        elif self.activation != "none":
            x = activate(ctx, x, self.activation, gated=False)
        return x if self.norm is None else norm(ctx, x, self.norm)[0]
