"""A real model fills gaps in code, by each route that has them: the filled code is run."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from conftest import RealServer

LENGTH = 48  # tokens
LINE = ["\n"]  # an editor that completes one line stops there


@dataclass(frozen=True)
class Gap:
    """Code with a gap, and a check of the whole."""

    before: str
    after: str
    check: str


def one_line(head: str, check: str) -> Gap:
    """A gap at the end of the last line."""
    return Gap(head, "\n", check)


GAPS = {
    "add": one_line("def add(a, b):\n    return ", "add(2, 3) == 5"),
    "multiply": one_line("def multiply(a, b):\n    return ", "multiply(3, 4) == 12"),
    "square": one_line("def square(x):\n    return ", "square(7) == 49"),
    "is_even": one_line("def is_even(n):\n    return n % 2 ", "is_even(4) and not is_even(3)"),
    "average": one_line("def average(xs):\n    return sum(xs) / ", "average([2, 4]) == 3"),
    "absolute": one_line("def absolute(x):\n    return x if x >= 0 else ", "absolute(-3) == 3"),
    "largest": one_line("def largest(numbers):\n    return ", "largest([3, 9, 4]) == 9"),
    "smallest": one_line("def smallest(numbers):\n    return ", "smallest([3, 1, 4]) == 1"),
    "upper": one_line("def upper_case(text):\n    return text.", "upper_case('ab') == 'AB'"),
    "reverse": one_line("def reverse(text):\n    return text[", "reverse('abc') == 'cba'"),
    "split": one_line("def split_words(text):\n    return text.", "split_words('a b') == ['a', 'b']"),
    "words": one_line("def count_words(text):\n    return len(text.", "count_words('a b c') == 3"),
    "join": one_line("def join_words(words):\n    return ' '.", "join_words(['a', 'b']) == 'a b'"),
    "contains": one_line("def contains(items, item):\n    return item ", "contains([1, 2], 2)"),
    "last": one_line("def last(items):\n    return items[", "last([5, 6]) == 6"),
    "sorted": one_line("def sort_falling(xs):\n    return sorted(xs, reverse=", "sort_falling([1, 3, 2]) == [3, 2, 1]"),
    "factorial": one_line(
        "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * ", "factorial(5) == 120"
    ),
    "fibonacci": one_line(
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ", "fibonacci(10) == 55"
    ),
    "loop": Gap(
        "def total(numbers):\n    result = 0\n    for number in numbers:\n        ",
        "\n    return result\n",
        "total([1, 2, 3]) == 6",
    ),
    "import": Gap("import ", "\n\n\ndef area(radius):\n    return math.pi * radius ** 2\n", "3.14 < area(1) < 3.15"),
}


def holds(gap: Gap, filled: str) -> bool:
    names: dict[str, object] = {}
    try:
        exec(gap.before + filled + gap.after, names)
        return bool(eval(gap.check, names))
    except Exception:
        return False


def fill(server: RealServer, gap: Gap, **more: object) -> str:
    body = {"input_prefix": gap.before, "input_suffix": gap.after, "n_predict": LENGTH, "temperature": 0, "stop": LINE}
    response = server.post("/infill", body | more)
    assert response.status_code == 200, response.text
    return str(response.json()["content"])


@pytest.mark.parametrize("name", GAPS)
def test_what_is_filled_in_runs(name: str, coder: RealServer) -> None:
    gap = GAPS[name]
    filled = fill(coder, gap)
    assert holds(gap, filled), gap.before + f"⟦{filled}⟧" + gap.after


def test_every_route_fills_the_same(coder: RealServer) -> None:
    gap = GAPS["fibonacci"]
    filled = fill(coder, gap)
    asked = {"model": coder.model, "prompt": gap.before, "suffix": gap.after}
    completion = {**asked, "max_tokens": LENGTH, "temperature": 0, "stop": LINE}
    assert coder.post("/v1/completions", completion).json()["choices"][0]["text"] == filled
    generate = {**asked, "stream": False, "options": {"num_predict": LENGTH, "temperature": 0, "stop": LINE}}
    assert coder.post("/api/generate", generate).json()["response"] == filled


def test_other_files_are_used(coder: RealServer) -> None:
    extra = [{"filename": "shop.py", "text": "def zlorp_total(prices):\n    return sum(prices) * 1.19\n"}]
    gap = Gap("import shop\n\nprices = [1.0, 2.0]\nprint(shop.", "\n", "True")
    assert fill(coder, gap, input_extra=extra).startswith("zlorp_total(prices)")
    assert not fill(coder, gap).startswith("zlorp")


def test_a_stream_is_the_same(coder: RealServer) -> None:
    gap = GAPS["loop"]
    body = {
        "input_prefix": gap.before,
        "input_suffix": gap.after,
        "n_predict": LENGTH,
        "temperature": 0,
        "stop": LINE,
        "stream": True,
    }
    lines = [text for text in coder.post("/infill", body).text.splitlines() if text]
    chunks = [json.loads(text.removeprefix("data: ")) for text in lines]
    assert "".join(chunk["content"] for chunk in chunks) == fill(coder, gap)
    assert chunks[-1]["stop_type"] == "word"
