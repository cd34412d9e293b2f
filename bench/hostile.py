"""Templates, schemas and requests made to hurt a server: each `index` always gives the same one.

Templates are put together from every filter, test, method and operator that the sandbox has, over large values and over
values that hold one another many times. Most do little; some would take minutes or gigabytes.
"""

from __future__ import annotations

import json
import random
from typing import Any

_FILTERS = (
    "abs batch(3)|list capitalize center(40) count d('x') dictsort e escape first float(0) format(1) groupby('a')|list "
    "indent(4) int(0) items|list join('-') last length list lower map('upper')|list max min reject('none')|list "
    "replace('a','bb') reverse|list round(2) safe select('equalto',1)|list slice(3)|list sort string sum(start=0) "
    "sum(start=[]) title tojson tojson(indent=2) trim truncate(9) unique|list upper wordcount wordwrap(1) wordwrap(79)"
)
_TESTS = (
    "boolean callable defined divisibleby(3) eq(1) even escaped in([1]) integer iterable lower mapping none number odd "
    "sameas(1) sequence string true upper"
)
_METHODS = (
    "capitalize() casefold() center(99) count('a') encode() endswith('a') expandtabs(9) find('ab') format(1) "
    "index('a') isalnum() isdigit() join(['a','b']) ljust(99) lower() lstrip() partition('a') replace('a','bb') "
    "rfind('ab') rindex('a') rjust(99) rpartition('b') rsplit('a') rstrip() split() split('a') splitlines() "
    "startswith('a') strip('a') swapcase() title() upper() zfill(99)"
)
_OPERATORS = ("+", "*", "~", "%", "==", "<", "in", "not in", "and", "or", "//", "**")
_LARGE = (
    "'a'*4000000",
    "'ab '*2000000",
    "('a'*999+'\\n')*4000",
    "'%250d'*60000",
    "[1]*400000",
    "[[1]]*200000",
    "['A'*100000]*250",
    "range(99999)|list",
    "'ab'+'a'*1000000",
    "messages[0].content*99999",
)
_SMALL = ("1", "'a'", "'a b c'", "[3,1,2]", "{'a': 1, 'b': [2]}", "none", "true", "2.5", "messages", "'x%dy'", "'{}'")
_SHARED = (
    "{% set ns=namespace(x=['a'],y=['a']) %}{% for i in range(COUNT) %}{% set ns.x=[ns.x,ns.x] %}"
    "{% set ns.y=[ns.y,ns.y] %}{% endfor %}"
)


def make_template(index: int) -> str:
    """Make a random template that asks for much time or memory; the same `index` gives the same template."""
    draw = random.Random(index)
    parts = [_SHARED.replace("COUNT", str(draw.choice([3, 12, 40])))] if draw.random() < 0.4 else []
    values = [*_SMALL, *_LARGE, *(["ns.x", "ns.y"] if parts else [])]
    for _ in range(draw.randrange(1, 4)):
        parts.append(_make_statement(draw, values))
    return "".join(parts)


def _make_statement(draw: random.Random, values: list[str]) -> str:
    value = _make_value(draw, values, draw.randrange(1, 4))
    kind = draw.randrange(5)
    if kind == 0:
        return f"{{% for x in {value} %}}{{{{ x }}}}{{% endfor %}}"
    if kind == 1:
        return f"{{% if {value} is {draw.choice(_TESTS.split())} %}}yes{{% endif %}}"
    if kind == 2:
        return f"{{% set v = {value} %}}{{{{ v }}}}{{{{ v }}}}"
    if kind == 3:
        return f"{{{{ strftime_now({value}) }}}}"
    return f"{{{{ {value} }}}}"


def _make_value(draw: random.Random, values: list[str], depth: int) -> str:
    if depth == 0:
        return draw.choice(values)
    inner = _make_value(draw, values, depth - 1)
    kind = draw.randrange(4)
    if kind == 0:
        return f"({inner})|{draw.choice(_FILTERS.split())}"
    if kind == 1:
        return f"({inner}).{draw.choice(_METHODS.split())}"
    if kind == 2:
        return f"({inner}) {draw.choice(_OPERATORS)} ({_make_value(draw, values, depth - 1)})"
    return f"[{inner}, {draw.choice(values)}, {{'k': {draw.choice(values)}}}]"


