"""mlxr: run language models on the machine you have.

    from mlxr import LLM, SamplingParams

    with LLM("demo") as llm:
        print(llm.chat([{"role": "user", "content": "What does os.path.join do?"}]).text)

Names are imported when first used, so `import mlxr` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxr.core.errors import MlxrError
    from mlxr.core.types import (
        DraftOptions,
        Event,
        Finish,
        FinishReason,
        Grammar,
        SamplingParams,
        TextDelta,
        TokenInfo,
        TokenLogprob,
        Usage,
    )
    from mlxr.llm import LLM, Completion

_HOMES = {
    "Completion": "mlxr.llm",
    "DraftOptions": "mlxr.core.types",
    "Event": "mlxr.core.types",
    "Finish": "mlxr.core.types",
    "FinishReason": "mlxr.core.types",
    "Grammar": "mlxr.core.types",
    "LLM": "mlxr.llm",
    "MlxrError": "mlxr.core.errors",
    "SamplingParams": "mlxr.core.types",
    "TextDelta": "mlxr.core.types",
    "TokenInfo": "mlxr.core.types",
    "TokenLogprob": "mlxr.core.types",
    "Usage": "mlxr.core.types",
}

__all__ = [  # noqa: RUF022 - sorted for people, whatever the case
    "Completion",
    "DraftOptions",
    "Event",
    "Finish",
    "FinishReason",
    "Grammar",
    "LLM",
    "MlxrError",
    "SamplingParams",
    "TextDelta",
    "TokenInfo",
    "TokenLogprob",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("mlxr")
        except PackageNotFoundError:
            return "0+source"  # run from a checkout that was never installed
    if name not in _HOMES:
        raise AttributeError(f"module 'mlxr' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
