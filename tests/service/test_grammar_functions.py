"""The grammar library's C functions: the installed ones are known here, and unknown ones are not used."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import _lib

from mlxr.core.errors import MlxrError
from mlxr.kernels.context import Context
from mlxr.loading import LoadedModel, load
from mlxr.service import grammar_library
from mlxr.service.grammar_library import (
    ClassLibrary,
    FunctionLibrary,
    GrammarVocabulary,
    Limits,
    find_functions,
    fits_struct,
    open_library,
)

LIMITS = Limits(lexer_states=1000, symbols=1000, step_items=1000)
SOURCE = '{"grammars": [{"lark_grammar": "start: /[a-z]{3}/"}]}'


@pytest.fixture(scope="module")
def demo() -> Iterator[LoadedModel]:
    loaded = load("demo", threads=2)
    yield loaded
    loaded.close()


@pytest.fixture
def vocabulary(demo: LoadedModel) -> GrammarVocabulary:
    return GrammarVocabulary(demo.tokenizer, demo.tokenizer.eos_ids, demo.config.vocab_size)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget the functions that were found, before the test and after it."""
    find_functions.cache_clear()
    yield
    find_functions.cache_clear()


def test_the_installed_library_is_known() -> None:
    """Fails with a version whose C interface was not compared with `grammar_library`: then masks are slower."""
    assert find_functions() is not None


def test_it_is_used_where_a_native_thread_can_be_spared(demo: LoadedModel, vocabulary: GrammarVocabulary) -> None:
    eos_ids = demo.tokenizer.eos_ids
    assert isinstance(open_library(vocabulary, eos_ids, [], demo.ctx), FunctionLibrary)
    for host in (Context("cpu", threads=1), Context("reference"), None):
        assert isinstance(open_library(vocabulary, eos_ids, [], host), ClassLibrary)


@pytest.mark.parametrize("missing", ["llg_get_version", "llg_new_tokenizer_v2", "llg_clone_matcher"])
def test_without_its_functions_the_classes_serve(
    monkeypatch: pytest.MonkeyPatch, fresh: None, demo: LoadedModel, vocabulary: GrammarVocabulary, missing: str
) -> None:
    class Partial(ctypes.CDLL):
        def __getattr__(self, name: str) -> object:
            if name == missing:
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setattr(ctypes, "CDLL", Partial)
    assert find_functions() is None
    library = open_library(vocabulary, demo.tokenizer.eos_ids, [], demo.ctx)
    mask = np.zeros(-(-demo.config.vocab_size // 32), np.uint32)
    assert library.open_matcher(SOURCE, LIMITS).write_mask(mask)
    assert mask.any()


def test_a_module_that_cannot_be_opened_has_none(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(grammar_library, "_lib", SimpleNamespace(__file__="/nowhere/_lib.so"))
    assert find_functions() is None


def test_other_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(grammar_library, "_VERSION", b"llguidance@2.")
    assert find_functions() is None


def list_places() -> list[int]:
    """List the offset of every value in the struct, and the size of the struct."""
    init, limits = grammar_library._MatcherInit, grammar_library._Limits
    places = [getattr(init, str(field[0])).offset for field in init._fields_]
    inner = [init.limits.offset + getattr(limits, str(field[0])).offset for field in limits._fields_]
    return sorted({*places, *inner, ctypes.sizeof(init)})


@pytest.mark.parametrize("place", list_places())
def test_another_struct_is_noticed(place: int) -> None:
    library = ctypes.CDLL(_lib.__file__)
    library.llg_constraint_init_set_defaults.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def set_defaults(memory: ctypes.Array[ctypes.c_uint8], tokenizer: int) -> None:
        library.llg_constraint_init_set_defaults(memory, tokenizer)
        memory[place] ^= 1

    assert fits_struct(library)
    assert not fits_struct(SimpleNamespace(llg_constraint_init_set_defaults=set_defaults))  # type: ignore[arg-type]


def test_a_vocabulary_that_the_library_refuses_is_an_error(demo: LoadedModel, vocabulary: GrammarVocabulary) -> None:
    with pytest.raises(MlxrError, match="refused the vocabulary: EOS token ID"):
        open_library(vocabulary, [demo.config.vocab_size + 5], [], demo.ctx)


@pytest.mark.slow
def test_matchers_keep_what_they_need(demo: LoadedModel, vocabulary: GrammarVocabulary) -> None:
    library = open_library(vocabulary, demo.tokenizer.eos_ids, [], demo.ctx)
    matcher, there = library.open_matcher(SOURCE, LIMITS), weakref.ref(library)
    del library
    gc.collect()
    assert there() is not None
    copy = matcher.fork()
    del matcher
    gc.collect()
    assert copy.write_mask(np.zeros(-(-demo.config.vocab_size // 32), np.uint32))
    del copy
    gc.collect()
    assert there() is None
