"""Native mixtures of experts: the bits of each token alone, however tokens and experts meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ran import list_ran
from variants import assert_equal_bits, native_contexts, random_floats, run_everywhere
from weight_blocks import make_blocks

from mlxr.core.errors import DeviceError, ModelError
from mlxr.formats import TensorSource, by_name, encode_tensor
from mlxr.formats.tensor import MappedFile
from mlxr.kernels.activate import Activation, activate
from mlxr.kernels.context import Context, load_native
from mlxr.kernels.ledger import Profiler
from mlxr.kernels.linear import LinearWeight, leave, linear, prepare
from mlxr.kernels.moe import SCORINGS, Experts, RoutingRule, make_experts, make_router, mix, read_use, route

HIDDEN, FEATURES, EXPERTS, USED = 256, 288, 6, 3
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

RULES = {
    "softmax": RoutingRule(3),
    "softmax of the chosen": RoutingRule(2, "softmax_chosen"),
    "sigmoid": RoutingRule(4, "sigmoid", renormalises=True, floor=1e-20, scale=1.8),
    "groups": RoutingRule(4, "sigmoid", renormalises=True, groups=4, groups_used=2),
    "all": RoutingRule(40, renormalises=True),
    "sparsemixer": RoutingRule(2, "sparsemixer", jitter=0.15),
    "sparsemixer, all": RoutingRule(40, "sparsemixer", renormalises=True, scale=1.5, jitter=0.4),
}
# Types of gate, up and down; activation.
KINDS: dict[str, tuple[str, str, str, Activation]] = {
    "q8_0": ("q8_0", "q8_0", "q8_0", "silu"),
    "q4_0": ("q4_0", "q4_0", "q5_0", "gelu_tanh"),
    "q4_k": ("q4_k", "q4_k", "q8_0", "silu"),
    "q6_k": ("q6_k", "q3_k", "q4_1", "silu"),
    "mxfp4": ("mxfp4", "mxfp4", "mxfp4", "clamped_swiglu"),
    "iq3_s": ("iq3_s", "iq2_xxs", "iq4_nl", "silu"),
    "f16": ("f16", "f16", "f16", "relu_squared"),
    "bf16": ("bf16", "q8_0", "f32", "silu"),
    "f32": ("f32", "f32", "bf16", "gelu_erf"),
}


@cache
def encode(name: str, rows: int, columns: int, seed: int) -> TensorSource:
    if by_name(name).encode is None:
        return TensorSource("w", name, (rows, columns), make_blocks(name, (rows, columns), np.random.RandomState(seed)))
    values = (random_floats(seed, rows, columns) / np.sqrt(np.float32(columns))).astype(np.float32)
    return TensorSource("w", name, values.shape, encode_tensor(name, values))


def make_weights(
    ctx: Context,
    kind: str,
    features: int = FEATURES,
    *,
    gated: bool = True,
    bias: bool = False,
    file: Callable[[TensorSource], TensorSource] | None = None,
) -> tuple[list[LinearWeight], list[LinearWeight], Activation]:
    """Make weights of EXPERTS experts; `file` puts tensors into files, and their weights stay there."""
    *ups, down, activation = KINDS[kind]
    make, keep = (prepare, lambda tensor: tensor) if file is None else (leave, file)
    up = [
        make(
            ctx,
            [keep(encode(name, features, HIDDEN, 7 * expert + side)) for side, name in enumerate(ups[: 1 + gated])],
            [random_floats(expert + side, features) if bias else None for side in range(1 + gated)],
        )
        for expert in range(EXPERTS)
    ]
    biases = [random_floats(90 + expert, HIDDEN) if bias else None for expert in range(EXPERTS)]
    downs = [
        make(ctx, [keep(encode(down, HIDDEN, features, 7 * expert + 2))], [biases[expert]]) for expert in range(EXPERTS)
    ]
    return up, downs, activation


def draw_routes(tokens: int, seed: int, skew: float = 0.0) -> tuple[Ints, Floats]:
    """Different experts for each token; with a skew the first ones are chosen more often."""
    rng = np.random.default_rng(seed)
    worth = rng.gumbel(size=(tokens, EXPERTS)) - skew * np.arange(EXPERTS)
    return np.argsort(-worth, axis=1)[:, :USED].astype(np.int32), rng.random((tokens, USED), np.float32)


def mix_one_by_one(ctx: Context, x: Floats, chosen: Ints, shares: Floats, experts: Experts) -> Floats:
    """Mix token by token and rank by rank; the exact product is rounded once, with the sum."""
    out = np.empty_like(x)
    for token, (own, weights) in enumerate(zip(chosen, shares, strict=True)):
        total: Floats | None = None
        for expert, share in zip(own, weights, strict=True):
            inner = linear(ctx, x[token : token + 1], experts.up[expert])
            inner = activate(ctx, inner, experts.activation, gated=experts.is_gated, parameters=experts.parameters)
            made = linear(ctx, inner, experts.down[expert])[0]
            exact = share.astype(np.float64) * made
            total = (exact if total is None else exact + total).astype(np.float32)
        out[token] = total
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", load_native().available_isas())
def test_bits_are_those_of_each_token_alone(kind: str, isa: str) -> None:
    ctx = Context("cpu", threads=2, isa=isa)
    gated = kind != "f16"
    experts = make_experts(ctx, *make_weights(ctx, kind, gated=gated, bias=kind in ("mxfp4", "q4_0")))
    x = random_floats(4, 24, HIDDEN)
    for tokens, skew in ((1, 0.0), (5, 0.0), (24, 2.0)):
        chosen, shares = draw_routes(tokens, tokens, skew)
        expected = mix_one_by_one(ctx, x[:tokens], chosen, shares, experts)
        assert_equal_bits(mix(ctx, x[:tokens], chosen, shares, experts), expected, (kind, tokens))


@pytest.mark.parametrize(("kind", "features"), [("q4_k", 288), ("q8_0", 544), ("f32", 40)])
def test_many_tokens_have_the_bits_of_few(kind: str, features: int) -> None:
    """Prompts, whose experts have from no tokens to all of them, as parts of any size: on all threads and tiers."""
    tokens = 150
    x, (chosen, shares) = random_floats(5, tokens, HIDDEN), draw_routes(tokens, 5, skew=1.5)
    expected: Floats | None = None
    for ctx in native_contexts():
        up, down, activation = make_weights(ctx, kind, features)
        numbers = (0.4,) if kind == "q8_0" else ()
        experts = make_experts(ctx, up, down, "limited_swiglu" if numbers else activation, None, numbers)
        whole = mix(ctx, x, chosen, shares, experts)
        if expected is None:
            cuts = (0, 1, 3, 40, 41, 75, tokens)
            spans = [slice(first, last) for first, last in pairwise(cuts)]
            expected = np.concatenate([mix(ctx, x[s], chosen[s], shares[s], experts) for s in spans])
            counts = np.bincount(chosen.reshape(-1), minlength=EXPERTS)
            assert counts.max() >= 64 > counts.min()
            alone = mix_one_by_one(ctx, x[:3], chosen[:3], shares[:3], experts)
            assert_equal_bits(expected[:3], alone, kind)
        assert_equal_bits(whole, expected, ctx)


@pytest.fixture(scope="module")
def drawn() -> tuple[Context, Experts]:
    """Experts for random routes."""
    ctx = Context("cpu", threads=4)
    return ctx, make_experts(ctx, *make_weights(ctx, "q4_k"))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=USED, max_size=USED), min_size=1, max_size=40))
def test_any_routes_give_each_token_its_bits(drawn: tuple[Context, Experts], rows: list[list[int]]) -> None:
    """Also routes that no router makes, such as one expert several times."""
    ctx, experts = drawn
    chosen = np.array(rows, np.int32)
    x, shares = random_floats(len(rows), len(rows), HIDDEN), random_floats([len(rows), 1], *chosen.shape)
    order = np.random.default_rng(len(rows)).permutation(len(rows))
    result = mix(ctx, x, chosen, shares, experts)
    assert_equal_bits(mix(ctx, x[order], chosen[order], shares[order], experts), result[order])
    alone = [mix(ctx, x[i : i + 1], chosen[i : i + 1], shares[i : i + 1], experts) for i in range(min(len(rows), 4))]
    assert_equal_bits(np.concatenate(alone), result[:4])


def test_mixing_agrees_with_the_reference(cpu: Context, reference: Context) -> None:
    x, (chosen, shares) = random_floats(6, 9, HIDDEN), draw_routes(9, 6)
    results = [mix(ctx, x, chosen, shares, make_experts(ctx, *make_weights(ctx, "f32"))) for ctx in (cpu, reference)]
    np.testing.assert_allclose(results[0], results[1], rtol=2e-2, atol=2e-2)  # bf16 rounds what comes to down
    assert np.abs(results[0] - results[1]).mean() < 1e-3


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routes_are_those_of_the_reference(name: str, has_bias: bool, reference: Context) -> None:
    logits = random_floats(8, 50, 40)
    logits[0] = 1.0  # all alike: the lower number comes first
    logits[1, ::2] = 2.0
    logits[2] = 0.0
    bias, scales = (random_floats(9, 40), np.abs(random_floats(10, 40))) if has_bias else (None, None)
    if RULES[name].scoring == "sparsemixer":
        bias = None
    router = make_router(40, RULES[name], bias, scales)
    chosen = run_everywhere(lambda ctx: route(ctx, logits, router)[0])
    shares = run_everywhere(lambda ctx: route(ctx, logits, router)[1])
    expected = route(reference, logits, router)
    np.testing.assert_array_equal(chosen, expected[0])
    np.testing.assert_allclose(shares, expected[1], rtol=1e-5)
    alone = route(native_contexts()[0], logits[7:8], router)
    assert_equal_bits(alone[1], shares[7:8])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-9, 9, width=32), min_size=9, max_size=9), min_size=1, max_size=12),
    used=st.integers(1, 9),
    jitter=st.sampled_from([0.0, 0.01, 0.15, 0.6]),
    scoring=st.sampled_from(SCORINGS),
)
def test_any_logits_give_each_token_its_routes(rows: list[list[float]], used: int, jitter: float, scoring: str) -> None:
    """The same bits alone and among others, with every instruction set, and shares as the reference has them."""
    logits, router = np.array(rows, np.float32), make_router(9, RoutingRule(used, scoring, jitter=jitter))  # type: ignore[arg-type]
    chosen, shares = (run_everywhere(lambda ctx, part=part: route(ctx, logits, router)[part]) for part in (0, 1))
    for row in range(len(rows)):
        alone = route(native_contexts()[0], logits[row : row + 1], router)
        assert_equal_bits(alone[1], shares[row : row + 1])
        np.testing.assert_array_equal(alone[0], chosen[row : row + 1])
    if scoring in ("softmax_chosen", "sparsemixer"):  # scores that rounding makes equal are ranked by their numbers
        expected = route(Context("reference"), logits, router)
        np.testing.assert_array_equal(chosen, expected[0])
        np.testing.assert_allclose(shares, expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("values", [(np.nan,), (np.inf, 0.0), (-np.inf,), (np.nan, np.inf, 1.0)])
@pytest.mark.parametrize("name", ["softmax", "groups", "sparsemixer"])
def test_whatever_the_logits_are_the_chosen_experts_exist(cpu: Context, name: str, values: Sequence[float]) -> None:
    logits = np.resize(np.array(values, np.float32), (3, 40))
    chosen, _ = route(cpu, logits, make_router(40, RULES[name]))
    for row in chosen:
        assert len(set(row.tolist())) == RULES[name].used
        assert 0 <= row.min() <= row.max() < 40


def test_the_ledger_names_the_kernels_and_the_profile_the_bytes_of_experts_that_were_read(cpu: Context) -> None:
    experts = make_experts(cpu, *make_weights(cpu, "q4_k"))
    x = random_floats(3, 200, HIDDEN)
    chosen, shares = np.array([[1, 4, 2]], np.int32), np.ones((1, USED), np.float32)
    profiler = Profiler(cpu)
    profiler.start()
    mix(cpu, x[:1], chosen, shares, experts)
    (row,) = (kernel for kernel in profiler.stop().kernels if kernel.operator == "moe")
    weights = [weight for expert in (1, 2, 4) for weight in (experts.up[expert], experts.down[expert])]
    assert row.nbytes == sum(weight.nbytes for weight in weights) + 8 * HIDDEN
    assert row.macs == sum(weight.in_features * weight.out_features for weight in weights)
    route(cpu, x[:, :EXPERTS].copy(), make_router(EXPERTS, RULES["softmax"]))
    mix(cpu, x, *draw_routes(200, 3), experts)
    ran = list_ran(cpu, "moe")
    assert ran["rows q4_k+q8_0"] == ran["route f32"] == 1
    assert any("gated panels q4_k" in name and "panels q8_0" in name for name in ran)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[TensorSource], TensorSource]:
    """Puts tensors into mapped files, where they do not begin at whole pages."""

    def put(tensor: TensorSource) -> TensorSource:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        path.write_bytes(b"head" + tensor.data.tobytes())
        mapping = MappedFile(path)
        return TensorSource(tensor.name, tensor.type_name, tensor.shape, mapping.bytes[4:], mapping)

    return put


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 2, EXPERTS])
def test_experts_that_stay_in_their_file_have_the_same_bits(
    kind: str, slots: int, file: Callable[[TensorSource], TensorSource]
) -> None:
    """Steps of one token and of many, one after another, with more experts than there is memory for."""
    ctx, gated = Context("cpu", threads=2), kind != "f16"
    bias = kind in ("mxfp4", "q4_0")
    held = make_experts(ctx, *make_weights(ctx, kind, gated=gated, bias=bias))
    left = make_experts(ctx, *make_weights(ctx, kind, gated=gated, bias=bias, file=file), slots)
    assert left.nbytes == held.nbytes == held.held_bytes
    assert left.held_bytes == held.nbytes * slots // EXPERTS
    for seed, (tokens, skew) in enumerate([(1, 0.0), (2, 0.0), (150, 1.0), (1, 0.0), (40, 0.0), (150, 0.0), (3, 0.5)]):
        x, (chosen, shares) = random_floats(seed, tokens, HIDDEN), draw_routes(tokens, seed, skew)
        assert_equal_bits(mix(ctx, x, chosen, shares, left), mix(ctx, x, chosen, shares, held), (kind, tokens))
        own = linear(ctx, x, left.up[chosen[0, 0]])  # loaded or not, a product has its bits
        assert_equal_bits(own, linear(ctx, x, held.up[chosen[0, 0]]))
    use, others = read_use(ctx, left), read_use(ctx, held)
    assert use is not None
    assert others is not None
    assert (use.rows, use.steps, use.groups) == (others.rows, others.steps, others.groups)
    assert others.reads == 0
    assert use.reads == 0 if slots == EXPERTS else use.reads > EXPERTS


def test_experts_that_were_used_last_stay_in_memory(file: Callable[[TensorSource], TensorSource], cpu: Context) -> None:
    experts = make_experts(cpu, *make_weights(cpu, "q8_0", file=file), 3)
    x, shares = random_floats(1, 1, HIDDEN), np.ones((1, 1), np.float32)

    def read(*numbers: int) -> int:
        """Use experts one after the other; return how many of them were read."""
        before = read_use(cpu, experts)
        for number in numbers:
            mix(cpu, x, np.array([[number]], np.int32), shares, experts)
        after = read_use(cpu, experts)
        assert before is not None
        assert after is not None
        return after.reads - before.reads

    assert read(0, 1, 2) == 0  # the first ones are there from the start
    assert read(2, 0, 1, 0) == 0
    assert read(3) == 1  # takes the place of 2
    assert read(0, 1, 3) == 0
    assert read(2) == 1


def test_what_was_sent_to_experts_is_counted(cpu: Context, reference: Context) -> None:
    for ctx in (cpu, reference):
        experts = make_experts(ctx, *make_weights(ctx, "f32"))
        counts = np.zeros(EXPERTS, int)
        groups = 0
        for seed, tokens in enumerate((1, 9, 60)):
            chosen, shares = draw_routes(tokens, seed, 2.0)
            mix(ctx, random_floats(seed, tokens, HIDDEN), chosen, shares, experts)
            counts += np.bincount(chosen.reshape(-1), minlength=EXPERTS)
            groups += len(np.unique(chosen))
        use = read_use(ctx, experts)
        assert use is not None
        assert (use.rows, use.steps, use.groups, use.reads) == (tuple(counts), 3, groups, 0)


def test_rows_of_experts_are_counted_by_kernel(cpu: Context, reference: Context) -> None:
    """Experts of one call have different kernels, as one may have many rows and another one few."""
    chosen = np.repeat(np.array([[0, 1], [2, 1]], np.int32), [70, 3], axis=0)  # experts of 70, 73 and 3 rows
    x, shares = random_floats(1, 73, HIDDEN), np.ones((73, 2), np.float32)
    for ctx in (cpu, reference):
        experts = make_experts(ctx, *make_weights(ctx, "q4_0"))
        mix(ctx, x, chosen, shares, experts)
        mix(ctx, x[:1], chosen[:1], shares[:1], experts)
    counted = {row.kernel: row.rows for row in cpu.ledger.snapshot().expert_rows}
    few = {"gated panels q4_0": 143 * 2, "panels q5_0": 143, "rows q4_0": (3 + 2) * 2, "rows q5_0": 3 + 2}
    assert counted == few  # gate and up are a part each
    assert {row.implementation for row in cpu.ledger.snapshot().expert_rows} == {"cpu"}
    rows = [(row.implementation, row.kernel, row.rows) for row in reference.ledger.snapshot().expert_rows]
    assert rows == [("reference", "q4_0", 148), ("reference", "q5_0", 148)]
    cpu.ledger.reset()
    assert cpu.ledger.snapshot().expert_rows == []


def test_experts_that_cannot_stay_in_their_file_are_refused(
    file: Callable[[TensorSource], TensorSource], cpu: Context, reference: Context
) -> None:
    with pytest.raises(ModelError, match="tensor w is laid out anew when it is read, so it cannot stay in its file"):
        make_weights(cpu, "q8_0", file=lambda tensor: tensor)
    with pytest.raises(DeviceError, match="'reference' keeps all weights in memory"):
        make_weights(reference, "q8_0", file=file)
    with pytest.raises(ValueError, match="weights are not left in their file"):
        make_experts(cpu, *make_weights(cpu, "q8_0"), 2)
    with pytest.raises(ValueError, match="slots is 7, expected from 1 to the 6 experts"):
        make_experts(cpu, *make_weights(cpu, "q8_0", file=file), 7)
    up, down, activation = make_weights(cpu, "q8_0", file=file)
    other, _, _ = make_weights(cpu, "q4_0", file=file)
    with pytest.raises(ValueError, match="weights differ in their types"):
        make_experts(cpu, [*up[:-1], other[-1]], down, activation, 2)


def test_what_does_not_fit_is_refused(cpu: Context) -> None:
    experts = make_experts(cpu, *make_weights(cpu, "q8_0"))
    x, (chosen, shares) = random_floats(1, 2, HIDDEN), draw_routes(2, 1)
    for wrong in (-1, EXPERTS):
        other = chosen.copy()
        other[1, 2] = wrong
        with pytest.raises(ValueError, match=rf"mix: chosen\[5\] is {wrong}, expected 0 to 5"):
            mix(cpu, x, other, shares, experts)
    with pytest.raises(ValueError, match="columns of x is 255, expected 256"):
        mix(cpu, x[:, :255].copy(), chosen, shares, experts)
    module = cpu.module
    up, down, _ = make_weights(cpu, "q8_0")
    native = module.Experts("silu")
    native.append(up[0].payload, down[0].payload)
    with pytest.raises(ValueError, match="experts: columns of down is 576, expected 288"):
        native.append(down[0].payload, up[0].payload)
    with pytest.raises(ValueError, match="experts: activation is tanh"):
        module.Experts("tanh")
    with pytest.raises(ValueError, match="router: groups_used is 1, expected 2 to 4"):
        module.Router(8, 4, "softmax", False, 0.0, 1.0, 4, 1, 0.0, None, None)
    with pytest.raises(ValueError, match="router: scoring is best"):
        module.Router(8, 4, "best", False, 0.0, 1.0, 1, 1, 0.0, None, None)
    assert mix(cpu, x[:0], chosen[:0], shares[:0], experts).shape == (0, HIDDEN)
