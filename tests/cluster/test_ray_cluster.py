"""A cluster of two engines on this machine, asked over HTTP, answers as one server does, whatever happens to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from running_server import RunningServer, start_server

from cluster_process import ClusterProcess, wait_until

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="replicas are found and killed by way of /proc"),
    pytest.mark.xdist_group("ray"),
]
KEY = "a-key-of-the-tests"
SETTINGS = {"threads": 1, "arena_bytes": "64M", "api_keys": [KEY], "drain_s": 5}
LONG = {"max_tokens": 600, "ignore_eos": True}


@dataclass
class Cluster:
    """A cluster, and an ordinary server to compare with."""

    process: ClusterProcess
    alone: RunningServer

    @property
    def url(self) -> str:
        return self.process.url

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def count(self, sample: str) -> list[float]:
        return self.process.count(sample)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    alone = start_server(folder, **SETTINGS)
    flags = ("--threads", "1", "--arena-bytes", "64M", "--drain-s", "5")
    try:
        with ClusterProcess(folder, "demo", 2, flags, {"MLXR_API_KEYS": KEY}, KEY) as process:
            yield Cluster(process, alone)
    finally:
        alone.stop()


def strip(body: bytes) -> object:
    """Return replies without the parts that always differ: ids, times and speeds."""
    text = re.sub(rb"data: |event: .*|\[DONE\]", b"", body).decode()
    values = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [drop(value) for value in values]


def drop(value: object) -> object:
    volatile = re.compile("id|item_id|created.*|timings|.*duration|.*cache.*|request_id|completed_at")
    if isinstance(value, dict):
        return {name: drop(part) for name, part in value.items() if not volatile.fullmatch(name)}
    return [drop(part) for part in value] if isinstance(value, list) else value


CHAT = {"messages": [{"role": "user", "content": "How do I open a file?"}]}
ASKED = {
    "chat": ("/v1/chat/completions", {**CHAT, "max_tokens": 20}),
    "stream": ("/v1/chat/completions", {**CHAT, "max_tokens": 20, "stream": True}),
    "seeded": ("/v1/chat/completions", {**CHAT, "max_tokens": 20, "temperature": 1.2, "seed": 7, "n": 2}),
    "completion": ("/v1/completions", {"prompt": "import os", "max_tokens": 12, "temperature": 0, "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "model": "demo", "max_tokens": 12, "stream": True}),
    "ollama": ("/api/chat", {**CHAT, "model": "demo", "options": {"num_predict": 12, "temperature": 0}}),
    "embedding": ("/v1/embeddings", {"model": "demo", "input": "a text"}),
    "unknown model": ("/api/chat", {**CHAT, "model": "no-such-model:7b"}),
    "wrong field": ("/v1/chat/completions", {"messages": []}),
    "count": ("/v1/messages/count_tokens", {**CHAT, "model": "demo"}),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_replies_are_those_of_one_server(cluster: Cluster, asked: tuple[str, dict[str, object]]) -> None:
    path, body = asked
    with cluster.client() as client, cluster.alone.client(KEY) as other:
        reply, expected = client.post(path, json=body), other.post(path, json=body)
    assert reply.status_code == expected.status_code
    assert reply.headers["content-type"] == expected.headers["content-type"]
    assert strip(reply.content) == strip(expected.content)


def test_keys_and_refusals(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as stranger:
        for path in ("/v1/models", "/metrics"):
            assert stranger.get(path).status_code == 401
        assert stranger.post("/v1/chat/completions", json=CHAT).status_code == 401
        assert stranger.get("/health").json() == {"status": "ok", "replicas": 2}
    with cluster.client() as client:
        refused = client.post("/api/pull", json={"model": "a/b"})
        assert (refused.status_code, "cluster" in refused.json()["error"]) == (501, True)


def test_conversations_stay_where_their_pages_are(cluster: Cluster) -> None:
    """They take turns, so that no replica gets far ahead in work: for that, a conversation may move with its pages."""
    text = "Tell me about the module os and what it has. " * 60
    conversations = [[{"role": "user", "content": f"Conversation {number}. {text}"}] for number in range(4)]
    known = [0] * len(conversations)
    stayed = r'mlxr_cluster_requests_total\{reason="longest_prefix"'
    before = 0.0
    with cluster.client() as client:
        for turn in range(3):
            for number, messages in enumerate(conversations):
                reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 16}).json()
                usage, answer = reply["usage"], reply["choices"][0]["message"]["content"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= known[number] // 16 * 16 - 16
                known[number] = usage["prompt_tokens"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "More?"}]
            if not turn:
                before = sum(cluster.count(stayed))
    assert len(cluster.count(r"mlxr_prompt_tokens_total\{replica=")) == 2
    assert sum(cluster.count(stayed)) - before == 8, cluster.process.read("/metrics").split("mlxr_cluster_requests")[1:]


def test_a_request_that_goes_elsewhere_takes_its_pages_along(cluster: Cluster) -> None:
    fetched = r"mlxr_fetched_pages_total\{replica="
    before = sum(cluster.count(fetched))

    def complete(client: httpx.Client, prompt: str, tokens: int) -> str:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        reply = client.post("/v1/completions", json=asked)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with cluster.client() as client, cluster.alone.client(KEY) as other, ThreadPoolExecutor(2) as threads:
        prompts = [
            f"# Part {number}\n" + "def read(path):\n    return open(path).read()\n" * 25 for number in range(12)
        ]
        for prompt in prompts:
            complete(client, prompt, 1)
        for prompt in prompts:  # the pages of all but the last have been reported by now
            routed = sum(cluster.count(r"mlxr_cluster_requests_total\{"))
            long = [threads.submit(complete, client, prompt + f"x = {turn}\n" * 100, 1) for turn in range(2)]
            wait_until(lambda routed=routed: sum(cluster.count(r"mlxr_cluster_requests_total\{")) >= routed + 2)
            assert complete(client, prompt + "def ", 8) == complete(other, prompt + "def ", 8)
            assert all(isinstance(one.result(), str) for one in long)
            if sum(cluster.count(fetched)) > before:
                break
    assert sum(cluster.count(fetched)) > before
    assert sum(cluster.count(r"mlxr_lent_pages_total\{replica=")) > 0
    assert sum(cluster.count(r'mlxr_cluster_requests_total\{reason="fetched"')) > 0


def test_replies_that_are_kept_are_found(cluster: Cluster) -> None:
    with cluster.client() as client:
        for _ in range(3):
            first = client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 8}).json()
            again = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 8}
            assert client.post("/v1/responses", json=again).status_code == 200
            assert client.get(f"/v1/responses/{first['id']}").status_code == 200
        assert client.get("/v1/responses/resp_none").status_code == 404


def test_who_leaves_frees_the_pages(cluster: Cluster) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 400, "ignore_eos": True, "n": 8}
    used, made = r'mlxr_pages\{.*state="used"', r"mlxr_generated_tokens_total\{"
    before = sum(cluster.count(made))
    with cluster.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            next(reply.iter_bytes())
        wait_until(lambda: cluster.count(used) == [0.0, 0.0])
    assert sum(cluster.count(made)) - before < 8 * 400


def ask_stream(cluster: Cluster, number: int, got: list[bytes] | None = None) -> bytes:
    sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    body = {"prompt": f"{number} import os\n", "stream": True, **sampling, **LONG}
    pieces = [] if got is None else got
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for piece in reply.iter_bytes():
            pieces.append(piece)
    return b"".join(pieces)


def text_of(body: bytes) -> str:
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    assert body.rstrip().endswith(b"data: [DONE]"), body[-300:]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("killed", [1, 2])
def test_an_answer_goes_on_when_its_replica_is_killed(cluster: Cluster, killed: int) -> None:
    """Even if no replica is left, once a new one has come."""
    expected = [text_of(ask_stream(cluster, number)) for number in range(4)]
    continued = sum(cluster.count(r'mlxr_cluster_requests_total\{reason="continued"'))
    pieces: list[list[bytes]] = [[] for _ in expected]
    with ThreadPoolExecutor(len(expected)) as threads:
        asked = [threads.submit(ask_stream, cluster, number, got) for number, got in enumerate(pieces)]
        wait_until(lambda: any(len(got) > 2 for got in pieces))
        for process_id in cluster.process.find_replicas()[:killed]:
            os.kill(process_id, signal.SIGKILL)
        assert [text_of(one.result()) for one in asked] == expected
    if killed == 2:  # otherwise all may have been in the replica that was not killed
        assert sum(cluster.count(r'mlxr_cluster_requests_total\{reason="continued"')) > continued
    cluster.process.wait_for_replicas(2)


def update(cluster: Cluster, *flags: str) -> None:
    """Run `mlxr cluster update` for this cluster, of several that may run on the machine."""
    words = [
        "cluster",
        "update",
        "demo",
        "--replicas",
        "2",
        "--threads",
        "1",
        "--ray-address",
        cluster.process.ray_address,
    ]
    own = {"MLXR_API_KEYS": KEY, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "mlxr", *words, *flags]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_update_loses_no_request(cluster: Cluster) -> None:
    """Replicas are replaced one after the other while requests go on, the second time without waiting for answers."""
    expected = {number: text_of(ask_stream(cluster, number)) for number in range(4)}
    ended, failures = threading.Event(), []

    def ask_on(number: int) -> None:
        while not ended.is_set():
            try:
                assert text_of(ask_stream(cluster, number)) == expected[number]
            except Exception as error:
                failures.append(error)

    with ThreadPoolExecutor(len(expected)) as threads:
        asking = [threads.submit(ask_on, number) for number in expected]
        try:
            for flags in (("--arena-bytes", "65M", "--drain-s", "0"), ("--arena-bytes", "66M", "--drain-s", "5")):
                before = set(cluster.process.find_replicas())
                update(cluster, *flags)
                wait_until(lambda: not before & set(cluster.process.find_replicas()), "an old replica stays")  # noqa: B023
        finally:
            ended.set()
        for one in asking:
            one.result()
    assert failures == []
