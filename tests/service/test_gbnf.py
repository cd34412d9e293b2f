"""GBNF: the grammars of llama.cpp, cases where a lexer would read too far, and errors in broken ones.

The grammars below `grammars` are llama.cpp's own (`grammars/*.gbnf` in https://github.com/ggml-org/llama.cpp), under
the licence that stands beside them.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from whole_answers import takes

from mlxr.core.types import Grammar
from mlxr.service.gbnf import Chars, Choice, GbnfError, Node, Ref, Repeat, Sequence, parse, translate

FOLDER = Path(__file__).parent / "grammars"


@pytest.mark.parametrize(
    ("name", "taken", "not_taken"),
    [
        ("arithmetic", ["1=2\n", "(a+b)*3=x1 \n\n2= 3\n"], ["1=2", "1=2 +\n", "1 + 2=3\n"]),
        (
            "c",
            ["int main(){return 1;}", "int  f(int x){int = 5;while(x<3){x = g(1, -2)*y+3;}// no\n/* a * b */}"],
            ["int f({}", "f(){}", "int f(){x=1;}"],
        ),
        (
            "chess",
            ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O O-O-O+\n12. exd8=Q+ Kd8#\n"],
            ["1. e4 e5\n", "1. e9 e5\n2. a4 a5\n"],
        ),
        ("english", ["Hello, world!\nA [b]", "a"], ["na\u00efve", "", " a"]),
        ("japanese", ["\u3053\u3093 \u30ab\n\u4e00"], ["hi", "\u3053 "]),
        (
            "json",
            ['{"a": [1, -2.5e+1, "x\\n\\u00e9 \u2603", true, null, {}]}', "{ }"],
            ["[1]", '{"a":01}', '{"a" 1}', '{"a'],
        ),
        ("json_arr", ['[\n1,\n{"a":2}]'], ["[1]", "[\n1] "]),
        ("list", ["- a b\n- c\n"], ["- a", "a\n"]),
    ],
)
def test_grammars_of_llama_cpp(name: str, taken: list[str], not_taken: list[str]) -> None:
    grammar = Grammar("gbnf", (FOLDER / f"{name}.gbnf").read_text())
    for text in taken:
        assert takes(text, grammar), text
    for text in not_taken:
        assert not takes(text, grammar), text


# Grammars in which the longest match of a part is not always the right one.
AMBIGUOUS = [
    "root ::= [a-b]+ [b-c]",
    'root ::= a "b" c\na ::= [ab]*\nc ::= "c"?',
    'root ::= ("a" "bc" | "ab" "d") "a"*',
    "root ::= w (w | [a])*\nw ::= [ab] [bc]*",
    'root ::= x\nx ::= "a" x "b" | "c"? "b"*',
    "root ::= [a-c]{2} [a-b]{1,2} ([c] | [a] [b])?",
    'root ::= x{2}\nx ::= "" | "a" [^a-b]{0,2} | x "b"',
    "root ::= (. [b])* [c]",
]


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_exactly_the_texts_of_the_grammar_are_taken(text: str) -> None:
    """All texts of up to five letters, against a reading of the grammar by its definition."""
    rules, grammar = parse(text), Grammar("gbnf", text)
    words = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]
    taken = {word for word in words if len(word) in match(rules["root"], word, 0, rules, frozenset())}
    assert taken
    rest = sorted(set(words) - taken)
    some = random.Random(3).sample(sorted(taken), min(25, len(taken))) + random.Random(4).sample(
        rest, min(25, len(rest))
    )
    assert {word for word in some if takes(word, grammar)} == taken & set(some)


def match(node: Node, text: str, at: int, rules: dict[str, Node], seen: frozenset[tuple[str, int]]) -> set[int]:
    """Return the places where a match of `node` that begins at `at` may end. A rule that comes back to itself there
    adds nothing new, unless it is left-recursive: then its ends are collected until there are no more.
    """
    match node:
        case Chars():
            is_in = at < len(text) and any(low <= ord(text[at]) <= high for low, high in node.ranges)
            return {at + 1} if is_in else set()
        case Sequence():
            ends = {at}
            for part in node.parts:
                ends = {end for start in ends for end in match(part, text, start, rules, seen)}
            return ends
        case Choice():
            return {end for part in node.parts for end in match(part, text, at, rules, seen)}
        case Repeat():
            found, ends, count = ({at} if node.low == 0 else set()), {at}, 0
            while ends and count < (len(text) + node.low + 1 if node.high is None else node.high):
                ends = {end for start in ends for end in match(node.part, text, start, rules, seen)}
                count += 1
                found |= ends if count >= node.low else set()
            return found
        case Ref():
            if (node.name, at) in seen:
                return GROWN.get((id(rules), text, node.name, at), set())
            key, ends = (id(rules), text, node.name, at), set[int]()
            while True:
                GROWN[key] = ends
                more = match(rules[node.name], text, at, rules, seen | {(node.name, at)})
                if more <= ends:
                    return ends
                ends = ends | more
        case _:
            raise AssertionError(node)


GROWN: dict[tuple[int, str, str, int], set[int]] = {}


def test_tokens_and_escapes() -> None:
    lark = translate(r'root ::= <[12]> "\x41\u00e9\U0001F600\"\\" [\]\[\-] # nothing' + "\n")
    assert "<[12]>" in lark
    assert takes('A\u00e9\U0001f600"\\]', Grammar("gbnf", lark_free(r'"\x41\u00e9\U0001F600\"\\" [\]\[]')))


def lark_free(body: str) -> str:
    return f"root ::= (\n  {body} # a comment\n)\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the grammar has no rule 'root'"),
        ('a ::= "b"', "the grammar has no rule 'root'"),
        ("root ::= a", "line 1: there is no rule 'a'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is there twice"),
        ('root = "a"', "line 1: '::=' is missing"),
        ('\nroot ::= "a', "line 2: a text has no end"),
        ("root ::= [a", "line 1: a class has no end"),
        ("root ::= [b-a]", "line 1: a range must rise"),
        ('root ::= "\\q"', "line 1: an escape is none of those"),
        ('root ::= "a"{3,2}', "line 1: bounds must rise"),
        ('root ::= "a"{x}', r"line 1: bounds must be \{m\}"),
        ('root ::= ("a"', "line 1: '\\)' is missing"),
        ('root ::= "a" )', r"line 1: '\)' is not expected"),
        ("root ::= " + '"ab" ' * 20_001, "more than 20000 parts"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(GbnfError, match=reason):
        translate(text)


def test_hostile_grammars_take_little_time() -> None:
    start_s = time.monotonic()
    doubling = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60))
    translate(f'root ::= r0\n{doubling}\nr60 ::= ""')
    translate(f'root ::= r0\n{doubling}\nr60 ::= "a"')
    translate("root ::= " + " | ".join(f'"{number:b}" [01]* "{number}"' for number in range(300)))
    with pytest.raises(RecursionError):
        translate("root ::= " + "(" * 5000 + ")" * 5000)
    assert time.monotonic() - start_s < 20
