"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token is sent to a few of many feed-forward
blocks, and their results are added up.

`route` chooses the experts of each token by its router's logits; `mix` runs them. On the CPU, other tokens that go to
the same expert change no bit.
"""

# ruff: noqa: ARG001 -- every implementation takes the context and the experts
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from mlxr.core.frozen import frozen
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


@frozen
class RoutingRule:
    """The rule by which a token's logits choose experts and their shares.

    Scores are the `softmax` of all logits or the `sigmoid` of each; experts with the largest scores are chosen, and
    shares are their scores. With `softmax_chosen`, the largest logits are chosen, and shares are their softmax. With
    `sparsemixer` (Liu et al. 2024, arXiv:2409.12136), the largest logits are chosen, and the share of a chosen logit m
    is its part in the softmax of the logits x that were not chosen before it, without those for which
    (m - x) / max(|x|, m) is above twice the `jitter`.
    """

    used: int
    scoring: Scoring = "softmax"
    renormalises: bool = False  # shares are divided by their sum plus `floor`,
    floor: float = 0.0
    scale: float = 1.0  # and then multiplied by this
    groups: int = 1  # equal groups of experts, of which only those with the largest sum of their two best scores count
    groups_used: int = 1  # number of groups that count
    jitter: float = 0.0  # the jitter of the router's training (`sparsemixer`)

    @property
    def gap(self) -> float:
        """The relative distance below the chosen logit within which logits count (`sparsemixer`)."""
        return 2 * self.jitter


@frozen(eq=False)
class Router:
    """A rule; `choice_bias` (experts,), added to the scores only for the choice; and `expert_scales` (experts,),
    factors of the final shares. Both may be None."""

    experts: int
    rule: RoutingRule
    choice_bias: FloatArray | None = None
    expert_scales: FloatArray | None = None


@frozen(eq=False)
class Experts:
    """Feed-forward blocks of one shape: each has `up`, which is gate and up in one weight or only up, and `down`.

    With `slots`, at most that many experts are in memory at a time, the others in their file. Only the implementation
    that made `payload` knows what it is.
    """

    up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    activation: Activation
    payload: Any = None
    slots: int | None = None
    parameters: tuple[float, ...] = ()  # the activation's numbers

    @property
    def is_gated(self) -> bool:
        """True if the activation is applied to a gate."""
        return self.up[0].out_features != self.down[0].in_features

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all experts."""
        return sum(weight.nbytes for weight in (*self.up, *self.down))

    @property
    def held_bytes(self) -> int:
        """The most bytes of weights that are in memory at a time."""
        return self.nbytes if self.slots is None else self.nbytes * self.slots // len(self.up)


@frozen
class ExpertsUse:
    """The use of a layer's experts so far: the `rows` sent to each, in `steps` steps.

    `groups` is the number of experts with rows, added up over steps. `reads` is the number of experts read from the
    file.
    """

    rows: tuple[int, ...]
    steps: int
    groups: int
    reads: int = 0


def expect_experts(experts: int, used: int, tokens: int) -> float:
    """Return the expected number of `experts` that `tokens` tokens reach, if each takes `used` equally likely ones."""
    return experts * (1 - (1 - used / experts) ** tokens)


def make_router(
    experts: int, rule: RoutingRule, choice_bias: FloatArray | None = None, expert_scales: FloatArray | None = None
) -> Router:
    """Return a router for `experts` experts. Raises ValueError for a rule that does not fit."""
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
    """Return experts from weights that were prepared for `linear`. Raises ValueError for shapes that do not fit.

    `parameters` are the activation's numbers; a GPU has no kernels for these (DeviceError). With `slots`, the weights
    were left in their files (`linear.leave`), and the `slots` experts that were used last are in memory. The others are
    read when tokens are sent to them, which changes no bit.
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
    """Return the use of each expert so far, as counted where they run; None if MLX's own operations run instead of
    kernels. Any thread may call it; on a GPU only the one that computes."""
    _, implementation = READ_USE.pick(ctx.device)
    return implementation(ctx, experts.payload)


def route(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """Return the numbers of each token's experts, int32 (T, used), and their shares (T, used), both in order of rank.

    logits: (T, experts). The expert with the largest score comes first; of equal ones, the one with the lower number.
    `experts` are those to which the tokens will be sent: for a single token, a GPU counts their use here.
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
    """Return the sum over ranks of share * down(act(up(x))) of that rank's expert: (T, hidden).

    x: (T, hidden); `chosen` and `shares` (T, used) are from `route`. The sum begins with the product of rank 0, and
    each next one is added by a fused multiply-add. `adapters` update the products of their rows' experts, before the
    activation and after `down`; a GPU takes no adapters that update experts. Raises ValueError for shapes that do not
    fit.
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
    """The reference's payload of experts: rows of each, steps, and experts with rows, added up over steps."""

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
    """Return counts of use; the weights themselves run."""
    return _Counts([0] * len(up))


def _read_use_reference(ctx: Context, payload: Any) -> ExpertsUse | None:
    """Return the experts' use."""
    return ExpertsUse(tuple(payload.rows), payload.steps, payload.groups)


def _route_reference(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """Choose experts by score, then compute their shares in the order of ranks."""
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
    """Run expert by expert the tokens that are routed to it, then sum in the order of ranks."""
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
    """Return for each chosen logit m 1 / sum(e**(x - m)) over the remaining logits x near m, m among them.

    If the distance is NaN, as 0 / 0 if both are 0, x counts as near.
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
    """Return the worth of each expert, minus infinity outside the `used` groups whose two best have the largest sum."""
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
    """Return the native object that holds the experts' weights."""
    native = ctx.module.Experts(activation, parameters)
    for one, other in zip(up, down, strict=True):
        native.append(one.payload, other.payload)
    return native


def _read_use_native(ctx: Context, payload: Any) -> ExpertsUse | None:
    """Return the experts' use, as native code counts it."""
    return ExpertsUse(*payload.list_use())


def make_native_router(ctx: Context, router: Router) -> NativeRouter:
    """Return the native form of a router."""
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
    """Return numbers and shares of each token's experts; bits do not depend on other tokens and instruction set."""
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
    """Return the experts' sum; a token's bits are those of `linear`, `add_lora` and `activate` for that token alone."""
    out = empty(ctx, *x.shape)
    ctx.module.mix(ctx.native, x, chosen, shares, experts.payload, list_native(adapters), out)
    return out


GPU = f"{__name__}.gpu"
PREPARE_EXPERTS = Choice("moe", _prepare_reference, _prepare_native, GPU, "prepare_experts")
READ_USE = Choice("moe", _read_use_reference, _read_use_native, GPU, "read_use")
ROUTE = Choice("moe", _route_reference, _route_native, GPU, "route")
MIX = Choice("moe", _mix_reference, _mix_native, GPU, "mix")
