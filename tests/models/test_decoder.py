"""The decoder: its checks before it reads, its loading, and the operators of one forward step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from model_fields import look
from numpy.typing import NDArray
from random_model import make_tokens, make_weights
from tiny_models import PAGE_SIZE, TinyRun, build_hf, make_hf_tensors, make_source, read_golden

from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import build_table
from mlxr.models import Decoder, model_from_folder
from mlxr.models.rotations import FIRST_POSITIONS
from mlxr.models.weights import check_tensors, expected_tensors

CONFIG, SEED, TOKENS, GOLDEN = read_golden("llama-gqa-64")
MODEL = model_from_folder(CONFIG)


def make_tensors() -> dict[str, TensorSource]:
    return make_hf_tensors(make_weights(CONFIG, SEED), CONFIG)


def test_every_expected_tensor_is_needed() -> None:
    tensors = make_tensors()
    assert tensors.keys() == expected_tensors(MODEL).keys()
    for name in tensors:
        fewer = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ModelError, match=f"tensor {name} is missing"):
            check_tensors(MODEL, fewer)


def test_every_shape_is_checked() -> None:
    tensors = make_tensors()
    for name, shape in expected_tensors(MODEL).items():
        wrong = (shape[0] + 2, *shape[1:])
        changed = tensors | {name: make_source(name, np.zeros(wrong, np.float32))}
        with pytest.raises(ModelError, match=f"tensor {name} has shape .*, expected .* by hidden 128"):
            check_tensors(MODEL, changed)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("blk.0.attn_q.bias", "has no place in a llama model of 2 layers"),
        ("blk.0.ffn_gate_exps.weight", "mixture of experts is not supported"),
        ("blk.2.attn_q.weight", "has no place"),
        ("blk.0.attn_q_norm.weight", "has no place"),
        ("position_embd.weight", "has no place"),
    ],
)
def test_unexpected_tensors_are_refused(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"tensor {name} .*{why}"):
        check_tensors(MODEL, make_tensors() | {name: make_source(name, np.zeros(64, np.float32))})


def test_copies_and_derived_tensors_are_no_obstacle() -> None:
    tied = replace(MODEL, is_tied=True)
    extra = make_source("blk.0.attn_rot_embd.weight", np.zeros(32, np.float32))
    check_tensors(tied, make_tensors() | {extra.name: extra})


def test_rope_factors_are_used_and_checked() -> None:
    factors = make_source("rope_freqs.weight", np.full(32, 4.0, np.float32))
    stretched = TinyRun(Decoder(Context("reference"), MODEL, make_tensors() | {factors.name: factors})).run(TOKENS)
    linear = model_from_folder(CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    expected = TinyRun(Decoder(Context("reference"), linear, make_tensors())).run(TOKENS)
    np.testing.assert_array_equal(stretched, expected)
    for wrong in (0.0, -1.0, np.nan, np.inf):
        spoilt = make_source("rope_freqs.weight", np.array([1.0] * 31 + [wrong], np.float32))
        with pytest.raises(ModelError, match=rf"rope_freqs.weight holds {wrong} at 31; it must be finite and above 0"):
            Decoder(Context("reference"), MODEL, make_tensors() | {spoilt.name: spoilt})
    short = make_source("rope_freqs.weight", np.ones(31, np.float32))
    with pytest.raises(ModelError, match=r"tensor rope_freqs.weight has shape \(31,\), expected \(32,\)"):
        check_tensors(MODEL, make_tensors() | {short.name: short})


@dataclass
class WatchedTensor:
    """A tensor that notes when it is decoded and released."""

    name: str
    source: TensorSource
    log: list[tuple[str, str]]
    type_name: str = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    data: NDArray[np.uint8] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        for attribute in ("type_name", "shape", "data", "nbytes"):
            setattr(self, attribute, getattr(self.source, attribute))

    def to_float32(self, start: int | None = None, stop: int | None = None) -> NDArray[np.float32]:
        self.log.append(("decode", self.name))
        return self.source.to_float32(start, stop)

    def release(self) -> None:
        self.log.append(("release", self.name))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_loading_goes_layer_by_layer_and_releases(device: str) -> None:
    log: list[tuple[str, str]] = []
    tensors = {name: WatchedTensor(name, source, log) for name, source in make_tensors().items()}
    calls: list[tuple[int, int]] = []
    Decoder(Context(device), MODEL, tensors, lambda done, total: calls.append((done, total)))  # type: ignore[arg-type]
    assert calls == [(1, 3), (2, 3), (3, 3)]
    released = [name for action, name in log if action == "release"]
    assert set(released) == tensors.keys() - {"token_embd.weight"}
    layers = [int(name.split(".")[1]) for name in released if name.startswith("blk.")]
    assert layers == sorted(layers)
    first_of_second = next(i for i, (_, name) in enumerate(log) if name.startswith("blk.1."))
    assert {name for action, name in log[:first_of_second] if action == "release"} >= {
        name for name in tensors if name.startswith("blk.0.")
    }


def test_weight_bytes_are_those_of_the_tensors() -> None:
    tensors = make_tensors()
    model = Decoder(Context("reference"), MODEL, tensors)
    assert model.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert model.step_bytes == model.weight_bytes - tensors["token_embd.weight"].nbytes
    matrices = {name: tensor.shape for name, tensor in tensors.items() if len(tensor.shape) == 2}
    del matrices["token_embd.weight"]
    rows, columns = matrices.pop("output.weight")
    assert model.work.output_macs == rows * columns
    assert model.work.token_macs == sum(rows * columns for rows, columns in matrices.values())
    assert model.work.weight_bytes == model.step_bytes
    pair_macs = 2 * len(model.config.layers) * model.config.heads * look(model.config, "head_dim")
    assert [(work.pair_macs, work.window) for work in model.work.attention] == [
        (pair_macs, look(model.config, "sliding_window"))
    ]


def test_one_step_runs_every_operator_as_often_as_it_should() -> None:
    ctx = Context("reference")
    run = TinyRun(build_hf(ctx, CONFIG, SEED))
    ctx.ledger.reset()
    run.run(TOKENS)
    counts: dict[str, int] = {}
    for dispatch in ctx.ledger.snapshot().dispatches:
        counts[dispatch.operator] = counts.get(dispatch.operator, 0) + dispatch.count
    per_layer = {"attend": 1, "write_pages": 1, "activate": 1, "linear": 4, "rms_norm": 2, "rope": 2}
    expected = {operator: 2 * count for operator, count in per_layer.items()} | {"embed": 1}
    expected["linear"] += 1
    expected["rms_norm"] += 1
    assert counts == expected


def test_cpu_runs_no_reference_and_copies_nothing() -> None:
    ctx = Context("cpu")
    TinyRun(build_hf(ctx, CONFIG, SEED)).run(TOKENS)
    snapshot = ctx.ledger.snapshot()
    assert {dispatch.implementation for dispatch in snapshot.dispatches} == {"cpu"}
    assert {"linear", "embed", "rms_norm", "rope", "write_pages", "attend", "activate"} == {
        dispatch.operator for dispatch in snapshot.dispatches
    }
    assert snapshot.copied_bytes == 0


def test_only_wanted_rows_get_logits() -> None:
    run = TinyRun(build_hf(Context("reference"), CONFIG, SEED))
    positions = np.arange(8, dtype=np.int32)
    batch = RaggedBatch(
        token_ids=TOKENS[:8],
        positions=positions,
        slots=run.page_table[0, 0] * PAGE_SIZE + positions,
        query_starts=np.array([0, 8], np.int32),
        context_lengths=np.array([8], np.int32),
        page_table=run.page_table,
        output_rows=np.array([5, 0], np.int32),
    )
    logits = run.model.forward(batch, run.arena)
    np.testing.assert_allclose(logits, GOLDEN[[5, 0]], atol=1e-4)
    nothing = replace(batch, output_rows=np.empty(0, np.int32))
    assert run.model.forward(nothing, run.arena).shape == (0, MODEL.vocab_size)


def test_rotation_table_grows_without_changing_results() -> None:
    config = CONFIG | {"max_position_embeddings": 2 * FIRST_POSITIONS + 10, "num_hidden_layers": 1}
    length = FIRST_POSITIONS + 40
    tokens = make_tokens(config, length, 3)
    model = build_hf(Context("reference"), config, SEED)
    assert model._rotations.cover(1)[0].positions == FIRST_POSITIONS
    growing = TinyRun(model, longest=length).run(tokens, chunk_tokens=512)
    assert model._rotations.cover(1)[0].positions == 2 * FIRST_POSITIONS
    grown = TinyRun(model, longest=length).run(tokens, chunk_tokens=512)
    np.testing.assert_array_equal(growing, grown)
    # and the rows are those of a table made at that length
    assert (
        np.abs(
            model._rotations.cover(1)[0].cos - build_table(2 * FIRST_POSITIONS, 64, 1e4, interleaved=False).cos
        ).max()
        == 0
    )


def test_context_beyond_the_models_is_refused() -> None:
    run = TinyRun(build_hf(Context("reference"), CONFIG | {"max_position_embeddings": 20}, SEED))
    run.step({0: TOKENS[:20]})
    with pytest.raises(ModelError, match="a context of 21 tokens is beyond the model's 20"):
        run.step({0: TOKENS[20:21]})


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    run = TinyRun(build_hf(Context("reference"), CONFIG, SEED))
    with pytest.raises(ValueError, match=r"token_ids is .* ids from 0 to 255"):
        run.step({0: [3, 256]})
