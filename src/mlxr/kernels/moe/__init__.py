"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token is sent to a few of many feed-forward
blocks, and what these make of it is added up.

`route` chooses the experts of each token out of its router's logits; `mix` runs them. Both are functions of a token
alone: what other tokens are routed to the same expert changes no bit on the CPU.
"""

# ruff: noqa: ARG001 -- every implementation takes the context and the experts
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from mlxr.kernels.activate import ACTIVATIONS, ALWAYS_GATED, PARAMETER_COUNTS, Activation, activate
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import EXPERT_ROWS
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.lora import AdapterRows, add_lora, choose_rows, list_native
from mlxr.kernels.native import NativeRouter
from mlxr.kernels.tensor import FloatArray, IntArray

Scoring = Literal["softmax", "sigmoid", "softmax_chosen", "sparsemixer"]
SCORINGS: tuple[str, ...] = get_args(Scoring)


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are chosen of a token's logits, and what each one's share is.

    Scores are the `softmax` of all logits or the `sigmoid` of each, and shares are the scores of the chosen ones; with
    `softmax_chosen` logits choose, and shares are the softmax of the chosen logits. With `sparsemixer` (Liu et al.
    2024, arXiv:2409.12136) logits choose, and the share of each chosen one, m, is its own in the softmax of the logits
    x that were not chosen before it, without those for which (m - x) / max(|x|, m) is above twice the `jitter`.
    """

    used: int
    scoring: Scoring = "softmax"
    renormalises: bool = False  # shares are divided by their sum plus `floor`,
    floor: float = 0.0
    scale: float = 1.0  # and then multiplied by this
    groups: int = 1  # of equal size that experts stand in; those count whose two best experts have the largest sum
    groups_used: int = 1  # how many of them
    jitter: float = 0.0  # that the router was trained with (`sparsemixer`)

    @property
    def gap(self) -> float:
        """By which part of it a logit may be below the chosen one and have a share (`sparsemixer`)."""
        return 2 * self.jitter


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A rule, what is added to the scores for the choice alone, `choice_bias` (experts,), and what each expert's share
    is multiplied by in the end, `expert_scales` (experts,); both may be None."""

    experts: int
    rule: RoutingRule
    choice_bias: FloatArray | None = None
    expert_scales: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Feed-forward blocks of one shape: of each one `up`, which is gate and up in one weight or up alone, and `down`.

    With `slots` so many of them are in memory at a time, the others in their file. What `payload` is only the
    implementation knows that made it.
    """

    up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    activation: Activation
    payload: Any = None
    slots: int | None = None
    parameters: tuple[float, ...] = ()  # of the activation

    @property
    def is_gated(self) -> bool:
        """Whether what is activated is a gate."""
        return self.up[0].out_features != self.down[0].in_features

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all experts."""
        return sum(weight.nbytes for weight in (*self.up, *self.down))

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are in memory at most at a time."""
        return self.nbytes if self.slots is None else self.nbytes * self.slots // len(self.up)


@dataclass(frozen=True, slots=True)
class ExpertsUse:
    """What was sent to the experts of a layer so far: `rows` of each one, in so many `steps`.

    `groups` are the experts that had rows, counted in each step. `reads` are those that were read from the file.
    """

    rows: tuple[int, ...]
    steps: int
    groups: int
    reads: int = 0


def expect_experts(experts: int, used: int, tokens: int) -> float:
    """How many of `experts` so many tokens are sent to if each one takes `used` and all are as likely."""
    return experts * (1 - (1 - used / experts) ** tokens)


