"""Asks and pages as bytes: only the pages that were asked for, whole and right, are taken."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from mlxr.cache.store import HEADER_BYTES, allocate_payload, pack_header
from mlxr.cluster.page_exchange import Inbox, Lack
from mlxr.cluster.page_transfer import MAX_NAMES, Ask, Refusal, Refused, take_pages

SIZES = (64, 24)
MODELS = (b"m" * 32, b"s" * 32)
NAMES = [bytes([number]) * 32 for number in range(1, 11)]
ASK = Ask(MODELS, NAMES, Lack(2, [[True] * 2 + [False] * 8, [False] * 10]), 2000)


def make_page(group: int, place: int, model: bytes | None = None, size: int | None = None) -> bytes:
    payload = allocate_payload(SIZES[group] if size is None else size)
    payload[:] = np.arange(len(payload)) * (place + 1) % 251
    return pack_header(MODELS[group] if model is None else model, NAMES[place], payload) + payload.tobytes()


def reader_of(data: bytes, piece: int = 7) -> Callable[[memoryview], int]:
    rest = data

    def read_into(target: memoryview) -> int:
        nonlocal rest
        taken, rest = rest[: min(piece, len(target))], rest[min(piece, len(target)) :]
        target[: len(taken)] = taken
        return len(taken)

    return read_into


def take(data: bytes, inbox_bytes: int = 2000) -> tuple[set[tuple[int, bytes]], Refusal | None]:
    """Return the contents of the inbox afterwards, and why nothing more was taken."""
    inbox = Inbox(inbox_bytes)
    delivery, cause = inbox.open(ASK.max_bytes), None
    try:
        assert take_pages(reader_of(data), ASK, SIZES, delivery) == len(delivery.names)
    except Refused as refused:
        cause = refused.cause
    inbox.check()
    return set(delivery.names), cause


def test_an_ask_comes_out_as_it_went_in() -> None:
    chance = random.Random(1)
    for count in (0, 1, 7, 8, 9, 100):
        names = [chance.randbytes(32) for _ in range(count)]
        here = [[chance.random() < 0.5 for _ in names] for _ in MODELS]
        ask = Ask(MODELS, names, Lack(chance.randrange(count + 1), here), 2**40)
        assert Ask.parse(ask.pack()) == ask


def test_an_ask_that_is_cut_or_altered_is_refused_or_another_one() -> None:
    data, chance = ASK.pack(), random.Random(2)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"ask|bytes"):
            Ask.parse(data[:length])
    for _ in range(500):
        altered = bytearray(data)
        altered[chance.randrange(len(data))] = chance.randrange(256)
        try:
            assert len(Ask.parse(bytes(altered)).names) == len(NAMES)
        except ValueError:
            continue


@pytest.mark.parametrize("place", [12, 16, 20])
def test_huge_counts_in_an_ask_are_refused(place: int) -> None:
    data = bytearray(ASK.pack())
    data[place : place + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(ValueError, match="no ask"):
        Ask.parse(bytes(data))
    assert MAX_NAMES < 2**32 - 1


def test_pages_that_were_asked_for_are_taken() -> None:
    pages = [make_page(1, 9), *(make_page(0, place) for place in range(2, 10))]
    assert take(b"".join(pages)) == ({(1, NAMES[9]), *((0, NAMES[place]) for place in range(2, 10))}, None)
    assert take(b"") == (set(), None)


GOOD = make_page(0, 2)
OTHERS = {
    "here already": (make_page(0, 1), Refusal.NOT_ASKED),
    "twice": (GOOD, Refusal.NOT_ASKED),
    "of another model": (make_page(0, 3, model=b"x" * 32), Refusal.DAMAGED),
    "of the other group's size": (make_page(0, 3, size=24), Refusal.NOT_ASKED),
    "larger": (make_page(0, 3, size=65), Refusal.NOT_ASKED),
    "not a page": (b"HTTP/1.1" * 40, Refusal.DAMAGED),
    "cut in the header": (make_page(0, 3)[:50], Refusal.HALF_SENT),
    "cut in the page": (make_page(0, 3)[:-1], Refusal.HALF_SENT),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_was_not_asked_for_ends_it(other: tuple[bytes, Refusal]) -> None:
    assert take(GOOD + other[0] + make_page(0, 4)[: 0 if other[1] is Refusal.HALF_SENT else None]) == (
        {(0, NAMES[2])},
        other[1],
    )


def test_a_size_is_never_believed() -> None:
    """A header that speaks of 2^60 bytes costs nothing."""
    page = bytearray(make_page(0, 3))
    page[16:24] = (2**60).to_bytes(8, "little")
    assert take(bytes(page)) == (set(), Refusal.NOT_ASKED)


def test_no_altered_byte_is_served() -> None:
    page = make_page(0, 3)
    for place in range(len(page)):
        altered = bytearray(page)
        altered[place] ^= 1 << place % 8
        names, cause = take(bytes(altered))
        assert (names, cause is None) == (set(), False)
    assert len(page) == HEADER_BYTES + SIZES[0]


def test_no_more_is_taken_than_there_is_room_for() -> None:
    pages = b"".join(make_page(0, place) for place in range(2, 10))
    assert take(pages, inbox_bytes=150) == ({(0, NAMES[2]), (0, NAMES[3])}, Refusal.NOT_ASKED)
