"""Two replicas with the demo model, and peers that lie: pages travel or are computed, and the answer is the same."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from mlxr.cluster.page_exchange import Lack
from mlxr.cluster.page_transfer import PAGES_PATH, PEER, TOKEN, Ask, LinkSpeed
from mlxr.cluster.replica import Replica, Reply, Report
from mlxr.core.settings import resolve

SECRET = "a-token-of-the-tests"
TIMEOUT_S = 1.0


@dataclass
class Member:
    """A replica, and the requests that a client of it makes."""

    replica: Replica
    reports: list[Report]

    @property
    def url(self) -> str:
        return self.replica.url

    def ask(self, prompt: str, peer: str | None = None, token: str = SECRET) -> tuple[str, int]:
        """Ask the replica; return the answer, and how many tokens of the prompt were cached."""
        headers = {} if peer is None else {PEER.decode(): peer, TOKEN.decode(): token}
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60).json()
        cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return reply["choices"][0]["text"], cached

    def count(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(name + r"[ {]", line))


@contextmanager
def run_replica(folder: Path, name: str, **settings: object) -> Iterator[Member]:
    reports: list[Report] = []

    async def send(report: Report) -> Reply:
        reports.append(report)
        return Reply(wants_whole=False, token=SECRET)

    given = {"arena_bytes": "64M", "threads": 1, "port": 0, "models_folder": folder / name, "drain_s": 0.0}
    replica = Replica(resolve({**given, "fetch_timeout_s": TIMEOUT_S, **settings}, {}), name, send)
    try:
        replica.wait_ready()
        end_s = time.monotonic() + 30
        while not replica._app.state.peers.token:  # which comes with the reply to the first report
            assert time.monotonic() < end_s
            time.sleep(0.01)
        yield Member(replica, reports)
    finally:
        replica._server.should_exit = True
        replica._thread.join(30)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Member, Member]]:
    folder = tmp_path_factory.mktemp("replicas")
    with run_replica(folder, "a") as first, run_replica(folder, "b") as second:
        yield first, second


numbers = iter(range(1000))


def make_prompt() -> str:
    """Make a prompt of which no replica has a page."""
    return f"# Module {next(numbers)}\nimport os\nimport sys\n" + "def read(path):\n    return open(path).read()\n" * 20


@contextmanager
def serve_as_peer(handle: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[str]:
    """Serve as a peer that answers asks as it likes; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            handle(self, self.rfile.read(int(self.headers["content-length"])))

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def alter_pages(source: Member, alter: Callable[[bytes], bytes]) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    """Pass an ask on to a real replica, and its answer back, altered."""

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        pages = alter(httpx.post(source.url + PAGES_PATH, content=body, headers={TOKEN.decode(): SECRET}).content)
        handler.send_response(200)
        handler.send_header("content-length", str(len(pages)))
        handler.end_headers()
        handler.wfile.write(pages)

    return handle


def test_pages_of_another_replica_are_as_good_as_computed(members: tuple[Member, Member]) -> None:
    first, second = members
    prompt = make_prompt()
    expected, cached = first.ask(prompt)
    assert cached == 0
    pages, missed = second.count("mlxr_fetched_pages_total"), second.count(r'mlxr_prefix_tokens_total\{.*"missed"\}')
    text, found = second.ask(prompt, first.url)
    assert text == expected
    assert found >= 200
    assert second.count("mlxr_fetched_pages_total") - pages == found // 32
    assert second.count("mlxr_fetched_bytes_total") > 0
    assert second.count("mlxr_fetch_seconds_total") > 0
    assert first.count("mlxr_lent_pages_total") >= found // 32
    assert second.count(r'mlxr_prefix_tokens_total\{.*where="peer"\}') >= found
    assert second.count(r'mlxr_prefix_tokens_total\{.*"missed"\}') - missed < 33
    assert second.ask(prompt) == (expected, found)
    assert second.ask(prompt + "# and on", first.url) == first.ask(prompt + "# and on")
    assert second.reports[-1].load.link is not None


