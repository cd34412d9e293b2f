"""Turns grammars (JSON schemas, regular expressions, Lark) into masks of the tokens that may come next, by llguidance.

A `GrammarCompiler` belongs to one loaded model, whose vocabulary it hands to the library once. It compiles constraints
for the engine; each answer has its own state. Knows no requests and no batch.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mlxr.core.errors import InvalidRequest, TooComplex
from mlxr.core.types import Grammar
from mlxr.engine.request import Mask
from mlxr.service.closing import Closer, ClosingTokens
from mlxr.service.gbnf import GbnfError, translate
from mlxr.service.grammar_library import GrammarVocabulary, Library, Limits, Matcher, NativeHost, open_library
from mlxr.service.schema import SchemaError, enforce, summarize
from mlxr.service.tools.format import JSON_STYLE
from mlxr.tokenizers import Tokenizer

MAX_COMPILED_BYTES = 64 << 20  # of the grammars that are kept for later requests: some 300 schemas
MAX_SOURCE_CHARACTERS = 4 << 20
# A grammar takes some 40 bytes for each character of its source, and 1.5 kB for each of its symbols, of which there
# can be one in four characters.
_BYTES_PER_CHARACTER, _SYMBOL_BYTES_PER_CHARACTER, _SYMBOL_BYTES = 40, 400, 1500
_BYTES_PER_SHARED_TOKEN = 8000  # that a shared lexer grows with each token of the answers
# A mask of a large vocabulary takes some 15,000 items with everyday grammars, in 2 ms, and 30 ms with 2,000 optional
# properties. At the bound it takes up to a second; the library's own bounds would allow half a minute.
MAX_SYMBOLS, MAX_STEP_ITEMS = 20_000, 20_000
_PROBED_TOKENS = 3
# A lexer gains states with every new text and keeps them. States take 1 to 2 kB.
MAX_LEXER_STATES = 50_000
MAX_SHARED_TOKENS = 4096  # accepted by all answers that share a lexer; then the next one gets its own

# JSON as models write it: compact, with single spaces, or over several lines. More white space has no meaning, and a
# confused model writes it without end.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,40}", "coerce_one_of": True}


_CHARACTERS_PER_TOKEN = 2
_UNKNOWN_CHARACTERS = 64  # assumed for the largest part of a grammar that is no schema
_MOST_MARKS = 24
_LIMIT = re.compile(r"\btoo (many|large|complex|big|deep)\b|\blimit\b", re.IGNORECASE)  # the library's words
_MARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|<\[(\d+)\]>')


class GrammarError(Exception):
    """A token did not fit the grammar."""


class _Compiled:
    """A compiled grammar in its first state; `shared_tokens` counts the tokens of all copies if they share a lexer."""

    def __init__(
        self, library: Library, source: str, relaxed: tuple[str, ...], heaviest: int, marks: Sequence[tuple[int, ...]]
    ) -> None:
        self._library, self._source, self.relaxed, self.marks = library, source, relaxed, marks
        self.heaviest_tokens = heaviest // _CHARACTERS_PER_TOKEN
        self.first = self.open_matcher()
        self.shared_tokens = 0

    def open_matcher(self) -> Matcher:
        """Return a matcher in the first state, with a lexer of its own."""
        return self._library.open_matcher(self._source, Limits(MAX_LEXER_STATES, MAX_SYMBOLS, MAX_STEP_ITEMS))

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes, about."""
        characters = len(self._source)
        symbols_bytes = min(characters * _SYMBOL_BYTES_PER_CHARACTER, MAX_SYMBOLS * _SYMBOL_BYTES)
        shared_bytes = self.shared_tokens * _BYTES_PER_SHARED_TOKEN if self._library.shares_lexers else 0
        return characters * _BYTES_PER_CHARACTER + symbols_bytes + shared_bytes

    def find_fault(self, longest_first: npt.NDArray[np.intp], mask_words: int) -> str:
        """Return the reason why no answer can follow the grammar; "" if one can.

        The first mask takes longest. Long tokens show grammars with too many meanings, such as repetitions of
        repetitions; `longest_first` are all tokens that have a text.
        """
        probe, mask = self.first.fork(), np.zeros(mask_words, np.uint32)
        for _ in range(_PROBED_TOKENS + 1):
            if not probe.write_mask(mask):
                return probe.read_error()
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[longest_first]
            if not allowed.any():
                break
            probe.accept(int(longest_first[allowed.argmax()]))
        return ""

    @property
    def is_used_up(self) -> bool:
        """True if the next answer should start with a new one, because the shared lexer keeps too much."""
        return self._library.shares_lexers and self.shared_tokens > MAX_SHARED_TOKENS


