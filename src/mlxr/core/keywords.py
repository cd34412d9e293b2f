"""Keywords of Python functions that are settings of a model: how they are shown, and how they become `Settings`.

A function declares them as `**keywords: Unpack[ModelKeywords]`, which type checkers know one by one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import TypeVar, get_type_hints

from mlxr.core.model_keywords import ModelKeywords
from mlxr.core.settings import Settings, resolve

KEYWORDS = get_type_hints(ModelKeywords)
Function = TypeVar("Function", bound=Callable[..., object])


def show_keywords(function: Function) -> Function:
    """`function` with each setting in its signature, for `help` and for completion in a running interpreter."""
    signature = inspect.signature(function)
    own = [row for row in signature.parameters.values() if row.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [row for row in own if row.kind is inspect.Parameter.KEYWORD_ONLY]
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in KEYWORDS.items()
    ]
    shown = signature.replace(parameters=[*own[: len(own) - len(named)], *settings, *named])
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function


def resolve_keywords(keywords: ModelKeywords) -> Settings:
    """Settings from `keywords`, and where they are None from the environment, the file and the defaults.

    Raises TypeError for names that no setting of a model has, as Python does, and SettingError for unfit values.
    """
    for name in keywords:
        if name not in KEYWORDS:
            near = difflib.get_close_matches(name, KEYWORDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(KEYWORDS)}"
            raise TypeError(f"got an unexpected keyword argument {name!r}{hint}")
    return resolve(keywords)