@pytest.mark.slow
def test_pages_on_their_way_are_waited_for(members: tuple[Member, Member]) -> None:
    """A second request that begins alike waits for them, whether a peer is named for it or not."""
    first, second = members
    for named in (False, True):
        prompt = make_prompt()
        expected, _ = first.ask(prompt)
        asked, may_go = threading.Event(), threading.Event()

        def wait(pages: bytes, asked: threading.Event = asked, may_go: threading.Event = may_go) -> bytes:
            asked.set()
            may_go.wait(TIMEOUT_S / 2)
            return pages

        before = second.count("mlxr_fetched_pages_total")
        with serve_as_peer(alter_pages(first, wait)) as url, ThreadPoolExecutor(2) as threads:
            one = threads.submit(second.ask, prompt, url)
            assert asked.wait(20)
            other = threads.submit(second.ask, prompt, url if named else None)
            answers = [one.result(), other.result()]
        assert [text for text, _ in answers] == [expected] * 2
        assert min(found for _, found in answers) >= 200
        assert second.count("mlxr_fetched_pages_total") - before == answers[0][1] // 32


def test_who_has_no_token_gets_nothing(members: tuple[Member, Member]) -> None:
    first, second = members
    prompt = make_prompt()
    expected, _ = first.ask(prompt)
    names = second.count("mlxr_fetched_pages_total"), second.count("mlxr_fetch_refusals_total")
    assert second.ask(prompt, first.url, token="another") == (expected, 0)  # a stranger names a peer
    assert (second.count("mlxr_fetched_pages_total"), second.count("mlxr_fetch_refusals_total")) == names
    for token in ("", "another", SECRET[:-1], "ä"):
        headers = {TOKEN: token.encode()}
        assert httpx.post(first.url + PAGES_PATH, content=b"", headers=headers).status_code == 403
    assert httpx.post(first.url + PAGES_PATH, content=b"").status_code == 403


def test_bad_asks_are_refused(members: tuple[Member, Member]) -> None:
    url, headers = members[0].url + PAGES_PATH, {TOKEN.decode(): SECRET}
    foreign = Ask((b"x" * 32,), [b"k" * 32], Lack(0, [[False]]), 2**30).pack()
    assert httpx.post(url, content=foreign, headers=headers).status_code == 409
    assert httpx.post(url, content=foreign[:-1], headers=headers).status_code == 400
    assert httpx.post(url, content=b"", headers=headers).status_code == 400
    assert httpx.get(url, headers=headers).status_code == 405
    assert httpx.post(url, content=bytes(20 * 2**20), headers=headers).status_code == 413


