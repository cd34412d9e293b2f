"""Masks beside the caller: a grammar library of a few Python functions, by their addresses, stands for the real one."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

native = pytest.importorskip("mlxr._native", reason="the native module is not built")

WORDS = 3
BAD_TOKEN = 666
CONSUME = ctypes.CFUNCTYPE(c_int32, c_void_p, ctypes.POINTER(c_uint32), c_size_t)
COMPUTE = ctypes.CFUNCTYPE(c_int32, c_void_p, ctypes.POINTER(c_uint32), c_size_t)
ERROR = ctypes.CFUNCTYPE(c_void_p, c_void_p)
CLONE = ctypes.CFUNCTYPE(c_void_p, c_void_p)
FREE = ctypes.CFUNCTYPE(None, c_void_p)
WRITE = ctypes.CFUNCTYPE(c_size_t, c_void_p, c_char_p, c_size_t, ctypes.POINTER(c_uint32), c_size_t)


class FakeLibrary:
    """Matchers are numbers; the mask of one is its tokens' sum in the first word, and their count in the last."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.broken: set[int] = set()
        self.freed: list[int] = []
        self.threads: set[int] = set()
        self.delay_s = 0.0
        self.reason = ctypes.create_string_buffer(b"nothing fits")
        self.functions = (
            CONSUME(self.consume),
            COMPUTE(self.compute),
            ERROR(self.error),
            CLONE(self.clone),
            FREE(self.free),
            CONSUME(self.validate),
        )

    def open(self, runtime: Any) -> Any:
        number = len(self.tokens) + 1
        self.tokens[number] = []
        addresses = [ctypes.cast(function, c_void_p).value for function in self.functions]
        return native.GrammarMatcher(runtime, self, addresses, number, WORDS)

    def consume(self, matcher: int, tokens: Any, count: int) -> int:
        self.tokens[matcher] += tokens[:count]
        if BAD_TOKEN in tokens[:count]:
            self.broken.add(matcher)
        return -(matcher in self.broken)

    def compute(self, matcher: int, mask: Any, mask_bytes: int) -> int:
        assert mask_bytes == 4 * WORDS
        self.threads.add(threading.get_ident())
        time.sleep(self.delay_s)
        mask[0], mask[WORDS - 1] = sum(self.tokens[matcher]), len(self.tokens[matcher])
        return -(matcher in self.broken)

    def error(self, matcher: int) -> int | None:
        return ctypes.addressof(self.reason) if matcher in self.broken else None

    def clone(self, matcher: int) -> int:
        number = len(self.tokens) + 1
        self.tokens[number] = list(self.tokens[matcher])
        return number

    def validate(self, matcher: int, tokens: Any, count: int) -> int:
        return -1 if matcher in self.broken else (*tokens[:count], BAD_TOKEN).index(BAD_TOKEN)

    def free(self, matcher: int) -> None:
        self.freed.append(matcher)


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


def mask_of(matcher: Any) -> list[int]:
    mask = np.zeros(WORDS, np.uint32)
    assert matcher.write_mask(mask)
    return [int(word) for word in mask]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_mask_is_that_of_the_tokens_so_far(library: FakeLibrary, threads: int) -> None:
    runtime = native.Runtime(threads, "portable")
    weight = native.LinearWeight(32)
    weight.append(runtime, "f32", 64, np.ones((64, 32), np.float32).view(np.uint8).ravel(), None)
    matchers = [library.open(runtime) for _ in range(6)]
    assert [mask_of(matcher) for matcher in matchers] == [[0, 0, 0]] * 6
    for step in range(1, 40):
        native.linear(runtime, np.ones((2, 32), np.float32), weight, np.empty((2, 64), np.float32))
        for number, matcher in enumerate(matchers):
            matcher.accept(number)
        for number, matcher in enumerate(matchers):
            assert mask_of(matcher) == [number * step, 0, step]
            assert mask_of(matcher) == [number * step, 0, step]


