"""A small interface to llguidance: matchers take tokens and write masks of the tokens that may come next.

If its C functions fit and the native module has a thread to spare, that thread computes masks beside the engine's work
(`FunctionLibrary`). Otherwise the library's Python classes compute them at once (`ClassLibrary`), which is faster in
one thread: copies of a matcher share what its lexer has learnt. Both give the same masks. Knows no requests.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Collection, Sequence
from ctypes import c_bool, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, _lib

from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.frozen import frozen
from mlxr.engine.request import Mask
from mlxr.tokenizers import Tokenizer

SPECIAL_MARKER = b"\xff"  # the library writes it before names of special tokens; UTF-8 never has this byte
_MAX_FORCED = 4096
_MAX_TOKEN_BYTES = 1000  # the library's trie is no deeper than 1024


class GrammarVocabulary:
    """A vocabulary with the attributes and the call that `llguidance.TokenizerWrapper` needs."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.special_token_ids = [index for index in known if tokenizer.is_special(index) or index in eos_ids]
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [_find_bytes(tokenizer, index) for index in known] + [b""] * (vocab_size - len(known))
        special = set(self.special_token_ids)
        self._by_bytes = {part: index for index, part in enumerate(self.tokens) if part and index not in special}
        self._longest = max(map(len, self._by_bytes), default=1)
        self._forced: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens for a text that a grammar forces: the tokenizer's own, if they are exactly this text.

        Called in every step of the names in a schema, so results are kept.
        """
        token_ids = self._forced.get(text)
        if token_ids is None:
            if len(self._forced) >= _MAX_FORCED:
                self._forced.clear()
            token_ids = self._forced[text] = self._find_tokens(text)
        return token_ids

    def list_longest_first(self) -> npt.NDArray[np.intp]:
        """Return all tokens that have a text, those with the most bytes first."""
        lengths = np.array([len(part) for part in self.tokens])
        lengths[self.special_token_ids] = 0
        order = np.argsort(-lengths, kind="stable")
        return order[: np.count_nonzero(lengths)]

    def _find_tokens(self, text: bytes) -> list[int]:
        """Return tokens of exactly this text. If the tokenizer puts a space before texts, or changes them, it encodes
        the text as a second line; if that fails too, the longest tokens are taken.
        """
        for start in ("", "\n"):
            try:
                token_ids = self._tokenizer.encode(start + text.decode(), add_special=False)
            except (UnicodeDecodeError, InvalidRequest):
                break
            tail = self._cut_tail(token_ids, text)
            if tail is not None:
                return tail
        return self.take_longest(text)

    def _cut_tail(self, token_ids: list[int], text: bytes) -> list[int] | None:
        """Return the last of `token_ids` that together spell `text`; None if there are none."""
        rest = text
        for place in range(len(token_ids) - 1, -1, -1):
            part = self.tokens[token_ids[place]]
            if not part or not rest.endswith(part):
                return None
            rest = rest[: len(rest) - len(part)]
            if not rest:
                return token_ids[place:]
        return None

    def take_longest(self, text: bytes) -> list[int]:
        """Return tokens from the left, always the longest; stops where no token fits."""
        token_ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._by_bytes), None)
            if end is None:
                break
            token_ids.append(self._by_bytes[text[start:end]])
            start = end
        return token_ids


def _find_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    part = tokenizer.token_bytes(token_id)
    return b"" if part.startswith(SPECIAL_MARKER) or len(part) > _MAX_TOKEN_BYTES else part


_VERSION = b"llguidance@1.9."
_KIND = b"llguidance"  # the kind of a grammar that is JSON with grammars in it
_REASON_BYTES = 1000
# In the order of GrammarFunctions in csrc/grammar/grammar_matcher.h.
_CALLED_NATIVELY = (
    "llg_matcher_consume_tokens",
    "llg_matcher_compute_mask_into",
    "llg_matcher_get_error",
    "llg_clone_matcher",
    "llg_free_matcher",
    "llg_matcher_validate_tokens",
)
_MARK = 0xA5  # fills memory that the library must not touch
_ADDRESS = 0x1234


class _Limits(ctypes.Structure):
    _fields_ = (
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    )


class _MatcherInit(ctypes.Structure):
    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", _Limits),
    )


class _TokenizerInit(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", ctypes.POINTER(c_uint32)),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", c_void_p),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", ctypes.POINTER(c_char_p)),
        ("tok_eos_extra", ctypes.POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    )


@frozen
class Limits:
    """Limits of one grammar: states of its lexer, symbols, items of the parser in one step."""

    lexer_states: int
    symbols: int
    step_items: int


@functools.cache
def find_functions() -> ctypes.CDLL | None:
    """Return the library's C functions; None if they are missing, or not the known ones."""
    try:
        library = ctypes.CDLL(_lib.__file__)
        library.llg_get_version.restype = c_char_p
        library.llg_constraint_init_set_defaults.argtypes = [c_void_p, c_void_p]
        library.llg_constraint_init_set_defaults.restype = None
        library.llg_new_tokenizer_v2.argtypes = [ctypes.POINTER(_TokenizerInit), c_char_p, c_size_t]
        library.llg_new_tokenizer_v2.restype = c_void_p
        library.llg_free_tokenizer.argtypes = [c_void_p]
        library.llg_free_tokenizer.restype = None
        library.llg_new_matcher.argtypes = [ctypes.POINTER(_MatcherInit), c_char_p, c_char_p]
        library.llg_new_matcher.restype = c_void_p
        _find_addresses(library)
    except (OSError, AttributeError):
        return None
    is_known = library.llg_get_version().startswith(_VERSION) and fits_struct(library)
    return library if is_known else None