LIES: dict[str, tuple[Callable[[bytes], bytes], str, bool]] = {
    "a byte of the last page": (lambda pages: pages[:-1] + bytes([pages[-1] ^ 1]), "damaged", True),
    "a byte of the first page": (lambda pages: pages[:500] + bytes([pages[500] ^ 4]) + pages[501:], "damaged", False),
    "half of it": (lambda pages: pages[: len(pages) // 2 + 7], "half_sent", True),
    "a huge size": (lambda pages: pages[:16] + b"\xff" * 8 + pages[24:], "not_asked", False),
    "everything twice": (lambda pages: pages * 2, "not_asked", True),
    "something else": (lambda _: b"GET / HTTP/1.1\r\n" * 100, "damaged", False),
    "nothing": (lambda _: b"", "", False),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_is_damaged_is_computed(
    members: tuple[Member, Member], lie: tuple[Callable[[bytes], bytes], str, bool]
) -> None:
    first, second = members
    alter, cause, keeps_some = lie
    prompt = make_prompt()
    expected, _ = first.ask(prompt)
    refused = f'mlxr_fetch_refusals_total\\{{cause="{cause}"\\}}'
    before = second.count(refused)
    with serve_as_peer(alter_pages(first, alter)) as url:
        text, found = second.ask(prompt, url)
    assert (text, found > 0) == (expected, keeps_some)
    assert second.count(refused) - before == bool(cause)
    assert second.ask(prompt)[0] == expected


@pytest.mark.slow
def test_a_lost_link_costs_no_more_than_the_timeout(members: tuple[Member, Member]) -> None:
    first, second = members

    def hang(_: BaseHTTPRequestHandler, __: bytes) -> None:
        ended.wait(20)

    def drip(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(2**40))
        handler.end_headers()
        while not ended.wait(0.05):
            handler.wfile.write(b"M")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for handle in (hang, drip, None):
            ended = threading.Event()
            prompt = make_prompt()
            expected, _ = first.ask(prompt)
            second.ask(make_prompt())
            start_s = time.monotonic()
            late = second.count(r"mlxr_fetch_refusals_total\{cause=\"late\"\}")
            if handle is None:
                assert second.ask(prompt, silent_url) == (expected, 0)
            else:
                with serve_as_peer(handle) as url:
                    assert second.ask(prompt, url) == (expected, 0)
                    avoided = second.count(r"mlxr_fetch_refusals_total\{cause=\"avoided\"\}")
                    assert second.ask(make_prompt(), url)[1] == 0
                    assert second.count(r"mlxr_fetch_refusals_total\{cause=\"avoided\"\}") == avoided + 1
                    ended.set()
            assert TIMEOUT_S <= time.monotonic() - start_s < TIMEOUT_S + 5  # the rest is the answer
            assert second.count(r"mlxr_fetch_refusals_total\{cause=\"late\"\}") == late + 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc/passwd", "https://127.0.0.1:2", "http://[", "x"])
def test_a_peer_that_is_none_costs_nothing(members: tuple[Member, Member], url: str) -> None:
    first, second = members
    prompt = make_prompt()
    unreachable = second.count(r'mlxr_fetch_refusals_total\{cause="unreachable"\}')
    assert second.ask(prompt, url) == first.ask(prompt)
    assert second.count(r'mlxr_fetch_refusals_total\{cause="unreachable"\}') == unreachable + 1


def test_other_settings_of_the_model_are_another_model(members: tuple[Member, Member], tmp_path: Path) -> None:
    first, _ = members
    prompt = make_prompt()
    expected = first.ask(prompt)[0]
    with run_replica(tmp_path, "c", page_size=16) as other:
        assert other.ask(prompt, first.url) == (expected, 0)
        assert other.count(r'mlxr_fetch_refusals_total\{cause="model"\}') == 1
    with run_replica(tmp_path, "d", fetch_bytes=0) as other:
        assert other.ask(prompt, first.url) == (expected, 0)
        assert other.reports[-1].load.link is None


def test_who_leaves_while_pages_come_leaves_nothing(members: tuple[Member, Member]) -> None:
    _, second = members
    asked = threading.Event()
    ended = threading.Event()

    def hang(_: BaseHTTPRequestHandler, __: bytes) -> None:
        asked.set()
        ended.wait(20)

    with serve_as_peer(hang) as url:
        parts = urlsplit(second.url)
        client = http.client.HTTPConnection(str(parts.hostname), parts.port)
        body = json.dumps({"prompt": make_prompt(), "max_tokens": 300, "stream": True})
        client.request("POST", "/v1/completions", body, {PEER.decode(): url, TOKEN.decode(): SECRET})
        assert asked.wait(20)
        client.close()
        inbox = second.replica._app.state.peers.exchange._exchange.inbox
        end_s = time.monotonic() + 20
        while inbox.reserved_bytes:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        ended.set()


def test_a_speed_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("mlxr.cluster.page_transfer.monotonic", lambda: now_s)
    speed = LinkSpeed()
    assert speed.read() == 0
    speed.note(1000, 1.0)
    speed.note(2000, 1.0)
    assert speed.read() == pytest.approx(1300)
    now_s += 61
    assert speed.read() == 0
