"""Equal bits: the logits of a token do not depend on what else ran, how the prompt was cut, or on how many threads.

Equality, not tolerance: for every weight type, on the native kernels, through the paged cache.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from random_model import make_tokens, make_weights
from tiny_models import PAGE_SIZE, TinyRun, make_hf_tensors

from mlxr.formats import GGML_TYPES, MLX_TYPES, TensorSource, by_name
from mlxr.kernels.attend import KVType
from mlxr.kernels.context import ISAS, Context, load_native
from mlxr.models import Decoder, model_from_folder

Floats = NDArray[np.float32]

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 99,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
WEIGHT_TYPES = [row.name for row in GGML_TYPES if row.name not in ("i8", "i16", "i32", "i64", "f64")]
WEIGHT_TYPES += [row.name for row in MLX_TYPES if row.is_quantized]
PROMPT = make_tokens(CONFIG, 75, 1)  # ends inside its third page
CHUNKS = [1, 7, 32, 512]


@cache
def tensors_of(type_name: str) -> dict[str, TensorSource]:
    return make_hf_tensors(make_weights(CONFIG, 7), CONFIG, type_name)


def build(type_name: str, threads: int, isa: str | None = None) -> Decoder:
    return Decoder(Context("cpu", threads=threads, isa=isa), model_from_folder(CONFIG), tensors_of(type_name))


def run(model: Decoder, tokens: NDArray[np.int32], chunk: int | None = None, kv_type: KVType = "bf16") -> Floats:
    return TinyRun(model, longest=len(tokens), kv_type=kv_type).run(tokens, chunk)


def check_chunks_and_threads(type_name: str, tokens: NDArray[np.int32], isa: str | None, kv_type: KVType) -> Floats:
    expected = run(build(type_name, 1, isa), tokens, kv_type=kv_type)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    for threads in (1, 2):
        model = build(type_name, threads, isa)
        for chunk in CHUNKS:
            np.testing.assert_array_equal(
                run(model, tokens, chunk, kv_type), expected, f"chunk {chunk}, {threads} threads"
            )
    return expected


def check_batch(type_name: str, isa: str | None = None) -> None:
    """Sixteen prompts of different lengths, then a decode step of all with a late prompt in between."""
    model = build(type_name, 2, isa)
    prompts = [
        make_tokens(CONFIG, length, length) for length in (1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 34, 40, 55, 64, 65, 70)
    ]
    together = TinyRun(model, len(prompts) + 1, longest=96, kv_type="bf16")
    prefill = together.step(dict(enumerate(prompts)))
    late = {len(prompts): PROMPT[:9]}
    decode = together.step({i: [i + 2] for i in range(8)} | late | {i: [i + 2] for i in range(8, 16)})
    at = 0
    for i, prompt in enumerate(prompts):
        alone = TinyRun(build(type_name, 1, isa), longest=96, kv_type="bf16")
        np.testing.assert_array_equal(prefill[at : at + len(prompt)], alone.step({0: prompt}), f"prompt {i}")
        row = i if i < 8 else i + 9
        np.testing.assert_array_equal(decode[row : row + 1], alone.step({0: [i + 2]}), f"decode {i}")
        at += len(prompt)
    np.testing.assert_array_equal(decode[8:17], run(model, PROMPT[:9]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_chunks_and_threads_give_equal_bits(type_name: str) -> None:
    check_chunks_and_threads(type_name, PROMPT, None, "bf16")


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_batch_gives_equal_bits(type_name: str) -> None:
    check_batch(type_name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_k"])
@pytest.mark.slow
def test_a_prompt_longer_than_the_chunk_gives_equal_bits(type_name: str) -> None:
    for kv_type in ("bf16", "f16", "q8"):
        check_chunks_and_threads(type_name, make_tokens(CONFIG, 600, 2), None, kv_type)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16", "q5_1", "q3_k", "q4_k", "q6_k", "mxfp4"])
def test_every_instruction_set_is_invariant(type_name: str, isa: str) -> None:
    if isa not in load_native().available_isas():
        pytest.skip(f"this machine or build lacks instruction set {isa}")
    check_chunks_and_threads(type_name, PROMPT, isa, "f32")
    check_batch(type_name, isa)


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_instruction_sets_give_equal_bits(type_name: str) -> None:
    logits = {isa: run(build(type_name, 1, isa), PROMPT) for isa in load_native().available_isas()}
    for isa, values in logits.items():
        np.testing.assert_array_equal(values, logits["portable"], isa)


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_cpu_follows_the_reference_on_the_same_weights(type_name: str) -> None:
    """Activations differ: int8 with quantised weights, 32 times finer with f16; with f32 they are the same."""
    reference = TinyRun(Decoder(Context("reference"), model_from_folder(CONFIG), tensors_of(type_name)), longest=75)
    expected = reference.run(PROMPT)
    logits = run(build(type_name, 2), PROMPT, kv_type="f32")
    error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    usual = 0.03 if by_name(type_name).encode is not None else 0.04  # of random blocks the embeddings weigh less
    assert error < {"f32": 2e-6, "f16": 0.001, "bf16": 0.01}.get(type_name, usual)


def test_pages_in_another_order_give_equal_bits() -> None:
    """The places of pages do not change the result."""
    model = build("q4_k", 2)
    one, other = TinyRun(model, 2, longest=75), TinyRun(model, 2, longest=75)
    other.page_table = np.ascontiguousarray(other.page_table[::-1])
    assert one.pages_each == -(-75 // PAGE_SIZE)
    np.testing.assert_array_equal(one.run(PROMPT, 32), other.run(PROMPT, 32))
