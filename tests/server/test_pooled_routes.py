"""Every route makes vectors as the model's files say, and tells how."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from encoder_folder import make_encoder_folder
from model_folder import write_with
from running_server import MakeServer
from safetensors.numpy import load_file, save_file

from mlxr.loading import ASSETS

TEXT = "import os"
KEYS = {"llama__pooling_type": 3, "tokenizer__ggml__add_eos_token": True}
ROUTES = {
    "/v1/embeddings": lambda text: {"input": text},
    "/api/embed": lambda text: {"input": text},
    "/api/embeddings": lambda text: {"prompt": text},
    "/embedding": lambda text: {"content": text},
    "/embeddings": lambda text: {"content": text},
}


def read_vector(reply: Any) -> list[float]:
    if isinstance(reply, list):
        return list(reply[0]["embedding"][0])
    found = reply.get("embedding") or reply.get("embeddings") or reply["data"][0]["embedding"]
    return list(found[0] if isinstance(found[0], list) else found)


def similarity(one: list[float], other: list[float]) -> float:
    size = sum(a * a for a in one) * sum(b * b for b in other)
    return float(sum(a * b for a, b in zip(one, other, strict=True)) / size**0.5)


def test_all_routes_follow_the_file(make_server: MakeServer, tmp_path: Path) -> None:
    path = write_with(ASSETS / "demo-draft.gguf", tmp_path / "last.gguf", **KEYS)
    ranks = write_with(ASSETS / "demo-draft.gguf", tmp_path / "rank.gguf", llama__pooling_type=4)
    with make_server(default_model=str(path), pinned_models=[str(ranks)], context_tokens=64).client() as client:
        wanted = client.post("/v1/embeddings", json={"input": TEXT, "pooling": "last"}).json()["data"][0]["embedding"]
        mean = client.post("/v1/embeddings", json={"input": TEXT, "pooling": "mean"}).json()["data"][0]["embedding"]
        assert similarity(wanted, mean) < 0.99
        for route, make_body in ROUTES.items():
            reply = client.post(route, json={"model": "last", **make_body(TEXT)})
            assert reply.headers["x-mlxr-pooling"] == "last"
            assert similarity(read_vector(reply.json()), wanted) > 0.9999
            refused = client.post(route, json={"model": "rank", **make_body(TEXT)})
            assert refused.status_code == 400
            assert "rank pairs of texts" in refused.text
            plain = client.post(route, json={"model": "demo", **make_body(TEXT)})
            assert plain.headers["x-mlxr-pooling"].startswith("mean; the files of this model state none")
        check_cut(client)
        listed = {one["name"]: one["capabilities"] for one in client.get("/api/ps").json()["models"]}
        assert {name: "completion" in found for name, found in listed.items()} == {
            "demo:latest": True,
            "last:latest": False,
            "rank:latest": False,
        }


def check_cut(client: httpx.Client) -> None:
    """Check that a text that is cut keeps its start token, and its end token, of which the vector is made."""
    ids = client.post("/tokenize", json={"content": "import os\n" * 60, "add_special": True}).json()["tokens"]
    assert len(ids) > 64
    kept = [*ids[:63], ids[-1]]
    whole = client.post("/embedding", json={"content": [kept]}).json()
    for route in ("/api/embed", "/api/embeddings"):
        reply = client.post(route, json={"model": "last", **ROUTES[route]("import os\n" * 60)})
        assert similarity(read_vector(reply.json()), read_vector(whole)) > 0.9999


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_request_may_ask_for_another_one(pooling: str, client: httpx.Client) -> None:
    reply = client.post("/v1/embeddings", json={"input": TEXT, "pooling": pooling})
    assert reply.headers["x-mlxr-pooling"].split(";")[0] == pooling


def test_documents_are_ranked_in_the_shape_that_is_asked_for(make_server: MakeServer, tmp_path: Path) -> None:
    path = make_encoder_folder(tmp_path / "ranks", "bert-ranks")
    documents = ["paris is the capital of france", {"text": "the cat sat"}, "rain"]
    body = {"query": "where is paris?", "documents": documents}
    with make_server(default_model=str(path)).client() as client:
        plain = client.post("/v1/rerank", json=body).json()
        assert [one["relevance_score"] for one in plain["results"]] == sorted(
            (one["relevance_score"] for one in plain["results"]), reverse=True
        )
        assert plain["usage"]["total_tokens"] > 0
        for route in ("/rerank", "/reranking", "/v1/reranking"):
            assert client.post(route, json=body).json()["results"] == plain["results"]
        best = client.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": True}).json()["results"]
        index = plain["results"][0]["index"]
        assert best == [
            plain["results"][0]
            | {"document": {"text": ["paris is the capital of france", "the cat sat", "rain"][index]}}
        ]
        cohere = client.post("/v2/rerank", json=body).json()
        assert cohere["results"] == plain["results"]
        assert cohere["meta"]["api_version"]["version"] == "2"
        tei = client.post(
            "/rerank", json={"query": body["query"], "texts": ["rain", "the cat sat"], "return_text": True}
        )
        assert [set(row) for row in tei.json()] == [{"index", "score", "text"}] * 2
        raw = client.post("/rerank", json={"query": body["query"], "texts": ["rain"], "raw_scores": True}).json()
        score = next(one["relevance_score"] for one in plain["results"] if one["index"] == 2)
        assert 1 / (1 + math.exp(-raw[0]["score"])) == pytest.approx(score)
        scored = client.post("/v1/score", json={"text_1": body["query"], "text_2": ["rain", "the cat sat"]}).json()
        assert scored["data"][0]["score"] == score
        for wrong, words in (
            ({"query": "a"}, "documents"),
            ({"query": "a", "documents": [{"title": "b"}]}, r"documents[0]"),
        ):
            refused = client.post("/v1/rerank", json=wrong)
            assert refused.status_code == 400
            assert words in refused.text
        assert "x-mlxr-ranking" not in refused.headers
        chat = client.post("/v1/completions", json={"prompt": "a"})
        assert chat.status_code == 400
        assert "is an encoder, which writes no text" in chat.text
        listed = {one["name"]: one["capabilities"] for one in client.get("/api/ps").json()["models"]}
        assert [one for name, one in listed.items() if "ranks" in name] == [["embedding"]]
        shown = client.post("/api/show", json={"model": str(path)})
        assert shown.status_code == 200, shown.text
        assert shown.json()["capabilities"] == ["embedding"]


def test_vectors_in_the_shapes_of_several_apis(make_server: MakeServer, tmp_path: Path) -> None:
    path = make_encoder_folder(tmp_path / "texts", "bert", ("Pooling:mean_tokens",))
    stated = {"prompts": {"query": "where is ", "document": ""}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(stated))
    with make_server(default_model=str(path)).client() as client:

        def ask(route: str, status: int = 200, **body: Any) -> Any:
            reply = client.post(route, json=body)
            assert reply.status_code == status, reply.text
            return reply.json()

        plain = ask("/v1/embeddings", input=["where is paris"])["data"][0]["embedding"]
        asked = client.post("/v1/embeddings", json={"input": "paris", "input_type": "query"})
        assert asked.headers["x-mlxr-prompt"] == "query"
        assert asked.json()["data"][0]["embedding"] == plain
        packed = ask("/v1/embeddings", input="paris", prompt_name="query", encoding_format="base64")["data"][0]
        assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4").tolist() == plain
        bits = ask("/v1/embeddings", input="where is paris", output_dtype="ubinary")["data"][0]["embedding"]
        assert bits == np.packbits(np.array(plain) > 0).tolist()
        short = ask("/v1/embeddings", input="where is paris", output_dtype="int8", dimensions=8)["data"][0]["embedding"]
        assert len(short) == 8
        assert max(map(abs, short)) == 127
        cohere = ask("/v2/embed", texts=["paris"], input_type="search_query", embedding_types=["float", "binary"])
        assert cohere["embeddings"]["float"] == [plain]
        assert cohere["embeddings"]["binary"] == [[bit - 128 for bit in bits]]
        inputs = [{"content": [{"type": "text", "text": "where is paris"}]}]
        assert ask("/v2/embed", inputs=inputs, input_type="classification")["embeddings"] == {"float": [plain]}
        first = ask("/v1/embed", texts=["paris", "rain " * 100], input_type="search_query")
        assert first["embeddings"][0] == plain
        assert first["response_type"] == "embeddings_floats"
        assert ask("/embed", inputs=["paris", "rain"], prompt_name="query")[0] == plain
        assert ask("/embed", inputs="paris", prompt_name="query", truncate=True) == [plain]
        raw = ask("/embed", inputs="where is paris", normalize=False)[0]
        np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), plain, rtol=1e-5)
        assert "length is 64 tokens" in json.dumps(ask("/embed", 400, inputs="rain " * 100))
        assert ask("/api/embed", model="texts", input="paris", input_type="query")["embeddings"] == [plain]
        assert ask("/embedding", content="paris", input_type="query")[0]["embedding"] == [plain]
        for route, body, words in (
            ("/v1/embeddings", {"input": []}, "empty list"),
            ("/v1/embeddings", {"input": ["a"] * 10_000}, "10000"),
            ("/v1/embeddings", {"input": "a" * 1_000_000}, "1000000 characters"),
            ("/v1/embeddings", {"input": "a", "dimensions": 65}, "at most 64"),
            ("/v1/embeddings", {"input": [[5, 6]], "prompt": "a"}, "these are token ids"),
            ("/v2/embed", {"texts": []}, "has 0 texts"),
            ("/v2/embed", {"texts": ["a"], "truncate": "START"}, "START is not supported"),
            ("/v2/embed", {"texts": ["a"], "embedding_types": ["ubinary"], "output_dimension": 9}, "multiple of 8"),
            ("/embed", {"inputs": [{"a": 1}]}, "inputs[0]"),
            ("/v1/classify", {"input": "a"}, "tells no labels apart"),
        ):
            assert words in json.dumps(ask(route, 400, **body)), route


def test_weights_and_vectors_of_tokens(make_server: MakeServer, tmp_path: Path) -> None:
    folder, random = (
        make_encoder_folder(tmp_path / "m3", "xlm-roberta", ("Pooling:cls_token",)),
        np.random.RandomState(3),
    )
    for name, count in (("sparse_linear", 1), ("colbert_linear", 24)):
        parts = {"weight": random.standard_normal((count, 64)), "bias": np.ones(count)}
        save_file({key: value.astype("f4") for key, value in parts.items()}, folder / f"{name}.safetensors")
    body, plain = {"input": ["where is paris", "rain"]}, make_encoder_folder(tmp_path / "plain", "xlm-roberta")
    with make_server(default_model=str(folder), pinned_models=[str(plain)]).client() as client:
        dense, sparse, multi = (
            client.post("/v1/embeddings", json=body | {"kind": kind}).json() for kind in ("dense", "sparse", "multi")
        )
        assert dense["usage"] == sparse["usage"] == multi["usage"]
        first, second = (one["embedding"] for one in sparse["data"])
        assert len(first["indices"]) == len(first["values"]) > 0
        assert np.array(multi["data"][0]["embedding"]).shape == (4, 24)  # three words and the end
        tei = client.post("/embed_sparse", json={"inputs": body["input"]}).json()
        assert [[entry["index"] for entry in row] for row in tei] == [first["indices"], second["indices"]]
        for wrong, words in (
            ({"kind": "sparse", "dimensions": 8}, "dimensions: is for vectors of whole texts"),
            ({"kind": "multi", "encoding_format": "base64"}, "encoding_format: must be float"),
            ({"kind": "multi", "model": "plain"}, "multi wants colbert_linear.safetensors"),
        ):
            refused = client.post("/v1/embeddings", json=body | wrong)
            assert refused.status_code == 400
            assert words.split(": ")[-1] in refused.text


def test_labels_of_texts(make_server: MakeServer, tmp_path: Path) -> None:
    path = make_encoder_folder(tmp_path / "kinds", "bert-ranks", id2label={"0": "good", "1": "bad"})
    weights = load_file(path / "model.safetensors")
    random = np.random.RandomState(5)
    weights["classifier.weight"] = random.standard_normal((2, 64)).astype(np.float32)
    weights["classifier.bias"] = np.zeros(2, np.float32)
    save_file(weights, path / "model.safetensors")
    with make_server(default_model=str(path)).client() as client:
        reply = client.post("/v1/classify", json={"input": ["the cat sat", "rain falls"]}).json()
        for row in reply["data"]:
            assert sum(row["probs"]) == pytest.approx(1)
            assert row["label"] == ("good", "bad")[row["probs"].index(max(row["probs"]))]
            assert row["num_classes"] == 2
        tei = client.post("/predict", json={"inputs": "rain falls"}).json()
        assert {one["label"]: one["score"] for one in tei} == dict(
            zip(("good", "bad"), reply["data"][1]["probs"], strict=True)
        )
        raw = client.post("/predict", json={"inputs": ["rain falls"], "raw_scores": True}).json()[0]
        shares = np.exp([one["score"] for one in raw])
        np.testing.assert_allclose(shares / shares.sum(), [one["score"] for one in tei], rtol=1e-5)
