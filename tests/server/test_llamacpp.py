"""The routes of llama.cpp's server: completions in its own shape, properties, slots, vectors, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import httpx
import pytest
from running_server import MakeServer, RunningServer, post_and_leave

from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.server.llamacpp.completion import find_shares

PROMPT = "def add(a, b):"


def complete(client: httpx.Client, **fields: object) -> dict:
    response = client.post("/completion", json={"prompt": PROMPT, "n_predict": 5, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, **fields: object) -> Iterator[dict]:
    body = {"prompt": PROMPT, "n_predict": 5, "temperature": 0, "stream": True, **fields}
    lines = client.post("/completion", json=body).text.splitlines()
    return (json.loads(line.removeprefix("data: ")) for line in lines if line)


def test_a_completion_tells_all_of_itself(client: httpx.Client) -> None:
    reply = complete(client, return_tokens=True, cache_prompt=False)
    assert reply["stop"] is True
    assert (reply["stop_type"], reply["stopping_word"], reply["truncated"]) == ("limit", "", False)
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"] == len(reply["tokens"]) == 5
    assert reply["tokens_evaluated"] == reply["timings"]["prompt_n"]
    assert reply["prompt"].endswith(PROMPT)
    assert reply["prompt"] != PROMPT  # what begins a text is spelt out
    assert reply["generation_settings"]["n_predict"] == 5
    assert reply["has_new_line"] is ("\n" in reply["content"])
    same = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 5, "temperature": 0}).json()
    assert reply["content"] == same["choices"][0]["text"]


@pytest.mark.parametrize("field", ["draft_tokens", "speculative.n_max"])
def test_a_request_may_do_without_drafts(client: httpx.Client, field: str) -> None:
    """The answer is the same; a number below 0 is refused by name."""
    text = {"prompt": PROMPT * 8, "n_predict": 40}
    with_drafts, without = complete(client, **text), complete(client, **text, **{field: 0})
    assert with_drafts["content"] == without["content"]
    assert without["timings"]["draft_n"] == 0
    refused = client.post("/completion", json={**text, field: -1})
    assert refused.status_code == 400
    assert field in refused.text


def test_a_stream_is_the_same_in_pieces(client: httpx.Client) -> None:
    *chunks, last = stream(client, timings_per_token=True)
    whole = complete(client, return_tokens=True)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert not any(chunk["stop"] for chunk in chunks)
    assert last["stop"] is True
    assert last["content"] == ""
    assert last["timings"]["predicted_n"] == 5
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/completion", {"prompt": "x = 1\n" * 300}),
        ("/v1/completions", {"prompt": "y = 1\n" * 300}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "z = 1\n" * 300}]}),
        ("/responses", {"input": "a = 1\n" * 300}),
    ],
)
def test_streams_tell_how_much_of_the_prompt_was_read_and_the_time_of_each_token(
    client: httpx.Client, path: str, prompt: dict[str, object]
) -> None:
    limit = {"max_output_tokens" if path == "/responses" else "max_tokens": 5}
    body = {**prompt, **limit, "stream": True, "return_progress": True, "timings_per_token": True}
    response = client.post(path, json=body)
    assert "x-mlxr-ignored" not in response.headers
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    reads = [one["processed"] for one in told]
    assert reads[0] == told[0]["cache"]
    assert reads == sorted(set(reads))
    assert len(reads) > 2
    assert {(one["total"], one["cache"]) for one in told} == {(reads[-1], reads[0])}
    assert [one["time_ms"] for one in told] == sorted(one["time_ms"] for one in told)
    assert path != "/chat/completions" or "timings" not in chunks[0]  # this only says whose turn it is
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len(set(counts)) > 2
    assert chunks[-1]["timings"]["prompt_n"] == reads[-1] - reads[0]
    assert not any("prompt_progress" in line for line in client.post(path, json={**prompt, **limit}).text.splitlines())


ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


def test_samplers_that_are_left_out_are_off(client: httpx.Client) -> None:
    fields = {"temperature": 0.7, "repeat_penalty": 1.3, "seed": 1}
    plain = complete(client, **fields)
    assert plain["generation_settings"]["samplers"] == ORDER
    for same in (ORDER, "edskypmxt", ["penalties", "top-k", "nucleus", "minP", "temp"]):
        assert complete(client, **fields, samplers=same)["content"] == plain["content"]
    settings = complete(client, **fields, samplers=["top_k", "top_p"])["generation_settings"]
    told = [settings[name] for name in ("repeat_penalty", "top_k", "top_p", "min_p", "temperature", "samplers")]
    assert told == [1.0, 40, 0.95, 0.0, 1.0, ["top_k", "top_p"]]
    first = complete(client, **fields, samplers=["temperature", "top_p"])["generation_settings"]
    assert (first["temperature_last"], plain["generation_settings"]["temperature_last"]) == (False, True)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/completion", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
@pytest.mark.parametrize("samplers", [["top_p", "top_k"], "pk", ["top_k", "top_k"], ["top_p", "temperature", "min_p"]])
def test_another_order_of_samplers_is_refused(
    client: httpx.Client, path: str, prompt: dict[str, object], samplers: object
) -> None:
    refused = client.post(path, json={**prompt, "samplers": samplers})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("samplers: must be in the order penalties, dry,")


def test_samplers_hold_in_chats_too_and_unknown_ones_are_named(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 2, "top_k": 1, "seed": 3}
    greedy = client.post("/v1/chat/completions", json={**body, "samplers": ["top_k", "infill", "temperature"]})
    assert greedy.headers["x-mlxr-ignored"] == "samplers.infill"
    best = client.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
    assert greedy.json()["choices"] == best["choices"]
    free = client.post("/v1/chat/completions", json={**body, "samplers": ["temperature"]}).json()
    assert free["choices"] != best["choices"]


def test_defaults_are_those_of_llamacpp(client: httpx.Client) -> None:
    settings = client.get("/props").json()["default_generation_settings"]["params"]
    told = (settings["temperature"], settings["top_k"], settings["top_p"], settings["min_p"], settings["n_predict"])
    assert told == (0.8, 40, 0.95, 0.05, -1)


def test_prompts_of_every_shape(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    alone = complete(client)["content"]
    replies = complete(client, prompt=[PROMPT, ids, {"prompt_string": PROMPT}, [ids[0], PROMPT]])
    assert [reply["content"] for reply in replies] == [alone] * 4
    assert [reply["index"] for reply in replies] == [0, 1, 2, 3]
    assert isinstance(complete(client, prompt=[PROMPT]), list)
    assert complete(client, prompt=[*ids, " return", ids[-1]])["tokens_evaluated"] > len(ids) + 1
    several = complete(client, n_cmpl=2, seed=3, temperature=1)
    assert len(several) == 2


def test_probabilities_before_the_choice_is_narrowed(client: httpx.Client) -> None:
    tokens = complete(client, n_probs=3)["completion_probabilities"]
    assert len(tokens) == 5
    for token in tokens:
        assert token["top_logprobs"][0]["id"] == token["id"]  # greedy
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0
        assert bytes(token["bytes"]).decode() == token["token"]
        assert len(token["top_logprobs"]) == 3
    chunks = [chunk for chunk in stream(client, n_probs=3) if not chunk["stop"]]
    assert [chunk["completion_probabilities"] for chunk in chunks] == [[token] for token in tokens]


def test_probabilities_as_they_were_drawn_from(client: httpx.Client) -> None:
    fields = {"n_probs": 40, "post_sampling_probs": True, "temperature": 1.0, "top_k": 4, "top_p": 1.0, "min_p": 0.0}
    for token in complete(client, seed=5, **fields)["completion_probabilities"]:
        shares = [one["prob"] for one in token["top_probs"]]
        assert sum(shares) == pytest.approx(1.0)
        assert len(shares) == 4
        assert token["prob"] in shares
    refused = client.post("/completion", json={"prompt": "x", **fields, "top_k": 0})
    assert refused.json()["error"]["field"] == "post_sampling_probs"


def test_shares_follow_the_definition() -> None:
    top = [TokenLogprob(index, math.log(share)) for index, share in enumerate((0.4, 0.3, 0.2, 0.06, 0.04))]

    def shares(**params: float) -> list[float]:
        return find_shares(top, SamplingParams(**{"temperature": 1.0, "top_k": 5, **params}))  # type: ignore[arg-type]

    assert shares() == pytest.approx([0.4, 0.3, 0.2, 0.06, 0.04])
    assert shares(top_k=2) == pytest.approx([4 / 7, 3 / 7])
    assert shares(top_p=0.65) == pytest.approx([4 / 7, 3 / 7])
    assert shares(min_p=0.5) == pytest.approx([4 / 9, 3 / 9, 2 / 9])
    assert shares(temperature=0.5)[0] == pytest.approx(0.16 / (0.16 + 0.09 + 0.04 + 0.0036 + 0.0016))
    assert shares(temperature=0.0) == [1.0]


def test_fields_of_a_reply_can_be_picked(client: httpx.Client) -> None:
    picked = complete(client, response_fields=["content", "generation_settings/n_predict", "no/such"])
    assert picked.keys() == {"content", "generation_settings/n_predict"}


@pytest.mark.parametrize("fields", [{"grammar": 'root ::= "a"{5,5}'}, {"json_schema": {"const": "aaaaa"}}])
def test_answers_follow_grammars(fields: dict, client: httpx.Client) -> None:
    reply = complete(client, n_predict=20, **fields)
    assert reply["content"].strip('"') == "aaaaa"
    assert reply["stop_type"] == "eos"


def test_no_tokens_only_fill_the_cache(client: httpx.Client) -> None:
    prompt = "a text of its own that nothing else here reads " * 20
    first = complete(client, prompt=prompt, n_predict=0)
    assert (first["content"], first["tokens_predicted"]) == ("", 0)
    assert complete(client, prompt=prompt)["timings"]["cache_n"] >= 64


def test_stops_and_biases(client: httpx.Client) -> None:
    plain = complete(client, n_predict=20)["content"]
    cut = complete(client, n_predict=20, stop=["\n"])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", "\n")
    assert cut["content"] == plain.partition("\n")[0]
    first = complete(client, return_tokens=True)["tokens"][0]
    text = client.post("/detokenize", json={"tokens": [first]}).json()["content"]
    for bias in ([[first, False]], {str(first): -100}, [[text, -100]], {text: False}):
        assert complete(client, logit_bias=bias, return_tokens=True)["tokens"][0] != first


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": {"prompt_string": "x <__media__>", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data[0]"),
        ({"prompt": {"content": [{"type": "image_url"}]}}, "prompt.content"),
        ({"lora": [{"id": -1, "scale": 1.0}]}, "lora[0].id"),
        ({"logit_bias": [[10**8, 1.0]]}, "logit_bias[0]"),
        ({"logit_bias": [["x"]]}, "logit_bias[0]"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict, field: str, client: httpx.Client) -> None:
    response = client.post("/completion", json={"prompt": PROMPT, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"], error["field"]) == (400, "invalid_request_error", field)


def test_a_prompt_that_is_too_long_is_counted(client: httpx.Client) -> None:
    error = client.post("/completion", json={"prompt": "x " * 5000}).json()["error"]
    assert (error["type"], error["n_ctx"], error["field"]) == ("exceed_context_size_error", 2048, "prompt")
    assert error["n_prompt_tokens"] > 5000
    assert "exceeds the available context size" in error["message"]


def test_hints_do_not_change_the_answer(client: httpx.Client) -> None:
    hints = {"id_slot": 3, "lora": [{"id": 0, "scale": 0.0}], "n_keep": 7, "user": "me"}
    assert complete(client, **hints)["content"] == complete(client)["content"]


@pytest.mark.parametrize("path", ["/slots/0", "/props"])
def test_what_does_not_exist_is_refused_by_name(path: str, client: httpx.Client) -> None:
    response = client.post(path, json={})
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"


def test_infill_needs_a_model_for_it(client: httpx.Client) -> None:
    response = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 501
    assert "infill tokens" in response.json()["error"]["message"]


def test_properties_and_models(client: httpx.Client) -> None:
    properties = client.get("/props").json()
    assert properties["model_path"].endswith("demo.gguf")
    assert properties["total_slots"] == 64
    assert properties["default_generation_settings"]["n_ctx"] == 2048
    assert "im_start" in properties["chat_template"]
    listed = client.get("/models").json()["data"]
    assert "demo" in [model["id"] for model in listed]
    assert client.get("/lora-adapters").json() == []


def test_slots_tell_what_grows(make_server: MakeServer) -> None:
    running = make_server(max_sequences=2)
    with running.client() as client:
        seen: list[list[dict]] = []

        def look(row: object) -> bool:
            if not row.generated_tokens:  # type: ignore[attr-defined]
                return False
            seen.append(client.get("/slots").json())
            assert client.get("/slots?fail_on_no_slot=1").status_code == 200
            return True

        post_and_leave(running, "/completion", {"prompt": PROMPT, "n_predict": 1500, "ignore_eos": True}, look)
        assert [slot["is_processing"] for slot in seen[0]] == [True, False]
        assert seen[0][0]["n_decoded"] > 0
        assert not any(slot["is_processing"] for slot in client.get("/slots").json())


def test_vectors_in_every_norm(client: httpx.Client) -> None:
    def vectors(**fields: object) -> list[list[float]]:
        return [one["embedding"][0] for one in client.post("/embedding", json=fields).json()]

    (plain,) = vectors(content="hello world")
    assert math.fsum(number * number for number in plain) == pytest.approx(1, abs=1e-5)
    (taxicab,) = vectors(content="hello world", embd_normalize=1)
    assert math.fsum(map(abs, taxicab)) == pytest.approx(1, abs=1e-5)
    (largest,) = vectors(content="hello world", embd_normalize=0)
    assert max(map(abs, largest)) == pytest.approx(32760, rel=1e-5)
    (raw,) = vectors(content="hello world", embd_normalize=-1)
    assert raw[0] / math.sqrt(math.fsum(number * number for number in raw)) == pytest.approx(plain[0], abs=1e-6)
    assert vectors(input=["hello world", "other"])[0] == plain
    assert client.post("/embedding", json={}).json()["error"]["field"] == "content"


def test_streams_without_the_prefix_are_llamacpps(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    for path, opening in (("/chat/completions", None), ("/v1/chat/completions", "")):
        lines = client.post(path, json=body).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert chunks[0]["choices"][0]["delta"]["content"] == opening
        assert chunks[-1]["timings"]["predicted_n"] == 3  # also where no usage is asked for
        assert not any("timings" in chunk for chunk in chunks[:-1])


def test_vectors_of_mixed_inputs(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"content": "hello world", "add_special": True}).json()["tokens"]
    parts = {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
    inputs = ["hello world", ids, {"prompt_string": "hello world"}, parts, [ids[0], "hello world"]]
    vectors = [one["embedding"] for one in client.post("/v1/embeddings", json={"input": inputs}).json()["data"]]
    assert vectors == [vectors[0]] * len(inputs)


def test_openai_without_the_prefix(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    short, long = (client.post(path, json=body).json() for path in ("/chat/completions", "/v1/chat/completions"))
    assert short["choices"] == long["choices"]
    assert client.get("/models/demo").json()["id"] == "demo"
    assert client.post("/responses", json={"input": "hi", "max_output_tokens": 2}).status_code == 200


def test_a_key_is_asked_for_in_llamacpps_words(make_server: MakeServer) -> None:
    running: RunningServer = make_server(api_keys=("secret",))
    with running.client() as client:
        response = client.post("/completions", json={"prompt": "x"})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