def test_a_thread_of_the_pool_makes_masks_while_the_caller_does_other_things(library: FakeLibrary) -> None:
    runtime = native.Runtime(2, "portable")
    matcher, product, own = library.open(runtime), wide_product(runtime), {threading.get_ident()}
    deadline = time.monotonic() + 60
    while library.threads <= own and time.monotonic() < deadline:
        native.linear(runtime, *product)  # wakes the thread
        matcher.accept(1)
        time.sleep(0)  # the thread may be asleep again by now: then the mask is made here
        mask_of(matcher)
    assert not library.threads <= own


def wide_product(runtime: Any) -> tuple[NDArray[np.float32], Any, NDArray[np.float32]]:
    """Arguments of a product that takes all threads."""
    weight = native.LinearWeight(32)
    weight.append(runtime, "f32", 640, np.ones((640, 32), np.float32).view(np.uint8).ravel(), None)
    return np.ones((2, 32), np.float32), weight, np.empty((2, 640), np.float32)


def test_copies_go_their_own_ways(library: FakeLibrary) -> None:
    first = library.open(native.Runtime(2, "portable"))
    first.accept(5)
    second = first.fork()
    first.accept(1)
    second.accept(2)
    assert (mask_of(first), mask_of(second)) == ([6, 0, 2], [7, 0, 2])
    second.replay([10, 20])
    assert mask_of(second) == [37, 0, 4]


def test_tokens_are_counted_up_to_the_first_that_is_forbidden(library: FakeLibrary) -> None:
    matcher = library.open(native.Runtime(2, "portable"))
    matcher.accept(5)
    assert [matcher.count_allowed(tokens) for tokens in ([], [1, 2], [1, BAD_TOKEN, 2], [BAD_TOKEN])] == [0, 2, 1, 0]
    assert mask_of(matcher) == [5, 0, 1]
    matcher.accept(BAD_TOKEN)
    assert matcher.count_allowed([1]) == 0


def test_after_an_error_there_are_no_masks(library: FakeLibrary) -> None:
    matcher = library.open(native.Runtime(2, "portable"))
    assert matcher.read_error() == ""
    for token_id in (BAD_TOKEN, 1):
        matcher.accept(token_id)
        assert not matcher.write_mask(np.zeros(WORDS, np.uint32))
        assert matcher.read_error() == "nothing fits"


@pytest.mark.parametrize("is_asked", [False, True])
def test_each_matcher_is_freed_once_whatever_waits(library: FakeLibrary, is_asked: bool) -> None:
    runtime = native.Runtime(3, "portable")
    for _ in range(200):
        matcher = library.open(runtime)
        matcher.accept(1)
        if is_asked:
            mask_of(matcher)
        copy = matcher.fork()
        copy.accept(2)
        del matcher, copy
    gc.collect()
    assert sorted(library.freed) == sorted(library.tokens)


def test_freeing_waits_for_the_thread_that_is_at_it(library: FakeLibrary) -> None:
    """Masks take long enough here for a thread of the pool, where one is awake, to be at one when the matcher goes."""
    library.delay_s = 0.002
    runtime = native.Runtime(2, "portable")
    for _ in range(50):
        native.linear(runtime, *wide_product(runtime))
        matcher = library.open(runtime)
        matcher.accept(1)
        time.sleep(0)
        del matcher
    assert len(library.freed) == 50


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"functions": [1, 2]}, "six functions"),
        ({"runtime": object()}, "bad.cast"),
        ({"runtime": None}, "incompatible function arguments"),
    ],
)
def test_wrong_arguments_are_refused(library: FakeLibrary, arguments: dict[str, Any], reason: str) -> None:
    given = {"runtime": native.Runtime(1, "portable"), "tokens": library, "functions": [0] * 6, "matcher": 1}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=reason):
        native.GrammarMatcher(**{**given, "mask_words": WORDS, **arguments})


def test_a_mask_of_another_size_is_refused(library: FakeLibrary) -> None:
    matcher = library.open(native.Runtime(1, "portable"))
    with pytest.raises(ValueError, match="the mask has 4 words, expected 3"):
        matcher.write_mask(np.zeros(4, np.uint32))


