"""Every route makes vectors as the model's files say, and tells how."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from encoder_folder import make_encoder_folder
from model_folder import write_with
from running_server import MakeServer

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


def check_cut(client: httpx.Client) -> None:
    """A text that is cut keeps the end token, which the vector is made of, and the one at its start."""
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