def make_router(
    experts: int, rule: RoutingRule, choice_bias: FloatArray | None = None, expert_scales: FloatArray | None = None
) -> Router:
    """A router for so many experts. Raises ValueError for a rule that they do not fit."""
    if not 1 <= rule.used <= experts:
        refuse("make_router", "used", rule.used, f"from 1 to the {experts} experts")
    if rule.scoring not in SCORINGS:
        refuse("make_router", "scoring", repr(rule.scoring), f"one of {', '.join(SCORINGS)}")
    if rule.groups < 1 or experts % rule.groups:
        refuse("make_router", "groups", rule.groups, f"a divisor of the {experts} experts")
    if rule.groups > 1 and experts // rule.groups < 2:
        refuse("make_router", "groups", rule.groups, "so many that each has two experts or more")
    if not 1 <= rule.groups_used <= rule.groups or rule.groups_used * (experts // rule.groups) < rule.used:
        refuse("make_router", "groups_used", rule.groups_used, f"enough of the {rule.groups} for {rule.used} experts")
    if rule.scoring == "sparsemixer" and (choice_bias is not None or rule.groups > 1):
        refuse("make_router", "scoring", "'sparsemixer' with groups or a choice_bias", "one that these are known for")
    for name, vector in (("choice_bias", choice_bias), ("expert_scales", expert_scales)):
        if vector is not None:
            check_floats("make_router", name, vector, 1)
            check_size("make_router", f"length of {name}", vector.shape[0], experts)
    return Router(experts, rule, choice_bias, expert_scales)


def make_experts(
    ctx: Context,
    up: Sequence[LinearWeight],
    down: Sequence[LinearWeight],
    activation: Activation,
    slots: int | None = None,
    parameters: tuple[float, ...] = (),
) -> Experts:
    """Experts out of weights that were prepared for `linear`. Raises ValueError for shapes that do not fit.

    `parameters` are the activation's numbers, for which there are kernels for processors alone (DeviceError).
    With `slots` the weights were left in their files (`linear.leave`), and so many experts are in memory at a time:
    those that were used last. The others are read when tokens are sent to them, and change no bit.
    """
    if not up:
        refuse("make_experts", "up", "empty", "a weight for each expert")
    check_size("make_experts", "number of down", len(down), len(up))
    for one, other in zip(up, down, strict=True):
        check_size("make_experts", "in_features of up", one.in_features, up[0].in_features)
        check_size("make_experts", "columns of up", one.out_features, up[0].out_features)
        check_size("make_experts", "in_features of down", other.in_features, down[0].in_features)
        check_size("make_experts", "columns of down", other.out_features, up[0].in_features)
    if up[0].out_features != down[0].in_features:
        check_size("make_experts", "columns of gate and up", up[0].out_features, 2 * down[0].in_features)
    elif activation == ALWAYS_GATED:
        refuse("make_experts", "activation", repr(activation), "a kind without a gate")
    if activation not in ACTIVATIONS:
        refuse("make_experts", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    check_size("make_experts", "number of parameters", len(parameters), PARAMETER_COUNTS.get(activation, 0))
    _, implementation = PREPARE_EXPERTS.pick(ctx.device)
    payload = implementation(ctx, tuple(up), tuple(down), activation, parameters)
    if slots is not None:
        if not 1 <= slots <= len(up):
            refuse("make_experts", "slots", slots, f"from 1 to the {len(up)} experts")
        payload.limit(ctx.native, slots)  # only native code leaves weights in their files
    return Experts(tuple(up), tuple(down), activation, payload, slots, parameters)


def read_use(ctx: Context, experts: Experts) -> ExpertsUse | None:
    """Read how many rows each expert got so far, as counted where they run; None where MLX's own operations take the
    place of kernels. May be called from any thread, on a GPU from the one that computes."""
    _, implementation = READ_USE.pick(ctx.device)
    return implementation(ctx, experts.payload)


def route(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """The numbers of the experts of each token, int32 (T, used), and their shares (T, used), both in order of rank.

    logits: (T, experts). The expert with the largest score comes first; of equal ones, the one with the lower number.
    `experts` are those that the tokens will be sent to, as a GPU counts a single one here.
    """
    check_floats("route", "logits", logits, 2)
    check_size("route", "columns of logits", logits.shape[1], router.experts)
    name, implementation = ROUTE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("moe", name, "route")
    return implementation(ctx, logits, router, experts)


def mix(
    ctx: Context,
    x: FloatArray,
    chosen: IntArray,
    shares: FloatArray,
    experts: Experts,
    adapters: Sequence[AdapterRows] = (),
) -> FloatArray:
    """The sum over the ranks of share times down(act(up(x))) of that rank's expert: (T, hidden).

    x: (T, hidden); `chosen` and `shares` (T, used) as `route` gives them. The sum begins with the product of rank 0,
    and each next one is added by a fused multiply-add. `adapters` update the products of their rows' experts, before
    the activation and after `down`; a GPU takes none that have updates for them. Raises ValueError for shapes that do
    not fit.
    """
    check_floats("mix", "x", x, 2)
    check_size("mix", "columns of x", x.shape[1], experts.up[0].in_features)
    check_floats("mix", "shares", shares, 2)
    check_size("mix", "rows of shares", shares.shape[0], x.shape[0])
    if tuple(chosen.shape) != tuple(shares.shape):
        refuse("mix", "chosen", f"of shape {chosen.shape}", f"that of shares, {shares.shape}")
    name, implementation = MIX.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("moe", name, experts.up[0].variant)
        for weights in (experts.up, experts.down):
            ctx.ledger.count(EXPERT_ROWS, name, weights[0].variant, chosen.size)
    return implementation(ctx, x, chosen, shares, experts, adapters)


@dataclass(slots=True)
class _Counts:
    """The payload of experts: rows of each, steps, and experts that had rows in these."""

    rows: list[int]
    steps: int = 0
    groups: int = 0


def _prepare_reference(
    ctx: Context,
    up: tuple[LinearWeight, ...],
    down: tuple[LinearWeight, ...],
    activation: Activation,
    parameters: tuple[float, ...],
) -> Any:
    """The counts of what is sent to them; the weights are what runs."""
    return _Counts([0] * len(up))


def _read_use_reference(ctx: Context, payload: Any) -> ExpertsUse | None:
    """What was sent to them."""
    return ExpertsUse(tuple(payload.rows), payload.steps, payload.groups)


def _route_reference(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """Choose by score, then take the shares of the chosen in the order of their ranks."""
    rule = router.rule
    scores = _score(logits, rule.scoring)
    worth = scores if router.choice_bias is None else scores + router.choice_bias
    if rule.groups_used < rule.groups:
        worth = _drop_groups(worth, rule.groups, rule.groups_used)
    chosen = np.argsort(-worth, axis=1, kind="stable")[:, : rule.used].astype(np.int32)
    shares: FloatArray = np.take_along_axis(scores, chosen, axis=1)
    if rule.scoring == "softmax_chosen":
        shares = _softmax(shares)
    elif rule.scoring == "sparsemixer":
        shares = _share_near(logits, chosen, np.float32(rule.gap))
    if rule.renormalises:
        total = np.zeros(len(shares), np.float32)
        for rank in range(rule.used):
            total = total + shares[:, rank]
        shares = shares / (total + np.float32(rule.floor))[:, None]
    if rule.scale != 1.0:
        shares = shares * np.float32(rule.scale)
    if router.expert_scales is not None:
        shares = shares * router.expert_scales[chosen]
    return chosen, np.ascontiguousarray(shares)


def _mix_reference(
    ctx: Context,
    x: FloatArray,
    chosen: IntArray,
    shares: FloatArray,
    experts: Experts,
    adapters: Sequence[AdapterRows] = (),
) -> FloatArray:
    """Expert by expert the tokens that are routed to it, then the sum in the order of ranks."""
    tokens, used = chosen.shape
    made = np.empty((tokens, used, x.shape[1]), np.float32)
    experts.payload.steps += 1
    for expert, count in zip(*np.unique(chosen, return_counts=True), strict=True):
        experts.payload.rows[expert] += int(count)
        experts.payload.groups += 1
        rows, ranks = np.nonzero(chosen == expert)
        up, down, own = experts.up[expert], experts.down[expert], choose_rows(adapters, rows.astype(np.int32))
        projected = add_lora(ctx, x[rows], linear(ctx, x[rows], up), up, own)
        inner = activate(ctx, projected, experts.activation, gated=experts.is_gated, parameters=experts.parameters)
        made[rows, ranks] = add_lora(ctx, inner, linear(ctx, inner, down), down, own)
    out = shares[:, 0, None] * made[:, 0]
    for rank in range(1, used):  # rounded once, as a fused multiply-add does; f64 holds the product exactly
        exact = shares[:, rank, None].astype(np.float64) * made[:, rank]
        out = (out + exact).astype(np.float32)
    return out


def _score(logits: FloatArray, scoring: str) -> FloatArray:
    if scoring == "softmax":
        return _softmax(logits)
    if scoring == "sigmoid":
        with np.errstate(over="ignore"):  # exp may be infinite, and the sigmoid 0
            sigmoid: FloatArray = np.float32(1) / (np.float32(1) + np.exp(-logits))
        return sigmoid
    return logits


def _softmax(x: FloatArray) -> FloatArray:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    shares: FloatArray = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _share_near(logits: FloatArray, chosen: IntArray, gap: np.float32) -> FloatArray:
    """Of each chosen logit 1 / the sum of e**(x - it) over the logits x that are left and near it, its own among them.

    What is no number is not too far, as 0 / 0 where both are 0.
    """
    left, shares = logits.copy(), np.empty(chosen.shape, np.float32)
    for rank in range(chosen.shape[1]):
        own = np.take_along_axis(logits, chosen[:, rank, None], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            is_far = (own - left) / np.maximum(np.abs(left), own) > gap
            powers = np.exp(np.where(is_far, np.float32(-np.inf), left) - own)
        shares[:, rank] = 1 / powers.sum(axis=1)
        np.put_along_axis(left, chosen[:, rank, None], -np.inf, axis=1)
    return shares


def _drop_groups(worth: FloatArray, groups: int, used: int) -> FloatArray:
    """The worth of each expert, minus infinity outside the `used` groups whose two best have the largest sum."""
    grouped = worth.reshape(len(worth), groups, -1)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-best, axis=1, kind="stable")[:, :used]
    is_kept = np.zeros(best.shape, bool)
    np.put_along_axis(is_kept, kept, True, axis=1)
    return np.where(is_kept[:, :, None], grouped, -np.inf).reshape(worth.shape).astype(np.float32)


def _prepare_native(
    ctx: Context,
    up: tuple[LinearWeight, ...],
    down: tuple[LinearWeight, ...],
    activation: Activation,
    parameters: tuple[float, ...],
) -> Any:
    """The native object that holds the weights of the experts."""
    native = ctx.module.Experts(activation, parameters)
    for one, other in zip(up, down, strict=True):
        native.append(one.payload, other.payload)
    return native


def _read_use_native(ctx: Context, payload: Any) -> ExpertsUse | None:
    """What was sent to them, as native code counts it."""
    return ExpertsUse(*payload.list_use())


def make_native_router(ctx: Context, router: Router) -> NativeRouter:
    """The native twin of a router."""
    rule = router.rule
    return ctx.module.Router(
        router.experts,
        rule.used,
        rule.scoring,
        rule.renormalises,
        rule.floor,
        rule.scale,
        rule.groups,
        rule.groups_used,
        rule.gap,
        router.choice_bias,
        router.expert_scales,
    )


def _route_native(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """Numbers and shares of each token's experts; the same bits whatever the other tokens and the instruction set."""
    shape = len(logits), router.rule.used
    chosen, shares = np.empty(shape, np.int32), np.empty(shape, np.float32)
    ctx.module.route(ctx.native, logits, make_native_router(ctx, router), chosen, shares)
    return chosen, shares


def _mix_native(
    ctx: Context,
    x: FloatArray,
    chosen: IntArray,
    shares: FloatArray,
    experts: Experts,
    adapters: Sequence[AdapterRows] = (),
) -> FloatArray:
    """The experts' sum; the bits of a token are those that `linear`, `add_lora` and `activate` give for it alone."""
    out = empty(ctx, *x.shape)
    ctx.module.mix(ctx.native, x, chosen, shares, experts.payload, list_native(adapters), out)
    return out


GPU = f"{__name__}.gpu"
PREPARE_EXPERTS = Choice("moe", _prepare_reference, _prepare_native, GPU, "prepare_experts")
READ_USE = Choice("moe", _read_use_reference, _read_use_native, GPU, "read_use")
ROUTE = Choice("moe", _route_reference, _route_native, GPU, "route")
MIX = Choice("moe", _mix_reference, _mix_native, GPU, "mix")
