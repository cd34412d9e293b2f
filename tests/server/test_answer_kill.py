"""A server that is killed in the middle of a long answer leaves the pages of its prompt on disk."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import httpx
import pytest
from running_server import spawn_server

PAGE_TOKENS = 16
READ_LINES = 20  # of the answer, before the kill
PROMPT = (Path(__file__).parents[1] / "real" / "held_out.txt").read_text()[:4500]
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_the_prompt_comes_back(tmp_path: Path) -> None:
    settings = {"store_bytes": "256M", "store_folder": tmp_path / "pages", "models_folder": tmp_path}
    with (
        spawn_server(page_size=PAGE_TOKENS, **settings) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert len(list(islice(lines, READ_LINES))) == READ_LINES
        process.kill()
        with pytest.raises(httpx.TransportError):  # in the middle of the answer
            list(lines)
    with spawn_server(page_size=PAGE_TOKENS, **settings) as (_, url):
        usage = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 1}).json()["usage"]
    full_pages = usage["prompt_tokens"] // PAGE_TOKENS
    assert full_pages > 50
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.95 * full_pages * PAGE_TOKENS
