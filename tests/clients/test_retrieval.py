"""Clients that embed and rank, against an encoder and a cross-encoder: OpenAI's, Ollama's, Cohere's, LangChain's,
LlamaIndex's and Haystack's. Cohere's are used unchanged, so they ask for their own models' names.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from conftest import ROOT, WRITER, start

TEXTS = ["the cat sat on the mat", "where is paris?", "paris is the capital of france", "rain falls"]
QUERY = "where is paris?"
MAKE = """
import sys
from pathlib import Path
from encoder_folder import make_encoder_folder
folder = Path(sys.argv[1])
make_encoder_folder(folder / "encoder", "bert", ("Pooling:mean_tokens",))
make_encoder_folder(folder / "ranker", "bert-ranks")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("retrieval")
    shared = str(ROOT / "tests" / "shared")
    subprocess.run([WRITER, "-c", MAKE, home], check=True, env=os.environ | {"PYTHONPATH": shared})
    words = ["serve", str(home / "encoder")]
    with start(words, home, {"MLXR_PINNED_MODELS": str(home / "ranker")}) as address:
        yield address


@pytest.fixture(scope="module")
def vectors(url: str) -> list[list[float]]:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    reply = client.embeddings.create(model="encoder", input=TEXTS)  # asks for base64
    plain = client.embeddings.create(model="encoder", input=TEXTS, encoding_format="float")
    short = client.embeddings.create(model="encoder", input=TEXTS[0], dimensions=16)
    assert [one.embedding for one in reply.data] == [one.embedding for one in plain.data]
    assert len(short.data[0].embedding) == 16
    assert reply.usage.total_tokens > len(TEXTS)
    return [one.embedding for one in reply.data]


