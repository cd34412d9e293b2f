"""Feed-forward blocks: one product, or two of which one is a gate, an activation, and a product back; and experts.

In a mixture of experts a router chooses some such blocks for each token; their results are added up by shares. Files
have the matrices of experts as stacks, one for each expert, or gate and up as one. Only vectors are decoded, and
matrices that must be laid out anew are made when an expert is prepared, one at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels import moe
from mlxr.kernels.activate import ACTIVATIONS, ALWAYS_GATED, PARAMETER_COUNTS, Activation
from mlxr.kernels.layers.operators import (
    Activate,
    Add,
    CutGates,
    GatedNorm,
    GateRows,
    MatMul,
    MixerNorm,
    MixExperts,
    Norm,
    NormWeight,
    Operator,
    Register,
    Route,
    Scale,
    TakeShares,
)
from mlxr.kernels.moe import RoutingRule, make_experts, make_router
from mlxr.kernels.sources import Columns, Stack, as_float32, pick_rows
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.components.weights import Flow, LayerWeights, Tensors, check_range, list_product

GATE_AND_UP = "ffn_up"  # both joined in some files: the rows of the gate, then those of up
HALVES = (("ffn_gate", 0), ("ffn_up", 1))  # of a tensor in which files join both
_JOINED, INNER_NORM = "ffn_gate_up_shexp.weight", "ffn_sub_norm"


@frozen
class FeedForward:
    """A feed-forward block of `features` features."""

    features: int
    activation: Activation
    bias: bool = False
    down_bias: bool = False  # of the product back alone
    gated: bool = True
    suffix: str = ""  # of the tensors' names
    parameters: tuple[float, ...] = ()  # of the activation
    inner_norm: bool = False  # the result of the gate and the activation, silu, is normed
    cut: float | None = None  # deviations above the mean up to which numbers of the gate are 0 before the activation

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
            if self.cut is not None:
                yield CutGates(self.features, self.cut)
            yield Activate(self.activation, self.features, self.gated, parameters=self.parameters)
        yield from w.turn("x", down)
        yield from flow.finish(w.product(down))

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Give the tensors their own names, if a file has gate and up as one, or names them as if beside experts."""
        joined = tensors.get(prefix + _JOINED)
        if joined is not None and joined.shape[0] == 2 * self.features:
            del tensors[prefix + _JOINED]
            for name, half in HALVES:
                rows = joined.take_rows(half * self.features, (half + 1) * self.features)
                tensors[f"{prefix}{name}{self.suffix}.weight"] = rows
        down, beside = f"{prefix}ffn_down.weight", f"{prefix}ffn_down_shexp.weight"
        if not self.suffix and beside in tensors and down not in tensors:
            tensors[down] = tensors.pop(beside)


ROUTER, CHOICE_BIAS, EXPERT_SCALES = "ffn_gate_inp", "exp_probs_b.bias", "ffn_down_exps.scale"
BARE_CHOICE_BIAS = "exp_probs_b"  # in files of Hunyuan 3
SHARED_GATE, SUM_BIAS = "ffn_gate_inp_shexp", "ffn_exps.bias"
ROUTER_SCALE = "ffn_gate_inp.scale"
LATENT_DOWN, LATENT_UP = "ffn_latent_down", "ffn_latent_up"
DENSE_POST_NORM, EXPERTS_NORM, EXPERTS_POST_NORM = "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"
_FLOAT_TYPES = ("f32", "f16", "bf16")


