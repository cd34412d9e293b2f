"""Routing and mixing on the reference device against formulas that are written out number by number."""

from __future__ import annotations

import numpy as np
import pytest

from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.moe import RoutingRule, make_experts, make_router, mix, route
from mlxr.kernels.sources import Decoded

RULES = [
    RoutingRule(3),
    RoutingRule(3, renormalises=True),
    RoutingRule(2, "softmax_chosen"),
    RoutingRule(4, "sigmoid", renormalises=True, floor=1e-20, scale=1.8),
    RoutingRule(4, "sigmoid", renormalises=True, groups=4, groups_used=2),
    RoutingRule(12, "softmax"),
    RoutingRule(2, "sparsemixer", jitter=0.01),
    RoutingRule(2, "sparsemixer", jitter=0.3),
    RoutingRule(12, "sparsemixer", renormalises=True, scale=1.8, jitter=0.2),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routes_follow_the_rule(rule: RoutingRule, has_bias: bool) -> None:
    rng = np.random.RandomState(rule.used)
    logits = rng.standard_normal((20, 12)).astype(np.float32)
    logits[0] = 1.0  # all alike: the lower number comes first
    logits[1] = 0.0
    has_bias = has_bias and rule.scoring != "sparsemixer"
    bias = rng.standard_normal(12).astype(np.float32) if has_bias else None
    scales = rng.uniform(0.5, 2, 12).astype(np.float32) if has_bias else None
    chosen, shares = route(Context("reference"), logits, make_router(12, rule, bias, scales))
    for row in range(len(logits)):
        expected = choose_one_by_one(logits[row].astype(np.float64), rule, bias, scales)
        assert [expert for expert, _ in expected] == chosen[row].tolist()
        np.testing.assert_allclose(shares[row], [share for _, share in expected], rtol=2e-5)


def choose_one_by_one(
    logits: np.ndarray, rule: RoutingRule, bias: np.ndarray | None, scales: np.ndarray | None
) -> list[tuple[int, float]]:
    scores = {"softmax": np.exp(logits) / np.exp(logits).sum(), "sigmoid": 1 / (1 + np.exp(-logits))}
    own = scores.get(rule.scoring, logits)
    worth = own if bias is None else own.astype(np.float32) + bias
    size = len(logits) // rule.groups
    groups = sorted(range(rule.groups), key=lambda g: -sum(sorted(worth[g * size : (g + 1) * size])[-2:]))
    kept = groups[: rule.groups_used] if rule.groups > 1 else [0]
    experts = [expert for expert in range(len(logits)) if expert // size in kept]
    chosen = sorted(experts, key=lambda expert: (-worth[expert], expert))[: rule.used]
    shares = [float(own[expert]) for expert in chosen]
    if rule.scoring == "softmax_chosen":
        shares = [np.exp(share) / np.exp(shares).sum() for share in shares]
    if rule.scoring == "sparsemixer":
        shares = [share_near(logits, chosen[:rank], expert, rule.jitter) for rank, expert in enumerate(chosen)]
    if rule.renormalises:
        shares = [share / (sum(shares) + rule.floor) for share in shares]
    return [
        (expert, share * rule.scale * (1.0 if scales is None else scales[expert]))
        for expert, share in zip(chosen, shares, strict=True)
    ]


def share_near(logits: np.ndarray, taken: list[int], own: int, jitter: float) -> float:
    """Return the share as `sparsemixer` of transformers (modeling_phimoe.py) computes it outside training."""
    largest, near = logits[own], []
    for expert in set(range(len(logits))) - set(taken):
        below, size = largest - logits[expert], max(abs(logits[expert]), largest)
        if below == 0 or below / size <= 2 * jitter:
            near.append(np.exp(-below))
    return 1 / float(sum(near))


def test_a_mixture_is_the_sum_of_its_experts() -> None:
    ctx, rng = Context("reference"), np.random.RandomState(5)
    matrices = [[rng.standard_normal(shape).astype(np.float32) for shape in ((48, 16), (16, 24))] for _ in range(5)]
    up, down = ([prepare(ctx, [Decoded("w", own[side])]) for own in matrices] for side in (0, 1))
    experts = make_experts(ctx, up, down, "silu")
    x = rng.standard_normal((9, 16)).astype(np.float32)
    chosen = rng.randint(0, 5, (9, 2)).astype(np.int32)
    shares = rng.uniform(0, 1, (9, 2)).astype(np.float32)
    made = mix(ctx, x, chosen, shares, experts)
    for token in range(9):
        expected = sum(
            shares[token, rank]
            * linear(ctx, activate(ctx, linear(ctx, x[token, None], up[expert]), "silu"), down[expert])[0]
            for rank, expert in enumerate(chosen[token])
        )
        np.testing.assert_allclose(made[token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (RoutingRule(13), "used is 13"),
        (RoutingRule(0), "used is 0"),
        (RoutingRule(2, groups=5), "groups is 5"),
        (RoutingRule(2, groups=12), "groups is 12"),
        (RoutingRule(5, groups=3, groups_used=1), "groups_used is 1"),
        (RoutingRule(2, "sparsemixer", groups=3, groups_used=2), "scoring is 'sparsemixer' with groups"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule: RoutingRule, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_router(12, rule)