def are_near(found: list[list[float]], wanted: list[list[float]]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(abs(a - b) < 1e-5 for one, other in pairs for a, b in zip(one, other, strict=True))


def test_ollama(url: str, vectors: list[list[float]]) -> None:
    ollama = pytest.importorskip("ollama")
    reply = ollama.Client(url).embed("encoder", TEXTS)
    assert are_near([list(one) for one in reply.embeddings], vectors)


def test_cohere(url: str, vectors: list[list[float]]) -> None:
    cohere = pytest.importorskip("cohere")
    second = cohere.ClientV2("none", base_url=url)
    made = second.embed(model="encoder", texts=TEXTS, input_type="search_document", embedding_types=["float", "int8"])
    assert are_near(made.embeddings.float_, vectors)
    assert len(made.embeddings.int8[0]) == len(vectors[0])
    first = cohere.Client("none", base_url=url)
    assert are_near(first.embed(model="encoder", texts=TEXTS, input_type="search_query").embeddings, vectors)
    for client in (first, second):
        ranked = client.rerank(model="ranker", query=QUERY, documents=TEXTS, top_n=3).results
        assert len(ranked) == 3
        assert [one.relevance_score for one in ranked] == sorted((one.relevance_score for one in ranked), reverse=True)


def test_langchain(url: str, vectors: list[list[float]]) -> None:
    library = pytest.importorskip("langchain_openai")
    own = library.OpenAIEmbeddings(
        model="encoder", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert are_near(own.embed_documents(TEXTS), vectors)
    cohere = pytest.importorskip("langchain_cohere")
    made = cohere.CohereEmbeddings(model="encoder", cohere_api_key="none", base_url=url)
    assert are_near(made.embed_documents(TEXTS), vectors)
    assert are_near([made.embed_query(TEXTS[0])], vectors[:1])
    ranked = cohere.CohereRerank(model="ranker", cohere_api_key="none", base_url=url).rerank(TEXTS, QUERY, top_n=2)
    assert [set(one) for one in ranked] == [{"index", "relevance_score"}] * 2


def test_llama_index(url: str, vectors: list[list[float]]) -> None:
    library = pytest.importorskip("llama_index.embeddings.openai_like")
    own = library.OpenAILikeEmbedding(model_name="encoder", api_base=f"{url}/v1", api_key="none")
    assert are_near(own.get_text_embedding_batch(TEXTS), vectors)
    rerank = pytest.importorskip("llama_index.postprocessor.cohere_rerank")
    schema = pytest.importorskip("llama_index.core.schema")
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in TEXTS]
    ranker = rerank.CohereRerank(model="ranker", api_key="none", top_n=2, base_url=url)
    assert len(ranker.postprocess_nodes(nodes, query_str=QUERY)) == 2


def test_haystack(url: str, vectors: list[list[float]]) -> None:
    embedders, utils = pytest.importorskip("haystack.components.embedders"), pytest.importorskip("haystack.utils")
    key, documents = utils.Secret.from_token("none"), pytest.importorskip("haystack").Document
    made = embedders.OpenAIDocumentEmbedder(api_key=key, model="encoder", api_base_url=f"{url}/v1", progress_bar=False)
    found = made.run([documents(content=text) for text in TEXTS])["documents"]
    assert are_near([one.embedding for one in found], vectors)
    cohere = pytest.importorskip("haystack_integrations.components.rankers.cohere")
    ranker = cohere.CohereRanker(model="ranker", api_key=key, api_base_url=url, top_k=2)
    assert len(ranker.run(query=QUERY, documents=[documents(content=text) for text in TEXTS])["documents"]) == 2


def test_functions_of_vectors_as_txtai_takes_them(url: str, vectors: list[list[float]]) -> None:
    """txtai calls a function with a list of texts (`method: external`), which wants their vectors as arrays."""
    httpx = pytest.importorskip("httpx")

    def transform(texts: list[str]) -> list[list[float]]:
        made: list[list[float]] = httpx.post(f"{url}/embed", json={"inputs": texts}).json()
        return made

    assert are_near(transform(TEXTS), vectors)
    ranked = httpx.post(f"{url}/rerank", json={"model": "ranker", "query": QUERY, "texts": TEXTS}).json()
    assert sorted(one["index"] for one in ranked) == [*range(len(TEXTS))]


PAIRS = (("the cat sat", "the cat sat.", 5.0), ("where is paris?", "where is paris", 5.0), ("rain", "the dog sat", 1.0))


def test_mteb(url: str) -> None:
    """mteb evaluates a task of three pairs through OpenAI's client; it needs torch, so nothing installs it here."""
    mteb, openai = pytest.importorskip("mteb"), pytest.importorskip("openai")
    datasets, sts = pytest.importorskip("datasets"), pytest.importorskip("mteb.abstasks.sts")
    tasks, encoders = pytest.importorskip("mteb.abstasks.task_metadata"), pytest.importorskip("mteb.models.abs_encoder")
    unsaid = ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    class Pairs(sts.AbsTaskSTS):  # type: ignore[misc, name-defined]
        metadata = tasks.TaskMetadata(
            name="Pairs",
            dataset={"path": "own/pairs", "revision": "1"},
            description="Pairs of sentences.",
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            **dict.fromkeys((*unsaid, "sample_creation", "bibtex_citation")),
        )
        min_score, max_score = 0, 5

        def load_data(self, **_: object) -> None:
            first, second, score = zip(*PAIRS, strict=True)
            rows = datasets.Dataset.from_dict({"sentence1": [*first], "sentence2": [*second], "score": [*score]})
            self.dataset, self.data_loaded = datasets.DatasetDict({"test": rows}), True

    class Encoder(encoders.AbsEncoder):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.mteb_model_meta = mteb.models.ModelMeta.create_empty({"name": "own/served", "revision": "1"})

        def encode(self, inputs: list[dict[str, list[str]]], **_: object) -> object:
            numpy = pytest.importorskip("numpy")
            texts = [text for batch in inputs for text in batch["text"]]
            made = client.embeddings.create(model="encoder", input=texts).data
            return numpy.array([one.embedding for one in made], numpy.float32)

    result = mteb.evaluate(Encoder(), Pairs(), cache=None)
    assert result.task_results[0].get_score() > 0.5
