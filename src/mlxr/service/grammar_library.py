"""llguidance behind one small face: matchers take tokens and write masks of what may come next.

Where its C functions fit and the native module has a thread to spare, that computes masks while the engine does other
things (`grammar_functions`); else the library's Python classes compute them at once, which is faster in one thread:
copies of a matcher share what its lexer has learnt. Both give the same masks. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mlxr.engine.constraint import Mask
from mlxr.service.grammar_functions import FunctionLibrary, Limits, find_functions
from mlxr.service.grammar_vocabulary import GrammarVocabulary


class NativeHost(Protocol):
    """What has the native module and its runtime, None where there is none (`mlxr.kernels.context.Context`)."""

    module: Any
    native: Any


class Matcher(Protocol):
    """The state of one grammar in one answer. After an error it stays as it is, and nothing is allowed any more."""

    def accept(self, token_id: int) -> None:
        """Go on after a token and get the next mask ready, now or beside what the caller does."""
        ...

    def replay(self, token_ids: Sequence[int]) -> None:
        """Go on after tokens whose masks nobody wants."""
        ...

    def write_mask(self, mask: Mask) -> bool:
        """Write the bits of what may come next, (ceil(vocab_size / 32),); False after an error."""
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens could come next, one after another; 0 after an error. The state stays as it is."""
        ...

    def read_error(self) -> str:
        """What the library says, empty without an error."""
        ...

    def fork(self) -> Matcher:
        """One more of the same state."""
        ...


class Library(Protocol):
    """One vocabulary. `shares_lexers`: whether copies of a matcher fill one lexer together, instead of one each."""

    shares_lexers: bool

    def open_matcher(self, source: str, limits: Limits) -> Matcher:
        """In the first state, with a lexer of its own; `read_error` says what is wrong with the grammar."""
        ...


def open_library(
    vocabulary: GrammarVocabulary, eos_ids: Collection[int], groups: list[str], host: NativeHost | None
) -> Library:
    """The library for one vocabulary; `groups` as `service.grammar.group_tokens` gives them."""
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
    """A matcher by the library's Python class; see `Matcher`. Its masks are computed in `accept`: what they need is at
    hand in the caches then.
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
        """The library's words for what went wrong; empty if nothing did."""
        return self._inner.get_error()

    def fork(self) -> ClassMatcher:
        """Return a copy that goes on by itself from the same state."""
        return ClassMatcher(self._inner.deep_copy(), len(self._mask))

    def _compute_mask(self) -> None:
        self._inner.unsafe_compute_mask_ptr(self._address, self._mask_bytes)
        self._is_ready = True
