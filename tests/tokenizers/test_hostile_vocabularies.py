"""Vocabularies with anything anywhere load, or are refused with an error of ours, and nothing else."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxr.core.errors import MlxrError
from mlxr.tokenizers import from_folder, from_gguf, to_gguf_metadata

ROUNDS = 250
JUNK: list[Any] = [
    *(None, True, -1, 0, 3, 2**31, 2**70, 1.5, float("nan"), "", "x", "\x00", "llama", "gpt2", b"x", "(" * 50),
    *([], {}, [1], ["a", "b"], [[]], [float("nan")], {"type": "BPE"}, {"a": 1}),
]
TEXT = "Hi <s> there 中 <tool_call>\n"


def use(tokenizer: Any) -> None:
    assert isinstance(tokenizer.decode(tokenizer.encode(TEXT, parse_special=True)), str)


def count_refusals(attempts: Iterator[Callable[[], None]]) -> tuple[int, int]:
    """Return how many attempts worked and how many were refused; any other error fails the test."""
    worked, refusals = 0, []
    for attempt in attempts:
        try:
            attempt()
            worked += 1
        except MlxrError as error:
            refusals.append(str(error))
    assert all(refusals)
    return worked, len(refusals)


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = list(value.items())[:40] if isinstance(value, dict) else list(enumerate(value))[:20]
    for key, inner in items:
        yield (*place, key)
        if isinstance(inner, dict | list):
            yield from list_places(inner, (*place, key))


def spoil(value: Any, place: tuple[Any, ...], draw: random.Random) -> None:
    for key in place[:-1]:
        value = value[key]
    if draw.random() < 0.3:
        del value[place[-1]]
    else:
        value[place[-1]] = draw.choice([junk for junk in JUNK if not isinstance(junk, bytes)])


@pytest.mark.parametrize("name", ["spm", "qwen2"])
def test_gguf_metadata(name: str, golden_folder: Path) -> None:
    draw = random.Random(1)
    honest = to_gguf_metadata(golden_folder / name)

    def attempt() -> None:
        metadata = dict(honest)
        key = draw.choice(list(metadata))
        values = metadata[key]
        if isinstance(values, list) and draw.random() < 0.7:
            values = metadata[key] = list(values)
            values[draw.randrange(len(values))] = draw.choice(JUNK)
        else:
            metadata[key] = draw.choice(JUNK)
        use(from_gguf(metadata))

    worked, refused = count_refusals(attempt for _ in range(ROUNDS))
    assert worked > 10
    assert refused > ROUNDS / 3


@pytest.mark.parametrize("name", ["spm-merges", "llama3"])
@pytest.mark.slow
def test_tokenizer_json(
    name: str,
    make_folder: Callable[[dict[str, Any]], Path],
    load_json: Callable[[str], dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(2)
    honest = load_json(name)
    places = list(list_places(honest))

    def attempt() -> None:
        data = copy.deepcopy(honest)
        spoil(data, draw.choice(places), draw)
        folder = make_folder({"tokenizer.json": data})
        use(from_folder(folder))
        use(from_gguf(to_gguf_metadata(folder)))

    worked, refused = count_refusals(attempt for _ in range(ROUNDS))
    assert worked > 10
    assert refused > ROUNDS / 3
    capfd.readouterr()  # the library writes about its panics itself


@pytest.mark.slow
def test_sentencepiece_models(make_folder: Callable[[dict[str, Any]], Path], golden_folder: Path) -> None:
    draw = random.Random(3)
    honest = (golden_folder / "spm" / "tokenizer.model").read_bytes()

    def attempt() -> None:
        data = bytearray(honest)
        # Half of the changes go to the end, where the rules are.
        at = draw.randrange(len(data)) if draw.random() < 0.5 else len(data) - 1 - draw.randrange(600)
        change = draw.random()
        if change < 0.6:
            data[at] = draw.randrange(256)
        elif change < 0.8:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at:at] = draw.randbytes(3)
        folder = make_folder({"tokenizer.model": bytes(data)})
        use(from_folder(folder))
        use(from_gguf(to_gguf_metadata(folder)))

    worked, refused = count_refusals(attempt for _ in range(ROUNDS))
    assert worked > 10
    assert refused > ROUNDS / 3
