"""A feed-forward block: one product, or two of which one is a gate, an activation, and a product back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import ACTIVATIONS, ALWAYS_GATED, PARAMETER_COUNTS, Activation
from mlxr.kernels.layers.operators import Activate, GatedNorm, MatMul, MixerNorm, Operator
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.components.weights import Flow, LayerWeights, Tensors, check_range, list_product

GATE_AND_UP = "ffn_up"  # what some files keep both as: the rows of the gate, then those of up
HALVES = (("ffn_gate", 0), ("ffn_up", 1))  # of what files keep as one tensor
_JOINED, INNER_NORM = "ffn_gate_up_shexp.weight", "ffn_sub_norm"


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward block of `features` features."""

    features: int
    activation: Activation
    bias: bool = False
    down_bias: bool = False  # of the product back alone
    gated: bool = True
    suffix: str = ""  # of the tensors' names
    parameters: tuple[float, ...] = ()  # of the activation
    inner_norm: bool = False  # what the gate and the activation, silu, give is normed

    def __post_init__(self) -> None:
        check_range("ffn", self.features, 1, limits.MAX_WIDTH)
        if self.activation not in ACTIVATIONS or (self.activation == ALWAYS_GATED and not self.gated):
            known = [name for name in ACTIVATIONS if self.gated or name != ALWAYS_GATED]
            kind = "with" if self.gated else "without"
            raise ModelError(f"model has activation {self.activation!r} {kind} a gate, expected {', '.join(known)}")
        if self.inner_norm and not (self.activation == "silu" and self.gated):
            raise ModelError(f"model norms what its activation {self.activation!r} gives, expected silu with a gate")
        if len(self.parameters) != PARAMETER_COUNTS.get(self.activation, 0):
            raise ModelError(f"model has activation {self.activation!r}, whose numbers only its own family states")

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the products that read its input."""
        return ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        for name in self.projections:
            yield from list_product(name + self.suffix, self.features, hidden, bias=self.bias)
        yield from list_product(f"ffn_down{self.suffix}", hidden, self.features, bias=self.bias or self.down_bias)
        if self.inner_norm:
            yield f"{INNER_NORM}.weight", (self.features,)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        names, down = [name + self.suffix for name in self.projections], f"ffn_down{self.suffix}"
        source = yield from w.turn(flow.source, *names)
        if self.inner_norm:
            gate, up = names
            yield MatMul(w.product(up), source, "x")
            yield MatMul(w.product(gate), source, "kept")
            weight = w.vector(f"{INNER_NORM}.weight")
            yield GatedNorm(MixerNorm(weight, w.norms.eps, self.features, self.features, gate_first=True), 0)
        else:
            yield MatMul(w.product(*names), source, "x")
            yield Activate(self.activation, self.features, self.gated, parameters=self.parameters)
        yield from w.turn("x", down)
        yield from flow.finish(w.product(down))

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Name the tensors as what they are, where a file has gate and up as one, or names them as beside experts."""
        joined = tensors.get(prefix + _JOINED)
        if joined is not None and joined.shape[0] == 2 * self.features:
            del tensors[prefix + _JOINED]
            for name, half in HALVES:
                rows = joined.take_rows(half * self.features, (half + 1) * self.features)
                tensors[f"{prefix}{name}{self.suffix}.weight"] = rows
        down, beside = f"{prefix}ffn_down.weight", f"{prefix}ffn_down_shexp.weight"
        if not self.suffix and beside in tensors and down not in tensors:
            tensors[down] = tensors.pop(beside)
