"""Grammars over real vocabularies of every kind: masks allow exactly what can still become a match."""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mlxr.core.errors import InvalidRequest, TooComplex
from mlxr.core.types import Grammar
from mlxr.kernels.context import Context
from mlxr.loading import find_model
from mlxr.service import grammar as grammar_module
from mlxr.service.grammar import GrammarCompiler, GrammarConstraint, GrammarError, group_tokens
from mlxr.tokenizers import Tokenizer, from_folder, from_gguf, to_gguf_metadata

GOLDENS = Path(__file__).parent.parent / "tokenizers" / "goldens"
KINDS = [f"{name} {source}" for name in ("spm", "spm-merges", "llama3", "qwen2") for source in ("folder", "gguf")]
PADDING = 37  # rows of the output weights beyond the tokenizer
TEXT = re.compile(r'(hello|na\u00efve \u2603)\n[0-9]{1,3} "[A-Za-z ]{0,9}"')


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    name, source = request.param.split()
    return from_folder(GOLDENS / name) if source == "folder" else from_gguf(to_gguf_metadata(GOLDENS / name))


@pytest.fixture(scope="module", params=["functions", "classes"])
def host(request: pytest.FixtureRequest) -> Context | None:
    """Both ways to the grammar library: its C functions on a context's threads, and its Python classes."""
    return Context("cpu", threads=2) if request.param == "functions" else None


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, host: Context | None) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size + PADDING, host)


