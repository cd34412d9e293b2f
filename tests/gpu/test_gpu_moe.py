"""Mixtures of experts on the GPU: the choice of experts, and their products, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import QUANTISED, REFERENCE, Scene, make_tensor, note_launches, random_floats, relative_error
from moe_cases import compare, make

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.layers import StepInput
from mlxr.kernels.layers.gpu import Sizes, count_operator_bytes
from mlxr.kernels.layers.operators import Activate, Add, GateRows, MatMul, MixExperts, Operator, Route
from mlxr.kernels.layers.reference import Registers, run_layer
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.moe import RoutingRule, make_experts, make_router, mix, read_use, route
from mlxr.kernels.moe import products as expert_products
from mlxr.kernels.moe.products import PANELS, SORT, PanelPlan, choose_width, count_tiles, sort_pairs
from mlxr.kernels.norms import rms_norm

EXACT, HALVED, NARROW = 2e-6, 6e-4, 8e-3
SOFTMAX = RoutingRule(3, renormalises=True)
RULES = {
    "softmax": SOFTMAX,
    "plain": RoutingRule(2, scale=2.5),
    "sigmoid": RoutingRule(4, "sigmoid", renormalises=True, floor=1e-20, scale=2.5),
    "chosen": RoutingRule(4, "softmax_chosen"),
    "groups": RoutingRule(3, "sigmoid", groups=4, groups_used=2),
    "sparsemixer": RoutingRule(2, "sparsemixer", jitter=0.15),
    "sparsemixer, more": RoutingRule(4, "sparsemixer", scale=2.5, jitter=0.43),
}


def make_vectors(rule: RoutingRule, experts: int) -> tuple[Any, Any]:
    """A bias for the choice, where the rule takes one, and a factor for each share."""
    return None if rule.scoring == "sparsemixer" else random_floats(2, experts), random_floats(3, experts)


@pytest.mark.smoke
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("experts", [8, 40, 256, 300])
def test_experts_are_chosen_as_by_the_reference(gpu: Context, rule: RoutingRule, experts: int, biased: bool) -> None:
    logits = np.round(random_floats(1, 9, experts) * 2, 1)  # with ties
    logits[3] = 1.0
    router = make_router(experts, rule, *(make_vectors(rule, experts) if biased else ()))
    chosen, shares = route(gpu, gpu.gpu.mx.array(logits), router)
    expected, wanted = route(REFERENCE, logits, router)
    assert np.array_equal(np.array(chosen), expected)
    assert relative_error(shares, wanted) < 1e-6


@pytest.mark.parametrize("rule", ["softmax", "groups", "sparsemixer"])
def test_choosing_stays_within_its_arrays(sanitized: Context, rule: str) -> None:
    logits, router = random_floats(1, 3, 40), make_router(40, RULES[rule], *make_vectors(RULES[rule], 40))
    chosen, _ = route(sanitized, sanitized.gpu.mx.array(logits), router)
    assert np.array_equal(np.array(chosen), route(REFERENCE, logits, router)[0])


def test_choosing_survives_what_is_not_a_number(gpu: Context) -> None:
    logits = np.full((2, 8), np.nan, np.float32)
    chosen, _ = route(gpu, gpu.gpu.mx.array(logits), make_router(8, SOFTMAX))
    assert np.array_equal(np.sort(np.array(chosen), axis=1), [[0, 1, 2]] * 2)


@pytest.mark.parametrize("sections", ["few", "many"])
@pytest.mark.parametrize(
    ("tokens", "used", "experts"),
    [(2, 2, 4), (9, 3, 8), (40, 4, 5), (3, 1, 1), (6, 8, 300), (600, 8, 128), (32, 8, 256), (40, 3, 1100)],
)
def test_tiles_hold_every_pair_once(
    gpu: Context, tokens: int, used: int, experts: int, sections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_products, "FEW_PAIRS", 1 << 20 if sections == "few" else 0)
    check_tiles(gpu, tokens, used, experts)


@pytest.mark.parametrize(("tokens", "used", "experts"), [(5, 3, 40), (33, 8, 128)])
def test_sorting_stays_within_its_arrays(sanitized: Context, tokens: int, used: int, experts: int) -> None:
    check_tiles(sanitized, tokens, used, experts)


def check_tiles(ctx: Context, tokens: int, used: int, experts: int) -> None:
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(max(experts, used))[:used] % experts for _ in range(tokens)]).astype(np.int32)
    tiling = sort_pairs(ctx.gpu, ctx.gpu.mx.array(chosen), experts, has_tiles=True)
    tiles, order = np.array(tiling.tiles), np.array(tiling.order)
    filled = tiles[:, 2] > 0
    assert (np.diff(tiles[filled, 0]) >= 0).all()
    assert not tiles[np.argmin(filled) if not filled.all() else len(tiles) :].any()
    seen = []
    for expert, first, count, zero in tiles:
        pairs = order[first : first + count]
        assert count <= tiling.width
        assert zero == 0
        assert (chosen.reshape(-1)[pairs] == expert).all()
        assert (np.diff(pairs) > 0).all()
        seen += [*pairs]
    assert sorted(seen) == [*range(tokens * used)]


def test_the_number_of_tiles_is_enough_for_every_choice() -> None:
    rng = np.random.default_rng(0)
    for tokens, used, experts in [(1, 4, 8), (5, 4, 8), (33, 8, 128), (500, 8, 128)]:
        width = choose_width(tokens, used, experts, has_tiles=True)
        most = count_tiles(tokens, used, experts, width)
        for favourites in (used, experts):
            chosen = np.concatenate([rng.permutation(favourites)[:used] for _ in range(tokens)])
            counts = np.bincount(chosen, minlength=experts)
            assert (-(-counts // width)).sum() <= most


def allow(ctx: Context) -> float:
    return 2 * (NARROW if ctx.gpu.has_tiles else HALVED if ctx.gpu.has_squares else EXACT)


@pytest.fixture(params=[False, True], ids=["rows", "tiles"])
def either(gpu: Context, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context with matrix units, and one without."""
    monkeypatch.setattr(gpu.gpu, "has_tiles", request.param)
    return gpu


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", [*QUANTISED, "f16", "bf16", "f32"])
def test_mixtures_of_every_type(either: Context, type_name: str) -> None:
    assert compare(either, 5, 2, 4, type_name, (256, 256)) < allow(either)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", ["q4_k", "q6_k", "bf16"])
