"""/v1/completions, /v1/embeddings and /v1/models through the real `openai` client."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from openai.types import Completion

PROMPT = "import os\n"


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(ai: openai.OpenAI, prompt: object = PROMPT, **options: object) -> Completion:
    wanted = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8, **options}
    return ai.completions.create(**wanted)  # type: ignore[call-overload, no-any-return]


def stream(ai: openai.OpenAI, prompt: object = PROMPT, **options: object) -> list[Completion]:
    return list(complete(ai, prompt, stream=True, **options))  # type: ignore[arg-type]


def tokenize(server: str, text: str) -> list[int]:
    body = {"content": text, "model": "demo", "add_special": True}
    return list(httpx.post(f"{server}/tokenize", json=body).json()["tokens"])


def test_a_text_is_continued(ai: openai.OpenAI) -> None:
    reply = complete(ai)
    assert (reply.object, reply.model) == ("text_completion", "demo")
    assert reply.id.startswith("cmpl-")
    choice = reply.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8


def test_sixteen_tokens_are_the_default(ai: openai.OpenAI) -> None:
    reply = complete(ai, max_tokens=None)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_token_ids_are_a_prompt(ai: openai.OpenAI, server: str) -> None:
    assert complete(ai, tokenize(server, PROMPT)).choices[0].text == complete(ai).choices[0].text


def test_several_texts_are_continued_each(ai: openai.OpenAI) -> None:
    prompts = [PROMPT, "def read_file(", "import json\n"]
    reply = complete(ai, prompts)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.text for choice in reply.choices] == [complete(ai, prompt).choices[0].text for prompt in prompts]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 24


def test_several_lists_of_token_ids(ai: openai.OpenAI, server: str) -> None:
    prompts = [PROMPT, "def read_file("]
    reply = complete(ai, [tokenize(server, prompt) for prompt in prompts])
    assert [choice.text for choice in reply.choices] == [complete(ai, prompt).choices[0].text for prompt in prompts]


def test_several_answers_to_several_texts(ai: openai.OpenAI) -> None:
    reply = complete(ai, [PROMPT, "def read_file("], n=2, temperature=2, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    alone = complete(ai, "def read_file(", n=2, temperature=2, seed=5)
    assert [choice.text for choice in reply.choices[2:]] == [choice.text for choice in alone.choices]


def test_a_stream_adds_up(ai: openai.OpenAI) -> None:
    chunks = stream(ai, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == complete(ai).choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_several_streams_in_one(ai: openai.OpenAI) -> None:
    prompts = [PROMPT, "def read_file(", "import json\n"]
    texts = ["", "", ""]
    for chunk in stream(ai, prompts, echo=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in complete(ai, prompts, echo=True).choices]


def test_echo_begins_with_the_prompt(ai: openai.OpenAI, server: str) -> None:
    answer = complete(ai).choices[0].text
    assert complete(ai, echo=True).choices[0].text == PROMPT + answer
    assert complete(ai, tokenize(server, PROMPT), echo=True).choices[0].text == PROMPT + answer
    assert "".join(chunk.choices[0].text for chunk in stream(ai, echo=True)) == PROMPT + answer


def test_the_best_of_several_is_given(ai: openai.OpenAI) -> None:
    options = {"temperature": 3, "seed": 11, "max_tokens": 6, "logprobs": 0}
    best = complete(ai, best_of=8, n=2, **options)
    all_of_them = complete(ai, n=8, **options)
    assert [mean(best, index) for index in range(2)] == sorted((mean(all_of_them, i) for i in range(8)), reverse=True)[
        :2
    ]


def mean(reply: Completion, index: int) -> float:
    logprobs = reply.choices[index].logprobs
    assert logprobs is not None
    return float(np.mean(logprobs.token_logprobs or []))


def test_logprobs_in_four_lists(ai: openai.OpenAI) -> None:
    choice = complete(ai, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert "".join(tokens) == choice.text
    assert len(tokens) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 8
    assert [choice.text[offset : offset + len(token)] for token, offset in zip(tokens, offsets, strict=True)] == tokens
    for token, own, top in zip(tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
        assert len(top) == 2
        assert top[token] == own


def test_logprobs_in_a_stream_are_the_same(ai: openai.OpenAI) -> None:
    whole = complete(ai, logprobs=1).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in stream(ai, logprobs=1)]
    assert whole is not None
    assert [offset for part in parts if part for offset in part.text_offset or []] == whole.text_offset
    assert [value for part in parts if part for value in part.token_logprobs or []] == whole.token_logprobs


def test_a_stop_string(ai: openai.OpenAI) -> None:
    whole = complete(ai).choices[0].text
    choice = complete(ai, stop=[whole[5:9]]).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(whole[5:9])], "stop")


def test_text_can_be_made_to_fit(ai: openai.OpenAI) -> None:
    wanted = {"type": "regex", "regex": "[0-9]{4}"}
    text = complete(ai, extra_body={"response_format": wanted}, temperature=1, seed=1).choices[0].text
    assert len(text) == 4
    assert text.isdigit()


def test_an_end_token_can_be_ignored(ai: openai.OpenAI) -> None:
    reply = complete(ai, "", max_tokens=200, extra_body={"ignore_eos": True})
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 200
    assert reply.choices[0].finish_reason == "length"


def test_a_suffix_needs_a_model_that_can(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="infill tokens") as refused:
        complete(ai, suffix="return x")
    assert refused.value.param == "suffix"


def test_vectors_have_length_one(ai: openai.OpenAI) -> None:
    reply = ai.embeddings.create(model="demo", input="os.path.join", encoding_format="float")
    assert (reply.object, reply.model, reply.data[0].object, reply.data[0].index) == ("list", "demo", "embedding", 0)
    assert math.isclose(float(np.linalg.norm(reply.data[0].embedding)), 1.0, rel_tol=1e-5)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


def test_the_client_reads_base64_by_itself(ai: openai.OpenAI, server: str) -> None:
    plain = ai.embeddings.create(model="demo", input="hello", encoding_format="float").data[0].embedding
    assert np.array_equal(
        np.float32(ai.embeddings.create(model="demo", input="hello").data[0].embedding), np.float32(plain)
    )
    body = {"model": "demo", "input": "hello", "encoding_format": "base64"}
    raw = httpx.post(f"{server}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), np.float32(plain))


def test_vectors_of_several_texts_are_those_of_each(ai: openai.OpenAI, server: str) -> None:
    texts = ["hello", "import os", "What does json.dumps do?"]
    together = ai.embeddings.create(model="demo", input=texts)
    alone = [ai.embeddings.create(model="demo", input=text).data[0].embedding for text in texts]
    assert [item.index for item in together.data] == [0, 1, 2]
    assert [item.embedding for item in together.data] == alone
    ids = [tokenize(server, text) for text in texts]
    assert [item.embedding for item in ai.embeddings.create(model="demo", input=ids).data] == alone


def test_vectors_can_be_cut(ai: openai.OpenAI) -> None:
    whole = np.array(ai.embeddings.create(model="demo", input="hello").data[0].embedding)
    cut = ai.embeddings.create(model="demo", input="hello", dimensions=8).data[0].embedding
    assert len(cut) == 8
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    with pytest.raises(openai.BadRequestError) as refused:
        ai.embeddings.create(model="demo", input="hello", dimensions=100_000)
    assert refused.value.param == "dimensions"


def test_both_ways_of_pooling(ai: openai.OpenAI) -> None:
    mean_of, last = (
        ai.embeddings.create(model="demo", input="import os", extra_body={"pooling": pooling}).data[0].embedding
        for pooling in ("mean", "last")
    )
    assert mean_of == ai.embeddings.create(model="demo", input="import os").data[0].embedding
    assert last != mean_of


def test_models_are_listed(ai: openai.OpenAI) -> None:
    models = ai.models.list()
    assert {"demo", "demo-draft"} <= {model.id for model in models}
    assert {model.object for model in models} == {"model"}


def test_one_model_by_name(ai: openai.OpenAI) -> None:
    assert ai.models.retrieve("demo").id == "demo"
    for name in ("no-such-model", "a/b:c", "../../etc/passwd", "x" * 500):
        with pytest.raises(openai.APIStatusError) as refused:
            ai.models.retrieve(name)
        assert refused.value.status_code in (400, 404), name
