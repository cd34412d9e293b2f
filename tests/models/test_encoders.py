"""Encoders: as transformers computes them, by folder and by file, with equal bits alone and in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from encoder_models import CASES, Golden, answer, build, read_golden, run_texts

from mlxr.core.errors import InvalidRequest, ModelError
from mlxr.core.model_settings import ModelSettings
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.attend import KVType, default_kv_type
from mlxr.kernels.context import Context, Device, load_native
from mlxr.models import model_from_folder

TOLERANCE = 1e-4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["folder", "file"])
def test_reference_equals_golden(case: str, way: str) -> None:
    golden = read_golden(case)
    answered = answer(build(Context("reference"), golden, way), golden)
    assert answered.shape == golden.states.shape
    assert np.abs(answered - golden.states).max() < TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_cpu_equals_golden(case: str, threads: int) -> None:
    golden = read_golden(case)
    answered = answer(build(Context("cpu", threads=threads), golden), golden)
    assert np.abs(answered - golden.states).max() < TOLERANCE


def choose_kv_type(ctx: Context, type_name: str) -> KVType:
    return default_kv_type(ctx, is_causal=False, is_quantized=type_name == "q8_0")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("type_name", ["f32", "q8_0"])
def test_bits_are_equal_alone_in_a_batch_with_any_threads_and_instructions(case: str, type_name: str) -> None:
    golden = read_golden(case)
    texts = [golden.tokens[:start] for start in (40, 1, 17, 33)]
    contexts = [Context("cpu", 1), Context("cpu", 2)]
    contexts += [Context("cpu", 1, isa) for isa in load_native().available_isas()]
    kv_type = choose_kv_type(contexts[0], type_name)
    alone = [run_texts(build(contexts[0], golden, type_name=type_name), [text], kv_type=kv_type) for text in texts]
    for ctx in contexts:
        together = run_texts(build(ctx, golden, type_name=type_name), texts, kv_type=kv_type)
        assert together.tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.parametrize("case", CASES)
def test_emulated_gpu_is_near_the_golden(case: str) -> None:
    golden = read_golden(case)
    answered = answer(build(Context("emulated"), golden), golden)
    assert np.sqrt(np.mean((answered - golden.states) ** 2)) < 0.02 * max(1.0, float(golden.states.std()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_vectors_of_rounded_weights_point_where_they_should(case: str, device: Device) -> None:
    golden = read_golden(case)
    wanted = golden.states.mean(axis=0) if not golden.ranks else golden.states[0]
    # in 8 bits a router of random weights chooses other experts, and gates of T5 without a norm grow their differences
    kinds = (("f16", 0.9999), ("q8_0", 0.999))[: 1 if case in ("nomic-mixture", "t5-gated", "umt5") else 2]
    ctx = Context(device)
    for type_name, least in kinds:
        made = answer(build(ctx, golden, type_name=type_name), golden, choose_kv_type(ctx, type_name))
        vector = made.mean(axis=0) if not golden.ranks else made[0]
        assert vector @ wanted / np.linalg.norm(vector) / np.linalg.norm(wanted) > least


def make_engine(golden: Golden, **settings: int) -> Engine:
    model = build(Context("cpu", 2), golden)
    chosen = ModelSettings(kv_type="f32", max_batch_tokens=24, prefill_chunk_tokens=16, **settings)
    return Engine(model, model.ctx, chosen, eos_ids=(), memory_bytes=2**28)


def test_engine_takes_each_text_in_one_step_whatever_the_size_of_a_step() -> None:
    golden = read_golden("bert")
    engine = make_engine(golden)
    texts = [golden.tokens[:count].tolist() for count in (40, 3, 16, 24, 30, 1)]
    numbers = [
        engine.submit(EngineRequest(text, pooling="mean", client=f"client {index % 3}"))
        for index, text in enumerate(texts)
    ]
    found = {}
    while engine.has_work:
        found |= {event.sequence_id: event.embedding for event in engine.step()}
        engine.check()
    model = build(Context("cpu", 1), golden)
    for number, text in zip(numbers, texts, strict=True):
        states = run_texts(model, [np.array(text, np.int32)])
        np.testing.assert_allclose(found[number], states.mean(axis=0), rtol=2e-6, atol=2e-6)


def test_engine_ranks_pairs_by_types_and_the_classifier() -> None:
    golden = read_golden("bert-ranks")
    engine = make_engine(golden)
    second = int(np.flatnonzero(golden.types)[0])
    engine.submit(EngineRequest(golden.tokens.tolist(), pooling="rank", second_start=second))
    engine.submit(EngineRequest(golden.tokens.tolist(), pooling="rank"))
    events = [event for _ in range(3) for event in engine.step()]
    ranked, untyped = (event.embedding for event in sorted(events, key=lambda event: event.sequence_id))
    assert ranked is not None
    assert untyped is not None
    assert np.abs(ranked - golden.states[0]).max() < TOLERANCE
    assert np.abs(untyped - golden.states[0]).max() > 100 * TOLERANCE


def test_an_encoder_writes_no_text() -> None:
    engine = make_engine(read_golden("bert"))
    for ask in (lambda: engine.submit(EngineRequest([5, 6])), lambda: engine.score([5, 6, 7])):
        with pytest.raises(InvalidRequest, match="is an encoder, which writes no text"):
            ask()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key': only absolute"),
        ({"is_decoder": True}, "is_decoder is True: only encoders"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish', expected one of"),
        ({"type_vocab_size": 17}, "type_vocab_size is 17, expected a whole number from 0 to 16"),
    ],
)
def test_what_is_not_done_is_refused_by_its_key(change: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        model_from_folder(read_golden("bert").config | change)


def test_positions_of_padding_leave_a_shorter_context() -> None:
    config = read_golden("xlm-roberta").config
    assert model_from_folder(config).context_length == 64
    with pytest.raises(ModelError, match="more than the 66 rows"):
        model_from_folder(config | {"pad_token_id": 65})


def test_goldens_are_small() -> None:
    folder = Path(__file__).parent / "encoder_goldens"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 200_000
    assert json.loads((folder / "bert" / "model.json").read_text())["config"]["architectures"] == ["BertModel"]