def fits_struct(library: ctypes.CDLL) -> bool:
    """Return True if the library's `_MatcherInit`, which states no size, has our layout, judged by its defaults."""
    wanted = _MatcherInit(_ADDRESS, 0, 1, False, False)
    wanted.limits = _Limits(2000, 1_000_000, 200_000, 50_000, 250_000, 500_000, True, True)
    size = ctypes.sizeof(_MatcherInit)
    memory = (ctypes.c_uint8 * (4 * size))(*[_MARK] * (4 * size))
    library.llg_constraint_init_set_defaults(memory, _ADDRESS)
    return _list_values(_MatcherInit.from_buffer(memory)) == _list_values(wanted) and set(memory[size:]) == {_MARK}


def _list_values(struct: ctypes.Structure) -> list[object]:
    values = [getattr(struct, str(field[0])) for field in struct._fields_]
    return [_list_values(value) if isinstance(value, ctypes.Structure) else value for value in values]


def _find_addresses(library: ctypes.CDLL) -> list[int]:
    return [ctypes.cast(getattr(library, name), c_void_p).value or 0 for name in _CALLED_NATIVELY]


class FunctionLibrary:
    """One vocabulary; see `grammar_library.Library`. Its matchers are `GrammarMatcher`s of the native module, which
    keep it alive.
    """

    shares_lexers = False

    def __init__(
        self,
        functions: ctypes.CDLL,
        module: Any,
        runtime: Any,
        vocabulary: GrammarVocabulary,
        eos_ids: Collection[int],
        groups: list[str],
    ) -> None:
        self._functions, self._module, self._runtime = functions, module, runtime
        self._addresses = _find_addresses(functions)
        self._mask_words = -(-len(vocabulary.tokens) // 32)
        self._forced = module.ForcedTokens(vocabulary)
        self._tokenizer = self._open_tokenizer(vocabulary, sorted(eos_ids), groups)
        # Not freed at the end of the process: there is no need, and matchers may still use it.
        weakref.finalize(self, functions.llg_free_tokenizer, self._tokenizer).atexit = False

    def open_matcher(self, source: str, limits: Limits) -> Any:
        """Open a matcher for a grammar, as `grammar_library.Library` asks."""
        init = _MatcherInit()
        self._functions.llg_constraint_init_set_defaults(ctypes.byref(init), self._tokenizer)
        init.log_stderr_level = 0
        init.limits.max_lexer_states = limits.lexer_states
        init.limits.max_grammar_size = limits.symbols
        init.limits.max_items_in_row = init.limits.step_max_items = limits.step_items
        init.limits.verbose_errors = False
        matcher = self._functions.llg_new_matcher(ctypes.byref(init), _KIND, source.encode())
        return self._module.GrammarMatcher(self._runtime, self, self._addresses, matcher, self._mask_words)

    def _open_tokenizer(self, vocabulary: GrammarVocabulary, eos_ids: list[int], groups: list[str]) -> int:
        """Make the library's copy of the vocabulary; returns its address."""
        special = set(vocabulary.special_token_ids)
        tokens = [SPECIAL_MARKER * (index in special) + part for index, part in enumerate(vocabulary.tokens)]
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(tokens),
            tok_eos=eos_ids[0],
            token_lens=(c_uint32 * len(tokens))(*map(len, tokens)),
            token_bytes=b"".join(tokens),
            tokenize_assumes_string=True,
            tokenize_fn=self._module.ForcedTokens.function,
            tokenize_user_data=self._forced.address,
            slices=(c_char_p * (len(groups) + 1))(*[group.encode() for group in groups], None),
            tok_eos_extra=(c_uint32 * len(eos_ids))(*eos_ids[1:]),
            tok_eos_extra_count=len(eos_ids) - 1,
        )
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        tokenizer = self._functions.llg_new_tokenizer_v2(ctypes.byref(init), reason, _REASON_BYTES)
        if not tokenizer:
            raise MlxrError(f"the grammar library refused the vocabulary: {reason.value.decode(errors='replace')}")
        return int(tokenizer)


