"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token is sent to a few of many feed-forward
blocks, and what these make of it is added up.

`route` chooses the experts of each token out of its router's logits; `mix` runs them. Both are functions of a token
alone: what other tokens are routed to the same expert changes no bit on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlxr.kernels.activate import ACTIVATIONS, ALWAYS_GATED, PARAMETER_COUNTS, Activation
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import EXPERT_ROWS
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows
from mlxr.kernels.tensor import FloatArray, IntArray

Scoring = Literal["softmax", "sigmoid", "softmax_chosen", "sparsemixer"]
SCORINGS: tuple[str, ...] = get_args(Scoring)

CHOICE = Choice(__name__)


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
) -> Experts:
    """Experts out of weights that were prepared for `linear`. Raises ValueError for shapes that do not fit.

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
    if activation not in ACTIVATIONS or activation in PARAMETER_COUNTS:
        known = [kind for kind in ACTIVATIONS if kind not in PARAMETER_COUNTS]
        refuse("make_experts", "activation", repr(activation), f"one of {', '.join(known)}")
    _, implementation = CHOICE.pick(ctx.device)
    payload = implementation.prepare_experts(ctx, tuple(up), tuple(down), activation)
    if slots is not None:
        if not 1 <= slots <= len(up):
            refuse("make_experts", "slots", slots, f"from 1 to the {len(up)} experts")
        implementation.limit_experts(ctx, payload, slots)
    return Experts(tuple(up), tuple(down), activation, payload, slots)


def read_use(ctx: Context, experts: Experts) -> ExpertsUse | None:
    """Read how many rows each expert got so far, as counted where they run; None where MLX's own operations take the
    place of kernels. May be called from any thread, on a GPU from the one that computes."""
    _, implementation = CHOICE.pick(ctx.device)
    use: ExpertsUse | None = implementation.read_use(ctx, experts.payload)
    return use


def route(
    ctx: Context, logits: FloatArray, router: Router, experts: Experts | None = None
) -> tuple[IntArray, FloatArray]:
    """The numbers of the experts of each token, int32 (T, used), and their shares (T, used), both in order of rank.

    logits: (T, experts). The expert with the largest score comes first; of equal ones, the one with the lower number.
    `experts` are those that the tokens will be sent to, as a GPU counts a single one here.
    """
    check_floats("route", "logits", logits, 2)
    check_size("route", "columns of logits", logits.shape[1], router.experts)
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("moe", name, "route")
    result: tuple[IntArray, FloatArray] = implementation.route(ctx, logits, router, experts)
    return result


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
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("moe", name, experts.up[0].variant)
        for weights in (experts.up, experts.down):
            ctx.ledger.count(EXPERT_ROWS, name, weights[0].variant, chosen.size)
    result: FloatArray = implementation.mix(ctx, x, chosen, shares, experts, adapters)
    return result