class GrammarConstraint:
    """The state of one grammar in one answer, for the engine (implements `engine.request.TokenConstraint`).

    If a token does not fit, the next `fill_mask` raises.
    """

    def __init__(self, compiled: _Compiled, matcher: Matcher, accepted: list[int], closer: Closer) -> None:
        self._compiled, self._matcher, self._accepted, self._closer = compiled, matcher, accepted, closer

    needs_end = True

    def count_free(self) -> int:
        """Return 0: no token is free, the grammar is asked for each."""
        return 0

    def fill_mask(self, mask: Mask) -> None:
        """Set the bits of the tokens that may come next, (ceil(vocab_size / 32),).

        Raises GrammarError, and TooComplex if the library's limits are reached.
        """
        if not self._matcher.write_mask(mask):
            # The lexer may be full of states, also of other answers, that are no longer needed: go on with a new one.
            self._matcher = self._compiled.open_matcher()
            self._matcher.replay(self._accepted)
            if not self._matcher.write_mask(mask):
                reason = summarize(self._matcher.read_error())
                raise (TooComplex if _LIMIT.search(reason) else GrammarError)(reason)

    def accept(self, token_id: int) -> None:
        """Go on after the chosen token; computing the next mask may begin now."""
        self._matcher.accept(token_id)
        self._accepted.append(token_id)
        self._closer.accept(token_id)
        self._compiled.shared_tokens += 1

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the number of these tokens, from the first on, that the grammar allows one after another."""
        return self._matcher.count_allowed(token_ids)

    def look_ahead(self, tokens_left: int) -> int:
        """Return the number of newest tokens that may have to be taken back; see `Closer.look`."""
        return self._closer.look(self._matcher, tokens_left)

    def close(self) -> Sequence[int]:
        """Return the tokens that end the answer in place of those that are taken back."""
        return self._closer.close()

    @property
    def relaxed(self) -> tuple[str, ...]:
        """The keywords of the schema that no mask enforces."""
        return self._compiled.relaxed

    def fork(self) -> GrammarConstraint:
        """Return a copy in the same state."""
        return GrammarConstraint(self._compiled, self._matcher.fork(), list(self._accepted), self._closer.fork())


class GrammarCompiler:
    """Grammars for one model: `vocab_size` logits, answers that end with `eos_ids`. Safe to use from several threads.

    The threads of `host`, the model's context, compute masks beside the engine's work; without it the engine's thread
    does. Compiling takes from one to some hundred milliseconds; the first time also reads the vocabulary.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int, host: NativeHost | None = None
    ) -> None:
        self._vocabulary = tokenizer, frozenset(eos_ids), vocab_size
        self._host = host
        self._lock = threading.Lock()
        self._library: Library | None = None
        self._compiled: OrderedDict[tuple[Grammar, Grammar | None], _Compiled] = OrderedDict()

    def compile(
        self, grammar: Grammar | str, answer: Grammar | None = None, *, field: str = "grammar"
    ) -> GrammarConstraint:
        """Return the constraint of an answer that must follow `grammar`, in its first state.

        A plain string is Lark, as is the text of a `lark` grammar; both may name special tokens as `<|name|>` and any
        token by its id, `<[123]>`. In Lark `@answer` stands for the grammar `answer`. Raises InvalidRequest, which
        names `field` and the fault, if a grammar is broken, too large or uses what the library cannot enforce, or if
        the model has no end token.
        """
        if isinstance(grammar, str):
            grammar = Grammar("lark", grammar)
        with self._lock:
            library = self._open_library(field)
            compiled = self._compiled.get((grammar, answer))
        if compiled is None or compiled.is_used_up:
            if len(grammar.text) > MAX_SOURCE_CHARACTERS:
                raise InvalidRequest(field, f"has {len(grammar.text)} characters, more than {MAX_SOURCE_CHARACTERS}")
            marks = [self._closing_tokens.spell(mark) for mark in list_marks(grammar)]
            compiled = _Compiled(library, *_write_source(grammar, answer, field), marks)
            if reason := compiled.find_fault(self._longest_first, -(-self._vocabulary[2] // 32)):
                raise InvalidRequest(field, summarize(reason))
        with self._lock:
            self._compiled[grammar, answer] = compiled
            self._compiled.move_to_end((grammar, answer))
            while len(self._compiled) > 1 and self._sum_bytes() > MAX_COMPILED_BYTES:
                self._compiled.popitem(last=False)
        closer = Closer(self._closing_tokens, compiled.heaviest_tokens, compiled.marks)
        return GrammarConstraint(compiled, compiled.first.fork(), [], closer)

    def _sum_bytes(self) -> int:
        return sum(compiled.nbytes for compiled in self._compiled.values())

    def _open_library(self, field: str) -> Library:
        """Return the library with the vocabulary; opens it the first time."""
        if self._library is None:
            tokenizer, eos_ids, vocab_size = self._vocabulary
            if not eos_ids:
                raise InvalidRequest(field, "the model has no end token, so that no answer could end with the grammar")
            vocabulary = GrammarVocabulary(tokenizer, eos_ids, vocab_size)
            groups = group_tokens(max(map(len, vocabulary.tokens)))
            self._closing_tokens = ClosingTokens(vocabulary, eos_ids)
            self._longest_first = vocabulary.list_longest_first()
            self._library = open_library(vocabulary, eos_ids, groups, self._host)
        return self._library


def group_tokens(longest_bytes: int) -> list[str]:
    """Return a pattern for each group of tokens that the library allows at once inside a text of JSON.

    These are its own groups for texts, without those that have no token, as each takes time in every mask, and without
    the group for white space of any length, which `_JSON_OPTIONS` never allows.
    """
    text = r'[^"\\\x00-\x1F\x7F]'
    groups = {0: text + "{1,10}", 10: text + "{1,30}", 30: text + "+"}
    return [pattern for shorter, pattern in groups.items() if longest_bytes > shorter]


def list_marks(grammar: Grammar) -> list[bytes | int]:
    """Return the marks with which texts may end: the texts with signs, and tokens, that a GBNF or Lark grammar names.

    Only the first ones, and none from schemas within it.
    """
    marks: dict[bytes | int, None] = {}
    text = re.sub(r"%json.*", "", grammar.text) if grammar.kind in ("gbnf", "lark") else ""
    for found in _MARK.finditer(text):
        try:
            mark = found[1] or json.loads(found[0])
        except ValueError:  # an escape that JSON does not know
            continue
        if found[1] or not (mark.isalnum() or not mark):
            marks[int(mark) if found[1] else mark.encode(errors="ignore")] = None
        if len(marks) == _MOST_MARKS:
            break
    return list(marks)


def _write_source(grammar: Grammar, answer: Grammar | None, field: str) -> tuple[str, tuple[str, ...], int]:
    """Return the grammars in the library's form, the schema's keywords that they leave out, and the weight of its
    heaviest part.
    """
    part, relaxed, heaviest = _write_part(grammar, _JSON_OPTIONS, field)
    parts = [part]
    if answer is not None:
        part, relaxed, heaviest = _write_part(answer, JSON_STYLE, answer.field)
        parts.append({**part, "name": "answer"})
    return json.dumps({"grammars": parts}), relaxed, heaviest


def _write_part(
    grammar: Grammar, options: Mapping[str, object], field: str
) -> tuple[dict[str, object], tuple[str, ...], int]:
    match grammar.kind:
        case "json_object":
            return {"json_schema": {"type": "object", "x-guidance": options}}, (), 0
        case "json_schema":
            try:
                enforceable = enforce(grammar.text)
            except SchemaError as error:
                raise InvalidRequest(field, str(error)) from None
            whole = {**enforceable.schema, "x-guidance": options}
            return {"json_schema": whole}, enforceable.relaxed, enforceable.heaviest
        case "regex":
            source: dict[str, object] = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]
            return source, (), 0
        case "lark":
            return {"lark_grammar": grammar.text}, (), _UNKNOWN_CHARACTERS
        case "gbnf":
            try:
                return {"lark_grammar": translate(grammar.text)}, (), _UNKNOWN_CHARACTERS
            except GbnfError as error:
                raise InvalidRequest(field, str(error)) from None
            except RecursionError:
                raise InvalidRequest(field, "the grammar is nested too deeply") from None