class NativeHost(Protocol):
    """The owner of the native module and its runtime (None without one); `kernels.context.Context` implements it."""

    module: Any
    native: Any


class Matcher(Protocol):
    """The state of one grammar in one answer. After an error it no longer changes and allows no token."""

    def accept(self, token_id: int) -> None:
        """Go on after a token and compute the next mask, now or beside the caller's work."""
        ...

    def replay(self, token_ids: Sequence[int]) -> None:
        """Go on after tokens whose masks are not needed."""
        ...

    def write_mask(self, mask: Mask) -> bool:
        """Write the bits of the tokens that may come next, (ceil(vocab_size / 32),); returns False after an error."""
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the number of these tokens that may come next, one after another; 0 after an error. A pure query."""
        ...

    def read_error(self) -> str:
        """Return the library's error message; empty without an error."""
        ...

    def fork(self) -> Matcher:
        """Return a copy in the same state."""
        ...


class Library(Protocol):
    """The library for one vocabulary. `shares_lexers` is true if copies of a matcher fill one lexer together."""

    shares_lexers: bool

    def open_matcher(self, source: str, limits: Limits) -> Matcher:
        """Return a matcher in the first state, with its own lexer; `read_error` says what is wrong with the grammar."""
        ...


def open_library(
    vocabulary: GrammarVocabulary, eos_ids: Collection[int], groups: list[str], host: NativeHost | None
) -> Library:
    """Open the library for one vocabulary; `groups` come from `service.grammar.group_tokens`."""
    if host is not None and host.native is not None and host.native.threads > 1:
        functions = find_functions()
        if functions is not None:
            return FunctionLibrary(functions, host.module, host.native, vocabulary, eos_ids, groups)
    return ClassLibrary(vocabulary, eos_ids, groups)


class ClassLibrary:
    """The library by its Python classes."""

    shares_lexers = True

    def __init__(self, vocabulary: GrammarVocabulary, eos_ids: Collection[int], groups: list[str]) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=sorted(eos_ids), slices=groups)
        self._mask_words = -(-len(vocabulary.tokens) // 32)

    def open_matcher(self, source: str, limits: Limits) -> ClassMatcher:
        """Open a matcher for a grammar, as `Library` asks."""
        given = LLParserLimits(
            max_lexer_states=limits.lexer_states,
            max_grammar_size=limits.symbols,
            max_items_in_row=limits.step_items,  # one row may take all that a step may
            step_max_items=limits.step_items,
            verbose_errors=False,
        )
        return ClassMatcher(LLMatcher(self._tokenizer, source, log_level=0, limits=given), self._mask_words)


class ClassMatcher:
    """A matcher by the library's Python class; see `Matcher`. `accept` computes masks at once, while the processor's
    caches hold what they need.
    """

    def __init__(self, inner: LLMatcher, mask_words: int) -> None:
        self._inner = inner
        self._mask: Mask = np.zeros(mask_words, np.uint32)
        self._address, self._mask_bytes = self._mask.ctypes.data, self._mask.nbytes
        self._is_ready = False

    def accept(self, token_id: int) -> None:
        """Take one token, and compute the mask of the next at once."""
        self._inner.consume_token(token_id)
        self._compute_mask()

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take several tokens at once; the mask is computed when it is asked for."""
        self._inner.consume_tokens(list(token_ids))
        self._is_ready = False

    def write_mask(self, mask: Mask) -> bool:
        """Write which tokens may come next into `mask`; returns False after an error."""
        if not self._is_ready:
            self._compute_mask()
        if self._inner.is_error():
            return False
        mask[:] = self._mask
        return True

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Ask the library how far it could go on with these tokens."""
        return 0 if self._inner.is_error() else self._inner.validate_tokens(list(token_ids))

    def read_error(self) -> str:
        """Return the library's error message; empty without an error."""
        return self._inner.get_error()

    def fork(self) -> ClassMatcher:
        """Return an independent copy in the same state."""
        return ClassMatcher(self._inner.deep_copy(), len(self._mask))

    def _compute_mask(self) -> None:
        self._inner.unsafe_compute_mask_ptr(self._address, self._mask_bytes)
        self._is_ready = True
