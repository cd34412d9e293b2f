"""The cache as a user sees it: `LLM` with several answers, a store on disk, its statistics, and an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxr import LLM, SamplingParams
from mlxr.core.errors import SettingError
from mlxr.core.settings import resolve
from mlxr.engine.engine_thread import EngineThread
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.loading import LoadedModel, load
from mlxr.service.opening import build_engine, find_store_folder
from mlxr.service.validation import check_cache

PROMPT = "import os\nimport re\n\n" + "def join(first, second):\n    return os.path.join(first, second)\n\n" * 8
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=5, ignore_eos=True, logprobs=1)
SMALL = {"threads": 1, "context_tokens": 512, "max_sequences": 4}


@pytest.fixture(scope="module")
def demo() -> Iterator[LoadedModel]:
    with load("demo", threads=1) as loaded:
        yield loaded


def open_llm(**settings: object) -> LLM:
    return LLM("demo", **SMALL, **settings)  # type: ignore[arg-type]


def test_several_answers_come_from_one_prompt() -> None:
    with open_llm() as llm:
        (several,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=2.0, seed=5, n=3, logprobs=1))
        (alone,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=2.0, seed=5, logprobs=1))
        assert len(several.choices) == 3
        assert several.choices[0].text == alone.text
        assert several.choices[0].tokens == alone.tokens
        assert len({choice.token_ids for choice in several.choices}) > 1


def test_pages_outlive_the_engine_and_change_nothing(tmp_path: Path) -> None:
    with open_llm(kv_cache="simple") as llm:
        (plain,) = llm.generate(PROMPT, PARAMS)
        assert llm.stats().engine.cached_bytes == 0
    store = {"store_bytes": "64M", "store_folder": tmp_path / "pages"}
    with open_llm(**store) as llm:
        (first,) = llm.generate(PROMPT, PARAMS)
        (second,) = llm.generate(PROMPT, PARAMS)
        cache = llm.stats().engine
        assert cache.cached_bytes >= second.usage.cached_tokens // 32 * cache.page_bytes
        assert cache.used_bytes == cache.shared_bytes == 0
    with open_llm(**store) as llm:
        assert llm.stats().engine.disk_bytes > 0
        (third,) = llm.generate(PROMPT, PARAMS)
        assert llm.stats().engine.cache.disk_hit_tokens == third.usage.cached_tokens
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == third.usage.cached_tokens > 64
    assert second.usage.prompt_tokens - second.usage.cached_tokens <= 32
    assert plain.tokens == first.tokens == second.tokens == third.tokens
    assert plain.token_ids == third.token_ids


def test_the_store_is_off_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_llm() as llm:
        llm.generate(PROMPT, PARAMS)
        assert llm.stats().engine.cache.store is None
    assert list(tmp_path.iterdir()) == []
    assert tmp_path in find_store_folder(resolve({}, {})).parents
    assert find_store_folder(resolve({"store_folder": "~/x"}, {})) == Path.home() / "x"
    with pytest.raises(SettingError, match="store_bytes"):
        open_llm(kv_cache="simple", store_bytes="64M", store_folder=tmp_path)


def test_the_fingerprint_is_of_the_model_and_the_device(demo: LoadedModel) -> None:
    prints = {demo.fingerprint}
    for name, options in (("demo", {"device": "reference"}), ("demo-draft", {"threads": 1})):
        with load(name, **options) as other:  # type: ignore[arg-type]
            prints.add(other.fingerprint)
    assert len(prints) == 3
    with load("demo", threads=2) as again:
        assert again.fingerprint in prints


def test_validation_sees_sharing_and_the_store(demo: LoadedModel, tmp_path: Path) -> None:
    settings = resolve({**SMALL, "store_bytes": "16M", "store_folder": tmp_path / "pages"}, {})
    check = check_cache(demo, settings, demo.tokenizer.encode(PROMPT)[:20])
    assert check.answers_agree
    assert check.cached_tokens == check.prompt_tokens // 32 * 32 > 0
    assert check.sharing.shared_bytes > 0
    assert check.after.cached_bytes > 0
    assert check.after.disk_bytes > 0
    plain = check_cache(demo, resolve({**SMALL, "kv_cache": "simple"}, {}), [1, 2, 3])
    assert plain.answers_agree
    assert plain.cached_tokens == plain.after.cached_bytes == 0


def test_an_event_loop_gets_the_same_answers(demo: LoadedModel) -> None:
    token_ids = demo.tokenizer.encode(PROMPT)

    async def run() -> list[list[int | None]]:
        async with EngineThread(build_engine(demo, resolve(SMALL, {}))) as server:

            async def answer(size: int) -> list[int | None]:
                events: asyncio.Queue[TokenEvent] = asyncio.Queue()
                await server.submit(EngineRequest(token_ids[:size], PARAMS), events.put_nowait)
                told = [await events.get()]
                while told[-1].finish_reason is None:
                    told.append(await events.get())
                return [event.token_id for event in told]

            return await asyncio.gather(*(answer(size) for size in (20, 70, 120, 121, 122)))

    with LLM("demo", **SMALL) as llm:  # type: ignore[arg-type]
        wanted = [list(llm.generate([token_ids[:size]], PARAMS)[0].token_ids) for size in (20, 70, 120, 121, 122)]
    assert asyncio.run(run()) == wanted