def write_tokens(tokens: Any, text: bytes, room: int) -> tuple[int, list[int]]:
    ids = (c_uint32 * max(room, 1))()
    count = WRITE(native.ForcedTokens.function)(tokens.address, text, len(text), ids, room)
    return count, list(ids[: min(count, room)])


def test_tokens_of_forced_texts_are_asked_for_once() -> None:
    asked = []

    def find(text: bytes) -> list[int]:
        asked.append(text)
        return list(text)

    tokens = native.ForcedTokens(find)
    assert [write_tokens(tokens, b"abc", room) for room in (0, 2, 9)] == [(3, []), (3, [97, 98]), (3, [97, 98, 99])]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(write_tokens(tokens, b"xy\x00", 5)))
    thread.start()
    thread.join()
    assert found == [(3, [120, 121, 0])]
    assert asked == [b"abc", b"xy\x00"]


def test_kept_tokens_are_bounded_by_their_bytes() -> None:
    """However long the forced texts and however many their tokens are; a text that is too large leaves the others."""
    asked = []

    def find(text: bytes) -> list[int]:
        asked.append(text)
        return [7] * 50_000

    tokens, largest = native.ForcedTokens(find), native.ForcedTokens.MAX_BYTES
    texts = [b"%d" % index + b" " * 50_000 for index in range(2 * largest // 250_000)]
    for text in texts:
        assert write_tokens(tokens, text, 2) == (50_000, [7, 7])
        assert 250_000 <= tokens.nbytes <= largest
    assert asked == texts
    write_tokens(tokens, texts[-1], 0)
    kept_bytes = tokens.nbytes
    assert write_tokens(tokens, b" " * largest, 1) == (50_000, [7])
    assert (tokens.nbytes, asked) == (kept_bytes, [*texts, b" " * largest])
    write_tokens(tokens, texts[-1], 0)
    write_tokens(tokens, texts[0], 0)
    assert asked == [*texts, b" " * largest, texts[0]]


def test_a_tokenizer_that_fails_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: told.append(problem.exc_type))
    tokens = native.ForcedTokens(lambda text: 1 // 0)
    assert write_tokens(tokens, b"abc", 9) == (0, [])
    assert told == [ZeroDivisionError]


@pytest.fixture
def child_script() -> Callable[[str], subprocess.CompletedProcess[str]]:
    def run(script: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
        return subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "os._exit(0)", "sys.exit(0)"])
def test_a_process_may_end_with_masks_to_come(
    child_script: Callable[[str], subprocess.CompletedProcess[str]], ending: str
) -> None:
    """Also while a thread of the pool waits for Python's lock."""
    script = f"""
import os, sys
from test_grammar_matcher import FakeLibrary, native, wide_product
runtime, library = native.Runtime(3, "portable"), FakeLibrary()
library.delay_s = 0.001
matchers = [library.open(runtime) for _ in range(20)]
for step in range(5):
    native.linear(runtime, *wide_product(runtime))
    for matcher in matchers:
        matcher.accept(1)
{ending}
"""
    for _ in range(3):
        done = child_script(script)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_what_waits_or_says_what_it_lost(
    child_script: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    script = """
import os, sys, warnings
import numpy as np
from test_grammar_matcher import WORDS, FakeLibrary, native, wide_product
warnings.simplefilter("ignore")
for _ in range(4):
    runtime, library = native.Runtime(2, "portable"), FakeLibrary()
    library.delay_s = 0.001
    matchers = [library.open(runtime) for _ in range(20)]
    native.linear(runtime, *wide_product(runtime))
    for matcher in matchers:
        matcher.accept(1)
    if os.fork() == 0:
        lost = 0
        for matcher in matchers:
            try:
                assert matcher.write_mask(np.zeros(WORDS, np.uint32))
            except RuntimeError as error:
                assert "lost when the process was forked" in str(error)
                lost += 1
        sys.exit(lost)
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status))
"""
    lost = child_script(script).stdout.split()
    assert len(lost) == 4
    assert {*lost} <= {"0", "1"}
