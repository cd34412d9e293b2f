"""NumPy reference of `route` and `mix`, which defines their numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context and the experts
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxr.kernels.activate import Activation, activate
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.lora import AdapterRows, add_lora, choose_rows
from mlxr.kernels.moe import Experts, ExpertsUse, Router
from mlxr.kernels.tensor import FloatArray, IntArray


@dataclass(slots=True)
class Counts:
    """The payload of experts: rows of each, steps, and experts that had rows in these."""

    rows: list[int]
    steps: int = 0
    groups: int = 0


def prepare_experts(
    ctx: Context, up: tuple[LinearWeight, ...], down: tuple[LinearWeight, ...], activation: Activation
) -> Counts:
    """The counts of what is sent to them; the weights are what runs."""
    return Counts([0] * len(up))


def read_use(ctx: Context, payload: Counts) -> ExpertsUse:
    """What was sent to them."""
    return ExpertsUse(tuple(payload.rows), payload.steps, payload.groups)


def route(
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


def mix(
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
        inner = activate(ctx, projected, experts.activation, gated=experts.is_gated)
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