@frozen
class Experts:
    """A mixture of `count` feed-forward blocks of `features` features; the rule chooses some for each token."""

    count: int
    features: int
    activation: Activation
    rule: RoutingRule
    gated: bool = True
    bias: bool = False  # of the experts' products
    router_bias: bool = False  # added to the router's logits
    choice_bias: bool = False  # added to scores for the choice alone
    expert_scales: bool = False  # that shares are multiplied by
    shared_features: int = 0  # of a block that all tokens go through, too
    averages: bool = False  # the results of that block and of the experts are added and halved
    shared_gate: bool = False  # a number of each token says how much of that block counts
    sum_bias: bool = False  # added once to the sum of a token's experts
    looks_back: bool = False  # the stream before the layer's first block chooses experts, as it is
    parameters: tuple[float, ...] = ()  # of the activation
    latent: int = 0  # columns that experts read and give, if products convert the stream's to them and back
    weighs_inputs: bool = False  # the share of a token's only expert multiplies its input, not its output
    router_cap: float | None = None  # of logits, by tanh

    def __post_init__(self) -> None:
        rule, count = self.rule, self.count
        for name, value, high in (
            ("experts", count, limits.MAX_EXPERTS),
            ("used experts", rule.used, min(count, limits.MAX_USED_EXPERTS)),
            ("features of an expert", self.features, limits.MAX_WIDTH),
            ("groups of experts", rule.groups, count),
            ("used groups of experts", rule.groups_used, rule.groups),
            ("used experts by their inputs", rule.used if self.weighs_inputs else 1, 1),
        ):
            if not 1 <= value <= high:
                raise ModelError(f"model has {value} {name}, expected from 1 to {high}")
        if not 0 <= self.shared_features <= limits.MAX_WIDTH:
            raise ModelError(
                f"model has {self.shared_features} features of its shared expert, expected up to {limits.MAX_WIDTH}"
            )
        size, rest = divmod(count, rule.groups)
        if rest or (rule.groups > 1 and size < 2) or rule.groups_used * size < rule.used:
            raise ModelError(
                f"model uses {rule.used} of {count} experts out of {rule.groups_used} of {rule.groups} groups, "
                "expected groups of one size, two experts or more, and enough of them"
            )
        if not 0 < rule.scale <= limits.MAX_SCALE:
            raise ModelError(
                f"model multiplies shares of experts by {rule.scale}, expected above 0 and at most {limits.MAX_SCALE:g}"
            )

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the products that read an expert's input."""
        return ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)

    @property
    def shared(self) -> FeedForward | None:
        """The block that all tokens go through."""
        if not self.shared_features:
            return None
        return FeedForward(
            self.shared_features, self.activation, gated=self.gated, suffix="_shexp", parameters=self.parameters
        )

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of one expert's products, by the names that a block without experts has."""
        columns = self.latent or hidden
        return dict.fromkeys(self.projections, (self.features, columns)) | {"ffn_down": (columns, self.features)}

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield from list_product(ROUTER, self.count, hidden, bias=self.router_bias)
        if self.choice_bias:
            yield CHOICE_BIAS, (self.count,)
        if self.expert_scales:
            yield EXPERT_SCALES, (self.count,)
        if self.latent:
            yield from list_product(LATENT_DOWN, self.latent, hidden)
            yield from list_product(LATENT_UP, hidden, self.latent)
        for name, (rows, columns) in self.shapes(hidden).items():
            yield f"{name}_exps.weight", (self.count, rows, columns)
            if self.bias:
                yield f"{name}_exps.bias", (self.count, rows)
        if self.shared is not None:
            yield from self.shared.tensors(hidden)
        if self.shared_gate:
            yield f"{SHARED_GATE}.weight", (hidden,)
        if self.sum_bias:
            yield SUM_BIAS, (hidden,)

    def operators(self, w: LayerWeights, flow: Flow, routed: moe.Experts | None = None) -> Iterator[Operator]:
        """List the operators with their weights: the chosen experts, then the block that all tokens go through.

        If their sum is normed, that block comes first, because it uses `x`, in which the sum is made. `routed` are the
        experts if those of each token were chosen before.
        """
        if flow.norm is not None:
            if self.shared is not None:
                yield from self.shared.operators(w, Flow(flow.source, "other"))
            experts = yield from self.route(w, flow.source)
            yield MixExperts(experts, self.rule.used, flow.source, "x")
            yield from [] if self.shared is None else [Add("x")]
            yield Norm(flow.norm, "x", flow.target)
            yield from flow.multiply()
            return
        experts = routed or (yield from self.route(w, flow.source))
        if self.sum_bias:
            yield MatMul(w.bias_alone(SUM_BIAS, self.count), "x", "other")
        source, made = flow.source, flow.target
        if self.latent:
            yield MatMul(w.product(LATENT_DOWN), source, "kept")
            source, made = "kept", "x"
        if self.weighs_inputs:
            yield TakeShares(source, "x")
            source = "x"
        yield MixExperts(experts, self.rule.used, source, made)
        if self.latent:
            yield MatMul(w.product(LATENT_UP), "x", flow.target)
        if self.sum_bias:
            yield Add(flow.target)
        if self.shared is not None:
            yield from self.shared.operators(w, Flow(flow.source, "other"))
            if self.shared_gate:
                yield MatMul(w.exact_product(SHARED_GATE), flow.source, "x")
                yield GateRows("other")
            yield Add(flow.target, 0.5 if self.averages else 1.0)
        yield from flow.multiply()

    def route(self, w: LayerWeights, source: Register) -> Generator[Operator, None, moe.Experts]:
        """List the operators that choose the experts of each token; returns these."""
        choice_bias = w.vector(CHOICE_BIAS) if self.choice_bias else None
        scales = w.vector(EXPERT_SCALES) if self.expert_scales else None
        yield MatMul(w.exact_product(ROUTER, bias=self.router_bias), source, "x")
        if self.router_cap is not None:
            yield Scale(1.0, "x", self.router_cap)
        experts = self._read_experts(w)
        yield Route(make_router(self.count, self.rule, choice_bias, scales), experts)
        return experts

    def _read_experts(self, w: LayerWeights) -> moe.Experts:
        """Yield expert after expert, so that at most one of them is in memory twice."""
        names = self.projections, ("ffn_down",)
        made = [[w.expert(own, expert) for own in names] for expert in range(self.count)]
        slots = None
        if w.model.expert_budget is not None:
            largest = max(up.nbytes + down.nbytes for up, down in made)
            slots = w.model.expert_budget.count_slots(w.index, largest, self.count)
        up, down = zip(*made, strict=True)
        return make_experts(w.ctx, up, down, self.activation, slots, self.parameters)

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Make one stack of each product of the experts of a layer."""
        if self.shared is not None:
            self.shared.arrange(tensors, prefix)
        if prefix + BARE_CHOICE_BIAS in tensors:
            tensors[prefix + CHOICE_BIAS] = tensors.pop(prefix + BARE_CHOICE_BIAS)
        name = f"{prefix}{SHARED_GATE}.weight"
        gate = tensors.get(name)
        if gate is not None and len(gate.shape) == 2 and gate.shape[0] == 1:  # a matrix of one row, in folders
            tensors[name] = as_float32(gate).take_matrix(0)
        self._part_gate_and_up(tensors, prefix)
        for name in (*self.projections, "ffn_down"):
            _part_flat(tensors, f"{prefix}{name}_exps.weight", self.count, turned=name == "ffn_down")
            if f"{prefix}{name}.0.weight" in tensors:
                _stack_experts(tensors, prefix, name, self.count)

    def _part_gate_and_up(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        joined = tensors.get(f"{prefix}ffn_gate_up_exps.weight")
        if joined is None or joined.shape[:2] != (self.count, 2 * self.features) or len(joined.shape) != 3:
            return
        del tensors[f"{prefix}ffn_gate_up_exps.weight"]
        for name, half in HALVES:
            first, stop = half * self.features, (half + 1) * self.features
            parts = [joined.take_matrix(expert).take_rows(first, stop) for expert in range(self.count)]
            tensors[f"{prefix}{name}_exps.weight"] = Stack(f"{prefix}{name}_exps.weight", parts)


def _part_flat(tensors: dict[str, TensorSource], name: str, count: int, *, turned: bool) -> None:
    """Make a stack of matrices that follow one another in one tensor; `turned`: their rows and columns are
    exchanged."""
    flat = tensors.get(name)
    if flat is None or len(flat.shape) != 2 or flat.shape[0] % count:
        return
    rows = flat.shape[0] // count
    parts = [flat.take_rows(expert * rows, (expert + 1) * rows) for expert in range(count)]
    tensors[name] = Stack(name, [Columns(part, range(flat.shape[1])) for part in parts] if turned else parts)


@frozen
class DenseAndExperts:
    """A feed-forward block and experts beside it, both reading the stream: each has norms before and after it, and so
    do their sum and the router's input (Gemma 4)."""

    dense: FeedForward
    experts: Experts

    def __post_init__(self) -> None:
        if self.experts.shared_features:
            raise ModelError("experts beside a feed-forward block share another one, expected none")

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield ROUTER_SCALE, (hidden,)
        for name in (DENSE_POST_NORM, EXPERTS_NORM, EXPERTS_POST_NORM):
            yield f"{name}.weight", (hidden,)
        yield from self.dense.tensors(hidden)
        yield from self.experts.tensors(hidden)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights. Nothing is left to add to the stream when it is normed again."""
        assert flow.norm is not None, "the sum of both is normed"
        yield from self.dense.operators(w, Flow(flow.source, "other", norm=w.norm(DENSE_POST_NORM)))
        scale = w.vector(ROUTER_SCALE)
        # the weight of the norm includes the divisor of the router's input
        yield Norm(NormWeight(scale * len(scale) ** -0.5, w.norms.eps), "stream", "normed")
        experts = yield from self.experts.route(w, "normed")
        yield Norm(w.norm(EXPERTS_NORM), "stream", "normed")
        yield MixExperts(experts, self.experts.rule.used, "normed", "x")
        yield Norm(w.norm(EXPERTS_POST_NORM), "x", "x")
        yield Add("x")
        yield Norm(flow.norm, "x", flow.target)
        yield from flow.multiply()

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Make one stack of each product of the experts of a layer."""
        self.experts.arrange(tensors, prefix)