def make_schema(index: int) -> dict[str, Any]:
    """Schema number `index`: large, deep, cyclic, ambiguous or plain wrong."""
    draw = random.Random(index)
    count = draw.choice([3, 50, 500, 2000, 5000])
    text = {"type": "string"}
    match draw.randrange(12):
        case 0:
            return {"type": "object", "properties": {f"p{number}": text for number in range(count)}}
        case 1:
            return {"enum": [f"value {number} of {index}" for number in range(count * 4)]}
        case 2:
            return {"anyOf": [{"properties": {f"k{number}": text}} for number in range(min(count, 500))]}
        case 3:
            return {"$ref": "#"}
        case 4:
            return {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
        case 5:
            return {
                "type": "string",
                "pattern": "^" + draw.choice(["(a+)+$", "(a|b|ab)*c", "a{1,999}{1,99}", "[^x]*x"]),
            }
        case 6:
            schema: dict[str, Any] = text
            for _ in range(draw.choice([5, 80, 400])):
                schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
            return schema
        case 7:
            return {"type": "array", "items": {"anyOf": [text, {"$ref": "#"}]}, "minItems": draw.choice([0, 9, 9999])}
        case 8:
            return {"type": "string", "minLength": draw.choice([0, 10**4, 10**9]), "maxLength": draw.choice([1, 10**9])}
        case 9:
            return {"type": "integer", "minimum": draw.choice([0, -(10**30)]), "maximum": draw.choice([5, 10**30])}
        case 10:
            return {"not": {}, "if": text, "then": {"const": index}, "dependentRequired": {"a": ["b"] * count}}
        case _:
            return {"allOf": [{"anyOf": [{"const": number}, text]} for number in range(min(count, 60))]}


def make_flood(index: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request that asks for very much at once."""
    chat = "/v1/chat/completions"
    match index % 8:
        case 0:
            return "/v1/completions", {"prompt": " " * 8_000_000, "max_tokens": 1}
        case 1:
            return "/tokenize", {"content": " " * 4_000_000}
        case 2:
            return "/v1/completions", {"prompt": "one word after another " * 45_000, "max_tokens": 1}
        case 3:
            return chat, {"messages": [{"role": "user", "content": "Hi"}] * 100_000}
        case 4:
            return "/v1/completions", {
                "prompt": [f"{number} " + "word " * 850 for number in range(60)],
                "max_tokens": 4,
            }
        case 5:
            return "/v1/embeddings", {"input": [f"{number} " + "word " * 60 for number in range(500)]}
        case 6:
            return chat, {"messages": json.loads("[" * 200 + "]" * 200)}
        case _:
            schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(10_000)}}
            wanted = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
            return chat, {"messages": [{"role": "user", "content": "Hi"}], "response_format": wanted, "max_tokens": 4}


def make_texts(index: int) -> tuple[str, dict[str, Any]]:
    """A path and a body that ask for vectors: nothing, a million characters, ten thousand texts, control tokens, and
    sizes and ids that no model has."""
    path, body = (
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": "word " * 200_000}),
        ("/embed", {"inputs": "word " * 200_000, "truncate": True}),
        ("/v1/embeddings", {"input": [f"text {number}" for number in range(10_000)]}),
        ("/v1/embeddings", {"input": "<|im_start|><|im_end|>" * 2_000}),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**9}),
        ("/v1/embeddings", {"input": [[1, 2, -3], [10**9]]}),
        ("/v1/rerank", {"query": "", "documents": ["a" * 100_000, ""] * 8}),
        ("/embed", {"inputs": ["word " * 60_000] * 8, "truncate": True}),
    )[index % 9]
    return path, {"model": "demo", **body}
