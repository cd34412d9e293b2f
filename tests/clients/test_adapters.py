"""Adapters by the clients of each dialect: chosen by the name of the model, listed, loaded, made into a model."""

from __future__ import annotations

from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import pytest
from questions import MESSAGES
from served import Served

MODELS = ("{}", "{}:one", "one")  # the last two are the same


@pytest.fixture(autouse=True)
def _has_adapters(served: Served) -> None:
    if not served.adapters:
        pytest.skip("the adapters are for the demo")


def check_answers(said: list[str]) -> None:
    plain, of_base, alone = said
    assert plain != of_base == alone


@pytest.fixture
def openai_api(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0)


def test_openai_chat(openai_api: openai.OpenAI, served: Served) -> None:
    common = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    replies = [openai_api.chat.completions.create(model=model.format(served.model), **common) for model in MODELS]
    check_answers([reply.choices[0].message.content or "" for reply in replies])
    stream = openai_api.chat.completions.create(model="one", stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == replies[1].choices[0].message.content


def test_openai_completions_responses_and_vectors(openai_api: openai.OpenAI, served: Served) -> None:
    names = [model.format(served.model) for model in MODELS]
    texts = [openai_api.completions.create(model=name, prompt="import os", temperature=0) for name in names]
    check_answers([reply.choices[0].text for reply in texts])
    asked = {"input": "What is a list?", "temperature": 0, "max_output_tokens": 20}
    check_answers([openai_api.responses.create(model=name, **asked).output_text for name in names])
    vectors = [openai_api.embeddings.create(model=name, input="a").data[0].embedding for name in names]
    check_answers([str(vector) for vector in vectors])


def test_openai_lists_them(openai_api: openai.OpenAI, served: Served) -> None:
    listed = {model.id: model for model in openai_api.models.list()}
    assert listed["one"].parent == served.model  # type: ignore[attr-defined]
    assert openai_api.models.retrieve("one").root == "one"  # type: ignore[attr-defined]


def test_openai_refuses_one_that_is_not_there(openai_api: openai.OpenAI, served: Served) -> None:
    wrong = f"{served.model}:nothing"
    reply = openai_api.completions.with_raw_response.create(model=wrong, prompt="a", max_tokens=1)
    assert reply.headers["x-mlxr-ignored"] == "model"  # the only model answers instead, and says so


def test_anthropic_messages(served: Served) -> None:
    api = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    said = []
    for model in MODELS:
        name = model.format(served.model)
        common = {"model": name, "messages": MESSAGES, "max_tokens": 20, "extra_body": {"temperature": 0}}
        said.append(api.messages.create(**common).content[0].text)
        with api.messages.stream(**common) as stream:
            assert stream.get_final_text() == said[-1]
    check_answers(said)


def test_ollama_chat_and_generate(served: Served) -> None:
    api, options = ollama.Client(served.url), {"temperature": 0, "num_predict": 20}
    names = [model.format(served.model) for model in MODELS]
    check_answers([api.chat(name, messages=MESSAGES, options=options).message.content or "" for name in names])
    check_answers([api.generate(name, prompt="import os", options=options).response for name in names])
    check_answers([str(api.embed(name, input="a").embeddings) for name in names])


def test_ollama_makes_a_model_with_one(served: Served, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--cluster"):
        pytest.skip("a cluster refuses to change models")
    api, options = ollama.Client(served.url), {"temperature": 0, "num_predict": 20}
    folder = Path(served.adapters) / "folder"
    digests = {path.name: api.create_blob(path) for path in sorted(folder.iterdir())}
    api.create("tuned", from_=served.model, adapters=digests, system="You are brief.", stream=False)
    assert "ADAPTER" in (api.show("tuned").modelfile or "")
    load = {"lora_name": "again", "lora_path": "folder"}
    assert httpx.post(f"{served.v1}/load_lora_adapter", json=load, timeout=60).status_code == 200
    names = (served.model, "tuned", "again")
    check_answers([api.generate(name, prompt="import os", raw=True, options=options).response for name in names])
    api.delete("tuned")
    assert httpx.post(f"{served.v1}/unload_lora_adapter", json=load, timeout=60).status_code == 200
    with pytest.raises(ollama.ResponseError):
        api.generate("again", prompt="a")
