"""A check that a text may be a whole answer under a grammar, in the demo model's vocabulary."""

from __future__ import annotations

from functools import cache

import numpy as np

from mlxr.core.types import Grammar
from mlxr.formats import open_gguf
from mlxr.loading import find_model
from mlxr.service.grammar import GrammarCompiler
from mlxr.tokenizers import Tokenizer, from_gguf


@cache
def load_demo() -> tuple[Tokenizer, GrammarCompiler]:
    """The demo model's tokenizer, and a compiler for it."""
    with open_gguf(find_model("demo")) as file:
        tokenizer = from_gguf(file.metadata)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size)


def takes(text: str, grammar: Grammar | str, answer: Grammar | None = None, *, parse_special: bool = False) -> bool:
    """Return True if every token of `text` is allowed, and then an end; with `parse_special` it may hold control
    tokens.
    """
    demo, compiler = load_demo()
    constraint = compiler.compile(grammar, answer)
    mask = np.zeros(-(-demo.vocab_size // 32), np.uint32)

    def allows(token_id: int) -> bool:
        constraint.fill_mask(mask)
        return bool(mask[token_id // 32] >> token_id % 32 & 1)

    for token_id in demo.encode(text, add_special=False, parse_special=parse_special):
        if not allows(token_id):
            return False
        constraint.accept(token_id)
    return any(map(allows, demo.eos_ids))
