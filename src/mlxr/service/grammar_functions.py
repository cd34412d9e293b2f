"""llguidance by its C functions, which need no interpreter: masks are then computed on the native module's threads.

The functions are in the library's own extension module; facts from its header `parser/llguidance.h`, version 1.9. What
it promises least, the structs, is checked before use: if anything is not as expected the functions count as missing.
Knows vocabularies and grammars as the library writes them, and no requests.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Collection
from ctypes import c_bool, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from llguidance import _lib

from mlxr.core.errors import MlxrError
from mlxr.service.grammar_vocabulary import SPECIAL_MARKER, GrammarVocabulary

_VERSION = b"llguidance@1.9."
_KIND = b"llguidance"  # of a grammar: JSON with grammars in it
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
_MARK = 0xA5  # what memory that the library must not touch is filled with
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Says what one grammar may ask of the library: states of its lexer, symbols, items of the parser in one step."""

    lexer_states: int
    symbols: int
    step_items: int


@functools.cache
def find_functions() -> ctypes.CDLL | None:
    """The library's C functions; None if they are not there, or not those that are known here."""
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
    """Whether the struct that has no size in it is laid out as it is here, judged by the defaults set in it."""
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
        # The process's end needs no freeing, and would come too early for matchers that are still there.
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
        """The library's copy of the vocabulary."""
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
