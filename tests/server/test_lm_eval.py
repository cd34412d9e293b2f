"""The requests that lm-evaluation-harness sends, and its reading of the replies.

Its models `local-completions` and `local-chat-completions` (0.4.13) are not installed here: the bodies are theirs,
and `read_logprobs` reads a reply as theirs does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import httpx
import pytest

CONTEXTS = ["import os\n", "def read_file(path):\n    return", "What does os.path.join do?", "x = [1, 2"]
ENDINGS = [" open(path).read()", " None", "🦊"]
Scored = tuple[float, bool]


@pytest.fixture(scope="module")
def api(server: str) -> Iterator[httpx.Client]:
    """A client as lm-eval is one: without a key it sends an empty one."""
    with httpx.Client(base_url=server, headers={"Authorization": "Bearer"}, timeout=60) as client:
        yield client


def encode(api: httpx.Client, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text, as the evaluator's remote tokenizer asks the server for them."""
    reply = api.post("/tokenize", json={"prompt": text, "add_special_tokens": add_special_tokens}).json()
    return list(reply["tokens"])


def score(api: httpx.Client, prompt: object, **changed: object) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    return api.post("/v1/completions", json={**body, "echo": True, **changed})


def read_logprobs(reply: dict[str, list[dict[str, dict[str, list[object]]]]], contexts: list[int]) -> list[Scored]:
    """Return for each prompt the log-probability of its continuation, and True if that is the greedy one."""
    results = []
    for choice, skipped in zip(sorted(reply["choices"], key=lambda one: one["index"]), contexts, strict=True):  # type: ignore[arg-type, return-value]
        own = choice["logprobs"]["token_logprobs"][skipped:-1]
        top = choice["logprobs"]["top_logprobs"][skipped:-1]
        is_greedy = all(value == max(best.values()) for value, best in zip(own, top, strict=True))  # type: ignore[attr-defined]
        results.append((sum(own), is_greedy))  # type: ignore[arg-type]
    return results


def test_the_tokenizer_is_found(api: httpx.Client) -> None:
    info = api.get("/tokenizer_info").json()
    assert info["eos_token"]
    assert len(encode(api, info["eos_token"])) == 1
    assert "messages" in info["chat_template"]
    tokens = encode(api, CONTEXTS[1])
    assert api.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == CONTEXTS[1]


def test_loglikelihoods_of_a_batch(api: httpx.Client) -> None:
    """Each prompt's result equals its result alone, to the bit."""
    pairs = [(encode(api, context), encode(api, ending)) for context, ending in product(CONTEXTS, ENDINGS)]
    prompts, contexts = [context + ending for context, ending in pairs], [len(context) for context, _ in pairs]
    together = read_logprobs(score(api, prompts).json(), contexts)
    for prompt, length, result in zip(prompts[::5], contexts[::5], together[::5], strict=True):
        for one in (prompt, [prompt]):
            assert read_logprobs(score(api, one).json(), [length]) == [result]
    assert all(math.isfinite(logprob) and logprob < 0 for logprob, _ in together)


def test_what_greedy_gave_is_greedy(api: httpx.Client) -> None:
    """An answer has the same log-probabilities when it comes again as part of a prompt."""
    context = encode(api, CONTEXTS[1])
    answer = score(api, context, max_tokens=9, echo=False).json()["choices"][0]
    ending = encode(api, answer["text"])
    if len(ending) != len(answer["logprobs"]["tokens"]):
        pytest.fail("the answer reads as other tokens; choose another prompt")
    reply = score(api, [context + ending, context + encode(api, "🦊")]).json()
    again = reply["choices"][0]["logprobs"]["token_logprobs"][len(context) : -1]
    assert again == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-6)
    assert [greedy for _, greedy in read_logprobs(reply, [len(context)] * 2)] == [True, False]


def test_texts_instead_of_tokens(api: httpx.Client) -> None:
    texts = [context + ENDINGS[0] for context in CONTEXTS]
    tokens = [encode(api, text, add_special_tokens=True) for text in texts]
    by_text, by_tokens = score(api, texts).json(), score(api, tokens).json()
    for one, other, text in zip(by_text["choices"], by_tokens["choices"], texts, strict=True):
        assert one["logprobs"] == other["logprobs"]
        assert one["text"] == other["text"]
        assert one["text"].startswith(text)
        assert one["logprobs"]["token_logprobs"][0] is None
        assert one["logprobs"]["text_offset"][0] == 0


def test_prompts_alone(api: httpx.Client) -> None:
    """`max_tokens` 0: the prompt and nothing else, also as a stream."""
    tokens = encode(api, CONTEXTS[1])
    reply = score(api, tokens, max_tokens=0).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (CONTEXTS[1], "length")
    assert reply["usage"]["completion_tokens"] == 0
    assert (
        choice["logprobs"]["token_logprobs"]
        == (score(api, tokens).json()["choices"][0]["logprobs"]["token_logprobs"][:-1])
    )
    chunks = score(api, tokens, max_tokens=0, stream=True).text
    assert CONTEXTS[1].splitlines()[0] in chunks
    assert chunks.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_generations(api: httpx.Client, path: str) -> None:
    wanted = {"model": "demo", "max_tokens": 8, "temperature": 0, "stop": ["\n\n", "<|im_end|>"], "seed": 1234}
    if path == "completions":
        body: dict[str, object] = {"prompt": [encode(api, context) for context in CONTEXTS[:2]], **wanted}
    else:
        body = {"messages": [{"role": "user", "content": CONTEXTS[2], "type": "text"}], **wanted}
    choices = api.post(f"/v1/{path}", json=body).json()["choices"]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    assert len(texts) == (2 if path == "completions" else 1)
    assert all(texts)


def test_the_infill_prompt_is_not_scored(api: httpx.Client) -> None:
    error = score(api, "x", suffix="y").json()["error"]
    assert error["param"] == "logprobs"
