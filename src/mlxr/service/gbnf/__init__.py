"""GBNF, llama.cpp's notation of grammars, translated to the Lark notation that the grammar library reads."""

from __future__ import annotations

from mlxr.service.gbnf.parsing import GbnfError
from mlxr.service.gbnf.translation import translate

__all__ = ["GbnfError", "translate"]