def _stack_experts(tensors: dict[str, TensorSource], prefix: str, name: str, count: int) -> None:
    parts: list[TensorSource] = []
    for expert in range(count):
        part = tensors.pop(f"{prefix}{name}.{expert}.weight", None)
        if part is None:
            raise ModelError(f"tensor {prefix}{name}.{expert}.weight is missing, one of {count} experts")
        if parts and (part.shape, part.type_name) != (parts[0].shape, parts[0].type_name):
            raise ModelError(
                f"tensor {part.name} is {part.type_name} {part.shape}, expected {parts[0].type_name} "
                f"{parts[0].shape} as the experts before it"
            )
        parts.append(part)
    tensors[f"{prefix}{name}_exps.weight"] = Stack(f"{prefix}{name}_exps.weight", parts)


def part_alternating(tensors: dict[str, TensorSource]) -> None:
    """Cut gate and up apart, whose rows alternate, in the stacks of a folder of gpt-oss.

    Stacks of floats have their columns first, (experts, columns, rows); quantised ones do not.
    """
    for name in [name for name in tensors if name.endswith(("ffn_gate_up_exps.weight", "ffn_down_exps.weight"))]:
        stack = tensors[name]
        _check_stack(stack)
        is_turned, is_joined = stack.type_name in _FLOAT_TYPES, name.endswith("gate_up_exps.weight")
        prefix = name[: name.rindex(".ffn_") + 1]
        if not is_turned and not is_joined:
            continue
        del tensors[name]
        experts = [stack.take_matrix(expert) for expert in range(stack.shape[0])]
        pick, rows = (Columns, stack.shape[2]) if is_turned else (pick_rows, stack.shape[1])
        for target, first in HALVES if is_joined else (("ffn_down", 0),):
            chosen = range(first, rows, 2 if is_joined else 1)
            tensors[f"{prefix}{target}_exps.weight"] = Stack(name, [pick(expert, chosen) for expert in experts])
    for name in [name for name in tensors if name.endswith("ffn_gate_up_exps.bias")]:
        decoded = as_float32(tensors.pop(name))
        for part, first in HALVES:
            target = f"{name.removesuffix('ffn_gate_up_exps.bias')}{part}_exps.bias"
            tensors[target] = decoded.take_columns(range(first, decoded.shape[1], 2))


def turn_stacks(tensors: dict[str, TensorSource]) -> None:
    """Exchange rows and columns in the stacks of a folder that have columns first, such as those of Llama 4."""
    for name in [name for name in tensors if name.endswith(("ffn_gate_up_exps.weight", "ffn_down_exps.weight"))]:
        stack = tensors[name]
        _check_stack(stack)
        experts = [stack.take_matrix(expert) for expert in range(stack.shape[0])]
        tensors[name] = Stack(name, [Columns(expert, range(stack.shape[2])) for expert in experts])


def _check_stack(stack: TensorSource) -> None:
    if len(stack.shape) != 3:
        raise ModelError(f"tensor {stack.name} has shape {stack.shape}, expected a stack of a matrix for each expert")