def allowed_by(constraint: GrammarConstraint, tokenizer: Tokenizer) -> list[int]:
    mask = np.zeros(-(-(tokenizer.vocab_size + PADDING) // 32), np.uint32)
    constraint.fill_mask(mask)
    bits: NDArray[np.uint8] = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[tokenizer.vocab_size :].any()
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def walk(constraint: GrammarConstraint, tokenizer: Tokenizer, seed: int, tokens: int = 300) -> bytes:
    """Draw a random answer from each mask; return its bytes. Ends with an end token, or after so many tokens."""
    generator, text = np.random.default_rng(seed), b""
    for _ in range(tokens):
        token_id = int(generator.choice(allowed_by(constraint, tokenizer)))
        if token_id in tokenizer.eos_ids:
            return text
        assert not tokenizer.is_special(token_id)
        constraint.accept(token_id)
        text += tokenizer.token_bytes(token_id)
    return text


def test_every_walk_is_a_match(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("regex", TEXT.pattern))
    texts = [walk(constraint.fork(), tokenizer, seed).decode() for seed in range(30)]
    assert all(TEXT.fullmatch(text) for text in texts)
    assert len(set(texts)) > 15


def test_groups_of_tokens_change_no_mask(
    tokenizer: Tokenizer, compiler: GrammarCompiler, host: Context | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Grammar("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 30}')
    grouped = compiler.compile(schema)
    monkeypatch.setattr(grammar_module, "group_tokens", lambda longest_bytes: [])
    single = GrammarCompiler(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size + PADDING, host).compile(schema)
    generator = np.random.default_rng(7)
    for _ in range(60):
        allowed = allowed_by(grouped, tokenizer)
        assert allowed == allowed_by(single, tokenizer)
        token_id = int(generator.choice(allowed))
        grouped.accept(token_id)
        single.accept(token_id)


def test_groups_that_no_token_is_in_are_left_out() -> None:
    everything = group_tokens(31)
    assert len(everything) == 3
    assert [group_tokens(longest) for longest in (10, 11, 30)] == [everything[:1], everything[:2], everything[:2]]


def test_a_text_can_be_written_as_the_tokenizer_writes_it(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    text = 'hello\n42 "two words"'
    token_ids = tokenizer.encode("\n" + text, add_special=False)
    while b"".join(map(tokenizer.token_bytes, token_ids)) != text.encode():
        token_ids = token_ids[1:]
    constraint = compiler.compile(Grammar("regex", r"(?s:.*)"))
    for token_id in token_ids:
        assert token_id in allowed_by(constraint, tokenizer)
        constraint.accept(token_id)
    assert tokenizer.eos_ids <= set(allowed_by(constraint, tokenizer))


def test_what_is_forced_is_written_as_the_tokenizer_writes_it(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint, token_ids = compiler.compile(Grammar("lark", 'start: "hello everybody there" /[0-9]/')), []
    while len(allowed := allowed_by(constraint, tokenizer)) == 1:
        constraint.accept(allowed[0])
        token_ids += allowed
    written = tokenizer.encode("\nhello everybody there", add_special=False)
    assert len(token_ids) >= 2
    assert any(written[start : start + len(token_ids)] == token_ids for start in range(len(written)))


def test_end_tokens_come_only_where_the_grammar_is_satisfied(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("regex", "a{2}b?"))
    for spelling in ("a", "a"):
        allowed = set(allowed_by(constraint, tokenizer))
        assert not allowed & tokenizer.eos_ids
        constraint.accept(next(token for token in allowed if tokenizer.token_bytes(token) == spelling.encode()))
    assert tokenizer.eos_ids < set(allowed_by(constraint, tokenizer))
    constraint.accept(
        next(token for token in allowed_by(constraint, tokenizer) if tokenizer.token_bytes(token) == b"b")
    )
    assert set(allowed_by(constraint, tokenizer)) == tokenizer.eos_ids
    constraint.accept(next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"c"))
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        allowed_by(constraint, tokenizer)


def test_tokens_can_be_named(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    named = next(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token))
    plain = next(token for token in range(500, tokenizer.vocab_size) if len(tokenizer.token_bytes(token)) > 2)
    name = tokenizer.token_text(named)
    constraint = compiler.compile(f'start: {name} <[{plain}]> "a" <[{named}]>')
    for token_id in (named, plain):
        assert allowed_by(constraint, tokenizer) == [token_id]
        constraint.accept(token_id)
    letter = next(token for token in allowed_by(constraint, tokenizer) if tokenizer.token_bytes(token) == b"a")
    constraint.accept(letter)
    assert allowed_by(constraint, tokenizer) == [named]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    from mlxr.formats import open_gguf

    with open_gguf(find_model("demo")) as file:
        return from_gguf(file.metadata)


@pytest.fixture
def demo_compiler(demo: Tokenizer, host: Context | None) -> GrammarCompiler:
    return GrammarCompiler(demo, demo.eos_ids, demo.vocab_size + PADDING, host)


def test_json_has_little_white_space(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = demo_compiler.compile(Grammar("json_schema", json.dumps(schema)))
    texts = [walk(constraint.fork(), demo, seed, tokens=400).decode() for seed in range(12)]
    assert all(re.match(r'^\{( |\n[ \t]{0,40})?"a"', text) for text in texts)
    assert any("\n" in text for text in texts)


def test_any_json_object(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    constraint = demo_compiler.compile(Grammar("json_object"))
    texts = [walk(constraint.fork(), demo, seed, tokens=60).decode("utf-8", "replace") for seed in range(20)]
    assert all(text.startswith("{") for text in texts)
    assert any(isinstance(json.loads(text), dict) for text in texts if text.endswith("}"))


def test_forks_go_their_own_ways(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    first = demo_compiler.compile(Grammar("regex", "(ab|cd)!"))
    second = first.fork()
    letters = {demo.token_bytes(token): token for token in range(demo.vocab_size)}
    first.accept(letters[b"a"])
    second.accept(letters[b"c"])
    third = second.fork()
    assert letters[b"b"] in allowed_by(first, demo)
    for constraint in (second, third):
        assert letters[b"d"] in allowed_by(constraint, demo)
        constraint.accept(letters[b"d"])
    assert allowed_by(demo_compiler.compile(Grammar("regex", "(ab|cd)!")), demo)  # the one kept for reuse is as new


def test_end_tokens_that_look_like_text_are_no_text(demo: Tokenizer, host: Context | None) -> None:
    newline = next(token for token in range(demo.vocab_size) if demo.token_bytes(token) == b"\n")
    compiler = GrammarCompiler(demo, [newline], demo.vocab_size + PADDING, host)
    allowed = allowed_by(compiler.compile(Grammar("lark", r'start: "a" /(.|\n)*/ "b"')), demo)
    constraint = compiler.compile(Grammar("lark", r'start: "a" /(.|\n)*/ "b"'))
    assert newline not in allowed
    constraint.accept(next(token for token in allowed if demo.token_bytes(token) == b"a"))
    assert newline not in allowed_by(constraint, demo)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(ab"), "invalid regex.*unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("lark", "x"), "Expected token ':'"),
        (Grammar("lark", "start: <|nobody|>"), r"unknown special token: \"<\|nobody\|>\""),
        ("start: other", 'unknown name: "other"'),
        (Grammar("json_schema", "{"), "the schema is not JSON"),
        (Grammar("json_schema", "[" * 100_000), "the schema is not JSON: .*recursion"),
        (Grammar("json_schema", "false"), "the schema must be an object, got false"),
        (Grammar("json_schema", '{"type": "colour"}'), "Invalid type: colour"),
        (Grammar("json_schema", '{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
    ],
    ids=str,
)
def test_grammars_that_cannot_be_enforced_are_refused(
    demo_compiler: GrammarCompiler, grammar: Grammar | str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)^response_format: .*{reason}") as caught:
        demo_compiler.compile(grammar, field="response_format")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 340


def test_a_model_without_an_end_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="grammar: the model has no end token"):
        GrammarCompiler(demo, [], demo.vocab_size).compile(Grammar("json_object"))


def test_a_full_lexer_is_renewed(
    demo: Tokenizer, demo_compiler: GrammarCompiler, host: Context | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer goes on with a new lexer once past masks, or other texts that share the lexer, have filled it."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 9}
    grammar = Grammar("json_schema", json.dumps(schema))
    roomy = [walk(demo_compiler.compile(grammar), demo, seed, tokens=60) for seed in range(4)]
    monkeypatch.setattr(grammar_module, "MAX_LEXER_STATES", 150)
    opened = 0
    open_matcher = grammar_module._Compiled.open_matcher

    def count(self: grammar_module._Compiled) -> object:
        nonlocal opened
        opened += 1
        return open_matcher(self)

    monkeypatch.setattr(grammar_module._Compiled, "open_matcher", count)
    tight_compiler = GrammarCompiler(demo, demo.eos_ids, demo.vocab_size + PADDING, host)
    constraints = [tight_compiler.compile(grammar) for _ in range(4)]
    assert [walk(constraint, demo, seed, tokens=60) for seed, constraint in enumerate(constraints)] == roomy
    assert opened > 2


def test_a_grammar_that_outgrows_its_bounds_is_an_error(
    demo: Tokenizer, host: Context | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_LEXER_STATES", 120)
    compiler = GrammarCompiler(demo, demo.eos_ids, demo.vocab_size + PADDING, host)
    constraint = compiler.compile(Grammar("regex", "([a-z]{1,300}[0-9]){1,100}"))
    with pytest.raises(TooComplex, match="too many states"):
        walk(constraint, demo, 1)


def test_after_many_tokens_a_shared_grammar_is_compiled_anew(
    demo: Tokenizer, demo_compiler: GrammarCompiler, host: Context | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_SHARED_TOKENS", 10)
    grammar = Grammar("regex", "[ab]{100}")
    first, second = demo_compiler.compile(grammar), demo_compiler.compile(grammar)
    assert second._compiled is first._compiled
    walk(second, demo, 1)
    assert (demo_compiler.compile(grammar)._compiled is first._compiled) is (host is not None)


def test_old_grammars_are_forgotten(demo_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_compiler.compile(Grammar("regex", "a{1}"))
    monkeypatch.setattr(grammar_module, "MAX_COMPILED_BYTES", 3 * next(iter(demo_compiler._compiled.values())).nbytes)
    for number in range(5):
        demo_compiler.compile(Grammar("regex", f"a{{{number + 1}}}"))
    assert len(demo_compiler._compiled) == 3


@pytest.mark.slow
def test_many_schemas_take_bounded_memory(demo: Tokenizer, host: Context | None) -> None:
    compiler = GrammarCompiler(demo, demo.eos_ids, demo.vocab_size + PADDING, host)
    before = read_resident_bytes()
    for number in range(400):
        properties = {f"p{number}_{index}": {"type": ["string", "integer"]} for index in range(8)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert len(compiler._compiled) < 350
    assert read_resident_bytes() - before < grammar_module.MAX_COMPILED_BYTES


def test_what_answers_leave_in_a_lexer_counts(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    constraint = demo_compiler.compile(Grammar("regex", "[a-z]{50}"))
    before = constraint._compiled.nbytes
    walk(constraint, demo, 1)
    assert (constraint._compiled.nbytes > before) is constraint._compiled._library.shares_lexers


@pytest.mark.slow
def test_large_grammars_take_bounded_memory(demo: Tokenizer, host: Context | None) -> None:
    compiler = GrammarCompiler(demo, demo.eos_ids, demo.vocab_size + PADDING, host)
    before = read_resident_bytes()
    for number in range(12):
        names = [f"value {index} of the list number {number}" for index in range(20_000)]
        compiler.compile(Grammar("json_schema", json.dumps({"enum": names})))
    assert len(compiler._compiled) < 12
    assert read_resident_bytes() - before < 1.5 * grammar_module.MAX_COMPILED_BYTES


def read_resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(10_000)}},
        {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(2_500)}},
    ],
)
def test_schemas_that_take_too_long_are_refused(demo_compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    start_s = time.process_time()
    with pytest.raises(InvalidRequest, match=r"too many|too big|Too many"):
        demo_compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert time.process_time() - start_s < 10


@pytest.mark.slow
def test_wide_grammars_are_answered(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    words = [f" word{index * 7919 % 100_000}" for index in range(2500)]
    choice = "root ::= " + " | ".join(map(json.dumps, words))
    lark = "start: " + " | ".join(f"w{index}" for index in range(2001)) + "\n"
    lark += "".join(f"w{index}: {json.dumps(word)}\n" for index, word in enumerate(words[:2001]))
    branches = [{"type": "object", "properties": {word: {"type": "null"}}, "required": [word]} for word in words[:2001]]
    for grammar in (
        Grammar("gbnf", choice),
        Grammar("lark", lark),
        Grammar("json_schema", json.dumps({"anyOf": branches})),
    ):
        assert walk(demo_compiler.compile(grammar), demo, 3, tokens=60)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("gbnf", 'root ::= ("a"{1,1000}){1,1000}'.replace("(", "((").replace(")", "){1,1000})")),
        Grammar("regex", "x((a{1,1000}){1,1000}){1,1000}"),
        Grammar("lark", 'start: "x" (("a"{1,1000}){1,1000}){1,1000}'),
        Grammar("json_schema", '{"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_what_has_too_many_meanings_is_refused_before_it_is_answered(
    demo_compiler: GrammarCompiler, grammar: Grammar
) -> None:
    with pytest.raises(InvalidRequest, match=r"grammar: .*[Tt]oo many"):
        demo_compiler.compile(grammar)


def test_lists_of_words_take_little_time(demo_compiler: GrammarCompiler) -> None:
    start_s = time.process_time()
    demo_compiler.compile(Grammar("gbnf", "root ::= " + " | ".join(f'"w{index}"' for index in range(6000))))
    assert time.process_time() - start_s < 3


def test_large_schemas_that_people_write_work(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    optional = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(500)}}
    branches = [{"properties": {f"k{index}": {"type": "integer"}}, "required": [f"k{index}"]} for index in range(200)]
    for schema in (optional, {"type": "object", "anyOf": branches}):
        assert walk(demo_compiler.compile(Grammar("json_schema", json.dumps(schema))), demo, 1).startswith(b"{")


def test_threads_share_a_compiler(demo: Tokenizer, demo_compiler: GrammarCompiler) -> None:
    texts: dict[int, bytes] = {}

    def answer(number: int) -> None:
        constraint = demo_compiler.compile(Grammar("regex", "[a-z]{5,9} [0-9]{3}"))
        texts[number] = walk(constraint, demo, number)

    threads = [threading.Thread(target=answer, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = demo_compiler.compile(Grammar("regex", "[a-z]{5,9} [0-9]{3}"))
    assert texts == {number: walk(alone.fork(), demo, number) for number in range(8)}