def test_one_token(either: Context, type_name: str) -> None:
    assert compare(either, 1, 2, 4, type_name, (256, 768)) < allow(either)


@pytest.mark.parametrize(
    ("tokens", "type_name", "shape"),
    [
        (3, "q4_k", (256, 512)),
        (9, "mxfp4", (352, 96)),
        (9, "bf16", (96, 352)),
        (20, "mxfp4", (160, 320)),
        (40, "q8_0", (96, 160)),
        (90, "q6_k", (256, 256)),
    ],
)
def test_simd_groups_take_turns(
    gpu: Context, tokens: int, type_name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SIMD-groups of one multiprocessor take several tiles each, of every width."""
    monkeypatch.setattr(gpu.gpu, "has_tiles", True)
    monkeypatch.setattr(gpu.gpu, "processors", 1)
    monkeypatch.setattr(gpu.gpu, "machine", None)
    launched = note_launches(gpu, monkeypatch)
    assert compare(gpu, tokens, 2, 4, type_name, shape, biased=True) < 2 * NARROW
    assert launched[:3] == [SORT.name, "moe_items", "moe_items"]


def test_words_may_be_asked_for_early(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.gpu, "has_tiles", True)
    plain = compare(gpu, 1, 2, 4, "mxfp4", (1056, 64))
    monkeypatch.setattr(expert_products, "ONE_AHEAD", True)
    assert compare(gpu, 1, 2, 4, "mxfp4", (1056, 64)) == plain < NARROW


@pytest.mark.parametrize("tokens", [2, 20, 70])
def test_any_number_of_tokens(either: Context, tokens: int) -> None:
    assert compare(either, tokens, 3, 5, "q8_0", (64, 32)) < allow(either)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "named",
    [
        {"biased": True},
        {"gated": False},
        {"gated": False, "biased": True},
        {"down_type": "q8_0"},
        {"up_type": "q8_0", "biased": True},
        {"activation": "clamped_swiglu", "biased": True},
    ],
    ids=str,
)
def test_biases_gates_and_types(either: Context, named: dict[str, object], tokens: int) -> None:
    assert compare(either, tokens, 2, 3, "mxfp4", (96, 160), **named) < allow(either)


def test_columns_that_no_kernel_takes(gpu: Context) -> None:
    assert compare(gpu, 3, 2, 4, "f32", (20, 12)) < 2 * EXACT


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_mlx_composes_mixtures(tokens: int, biased: bool) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    assert compare(Context("mlx-cpu"), tokens, 2, 4, "q8_0", (64, 32), biased=biased) < 1e-5


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_mlx_composes_routes(rule: RoutingRule) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    ctx, logits = Context("mlx-cpu"), np.round(random_floats(1, 5, 16) * 2, 1)
    router = make_router(16, rule, *make_vectors(rule, 16))
    chosen, shares = route(ctx, ctx.gpu.mx.array(logits), router)
    expected, wanted = route(REFERENCE, logits, router)
    assert np.array_equal(np.array(chosen), expected)
    assert relative_error(shares, wanted) < 1e-6


def test_the_norm_adds_up_what_experts_made(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x = make(gpu, "q4_0", 4, (64, 64)), random_floats(1, 3, 64)
    array, gain = gpu.gpu.mx.array, np.ones(64, np.float32)
    chosen, shares = route(REFERENCE, random_floats(2, 3, 4), make_router(4, RoutingRule(2)))
    launched = note_launches(gpu, monkeypatch)
    made = mix(gpu, array(x), array(chosen), array(shares), experts)
    _, summed = rms_norm(gpu, array(x), gain, 1e-5, made)
    kernel = "moe_items" if gpu.gpu.has_tiles else "moe_rows"
    assert launched == [SORT.name, kernel, kernel, "rms_norm"]
    expected = x + mix(REFERENCE, x, chosen, shares, make(REFERENCE, "q4_0", 4, (64, 64)))
    assert relative_error(summed, expected) < allow(gpu)


def test_a_shared_expert_joins_the_others(gpu: Context) -> None:
    """As in a layer: the chosen experts, then the shared one of all tokens times its gate."""
    results, x = [], random_floats(1, 5, 64)
    for ctx in (gpu, REFERENCE):
        experts = make(ctx, "q8_0", 4, (64, 32))
        gate_up = prepare(ctx, [make_tensor("q8_0", 96, 64, 5), make_tensor("q8_0", 96, 64, 6)])
        layer: tuple[Operator, ...] = (
            MatMul(prepare(ctx, [make_tensor("f32", 4, 64, 8)]), "normed", "x"),
            Route(make_router(4, RoutingRule(2)), experts),
            MixExperts(experts, 2, "normed", "delta"),
            MatMul(gate_up, "normed", "x"),
            Activate("silu", 96, is_gated=True),
            MatMul(prepare(ctx, [make_tensor("q8_0", 64, 96, 7)]), "x", "other"),
            MatMul(prepare(ctx, [make_tensor("f32", 1, 64, 9)]), "normed", "x"),
            GateRows("other"),
            Add(),
        )
        array: Any = x if ctx.gpu is None else ctx.gpu.mx.array(x)
        registers: Registers = {"stream": array, "normed": array, "delta": None}
        run_layer(ctx, registers, layer, StepInput(Scene(1, 1, 32, 4, (5,), (5,)).batches()[0], [], [None], [None]), 0)
        results.append(settle(registers["delta"]))
    assert relative_error(*results) < allow(gpu)


def test_where_tokens_go_is_counted_on_the_device(either: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is counted when it is routed, several when they are sorted; those that fill a batch up are left out."""
    experts, router = make(either, "q8_0", 5, (64, 32)), make_router(5, RoutingRule(2))
    array, counts, groups = either.gpu.mx.array, np.zeros(5, int), 0
    for seed, (tokens, live) in enumerate([(1, None), (1, 0), (9, None), (70, 41), (4, 0), (1, None)]):
        monkeypatch.setattr(either.gpu, "live_rows", None if live is None else array([live]))
        x, logits = array(random_floats(seed, tokens, 64)), array(random_floats(seed, tokens, 5))
        chosen, shares = route(either, logits, router, experts)
        either.gpu.mx.eval(settle(mix(either, x, chosen, shares, experts)))
        counted = np.array(chosen)[:live]
        counts += np.bincount(counted.reshape(-1), minlength=5)
        groups += len(np.unique(counted))
    use = read_use(either, experts)
    assert use is not None
    assert (use.rows, use.steps, use.groups, use.reads) == (tuple(counts), 4, groups, 0)


def test_rows_of_experts_are_counted_by_kernel(either: Context) -> None:
    either.ledger.reset()
    compare(either, 5, 2, 4, "q8_0", (64, 32), down_type="q4_0")
    kernel = "items" if either.gpu.has_tiles else "rows"
    rows = [(row.implementation, row.kernel, row.rows) for row in either.ledger.snapshot().expert_rows]
    assert rows == [("gpu", f"{kernel} q4_0", 10), ("gpu", f"{kernel} q8_0+gate", 10)]


def test_experts_stay_weights_of_their_own(gpu: Context) -> None:
    experts, x = make(gpu, "q6_k", 3, (256, 256)), random_floats(1, 2, 256)
    own = make(REFERENCE, "q6_k", 3, (256, 256))
    for weight, expected in zip(experts.down, own.down, strict=True):
        assert relative_error(settle(linear(gpu, gpu.gpu.mx.array(x), weight)), linear(REFERENCE, x, expected)) < (
            NARROW if gpu.gpu.has_tiles else EXACT
        )


def test_experts_of_different_types_are_refused(gpu: Context) -> None:
    down = [prepare(gpu, [make_tensor(kind, 32, 32)]) for kind in ("q8_0", "q4_0")]
    up = [prepare(gpu, [make_tensor("q8_0", 32, 32)]) for _ in range(2)]
    with pytest.raises(DeviceError, match=r"different types.*q4_0, q8_0"):
        make_experts(gpu, up, down, "silu")


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_routers_of_32_bits_need_no_library(gpu: Context, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launches(gpu, monkeypatch)
    x, tensor, bias = random_floats(1, tokens, 96), make_tensor("f32", 24, 96), [random_floats(2, 24)]
    made = settle(linear(gpu, gpu.gpu.mx.array(x), prepare(gpu, [tensor], bias)))
    assert launched == ["linear_wide"]
    assert relative_error(made, linear(REFERENCE, x, prepare(REFERENCE, [tensor], bias))) < EXACT


def test_the_memory_of_a_mixture_is_counted(gpu: Context) -> None:
    experts, sizes = make(gpu, "q8_0", 4, (64, 32)), Sizes(4, 4, 4)
    counted = count_operator_bytes(MixExperts(experts, 2, "normed", "delta"), sizes, 64)
    inner, made, out = 2 * 32 * 4, 2 * 64 * 4, 64 * 4
    assert counted >= inner + made + out
    assert counted < 1.1 * (inner + made + out)


def run_panels(
    gpu: Context, monkeypatch: pytest.MonkeyPatch, type_name: str, plan: PanelPlan, tokens: int, **named: object
) -> float:
    """Relative error of a mixture of three experts by panels, with rows of x that are exact in 16 bits."""
    if gpu.gpu.machine is None or not gpu.gpu.machine.has_boxes:
        pytest.skip("matrix units do not read the threadgroups' memory here")
    mx, shape = gpu.gpu.mx, named.pop("shape", (256, 256))
    kind = mx.float16 if type_name == "f16" else mx.bfloat16
    for name, value in (("has_tiles", True), ("operands", kind), ("activations", kind)):
        monkeypatch.setattr(gpu.gpu, name, value)
    monkeypatch.setattr(gpu.gpu, "processors", gpu.gpu.processors or 2)
    if plan is expert_products.SPARSE:
        monkeypatch.setattr(expert_products, "MIN_SPARSE", 0)
    else:
        monkeypatch.setattr(expert_products, "FEW", plan)
        monkeypatch.setattr(expert_products, "MANY", plan)
        monkeypatch.setattr(expert_products, "MIN_EACH", 0)
    expected, experts = (make(ctx, type_name, 3, shape, **named) for ctx in (REFERENCE, gpu))  # type: ignore[arg-type]
    x, logits = mx.array(random_floats(1, tokens, expected.up[0].in_features)).astype(kind), random_floats(2, tokens, 3)
    logits[:, 0] += 1
    chosen, shares = route(REFERENCE, logits, make_router(3, RoutingRule(2)))
    wanted = mix(REFERENCE, np.array(x.astype(mx.float32)), chosen, shares, expected)
    launched = note_launches(gpu, monkeypatch)
    made = settle(mix(gpu, x, mx.array(chosen), mx.array(shares), experts))
    assert launched.count(PANELS.name) == 2
    return relative_error(made, wanted)


@pytest.mark.parametrize("type_name", sorted({*QUANTISED} - {"q4_k", "mxfp4"}))
def test_panels_of_every_type(gpu: Context, type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_panels(gpu, monkeypatch, type_name, PanelPlan(1, 32, 3, 1), 20, shape=(256, 256)) < NARROW


PANEL_PLANS = [PanelPlan(1, 64, 3, 1), PanelPlan(4, 128, 4, 2), PanelPlan(3, 192, 4, 2, depth=1)]


@pytest.mark.parametrize("plan", PANEL_PLANS, ids=str)
@pytest.mark.parametrize("type_name", ["bf16", "f16", "q4_k", "mxfp4"])
def test_many_rows_go_through_panels(
    gpu: Context, type_name: str, plan: PanelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_panels(gpu, monkeypatch, type_name, plan, plan.pairs + 9) < NARROW


@pytest.mark.parametrize(("type_name", "tokens"), [("bf16", 2), ("bf16", 21), ("f16", 40)])
def test_few_rows_of_floats_may_go_through_panels(
    gpu: Context, type_name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (192, 320)
    assert run_panels(gpu, monkeypatch, type_name, expert_products.SPARSE, tokens, shape=shape) < NARROW


@pytest.mark.parametrize(
    "named",
    [{"biased": True}, {"gated": False, "biased": True}, {"activation": "clamped_swiglu", "biased": True}],
    ids=str,
)
def test_panels_with_biases_and_gates(gpu: Context, named: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_panels(gpu, monkeypatch, "bf16", PanelPlan(2, 96, 3, 2), 40, shape=(320, 128), **named) < NARROW
