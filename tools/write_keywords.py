"""Writes the model settings as the keywords of `LLM` into `src/mlxr/core/model_keywords.py`, from their rows.

Type checkers and editors know only keywords that are spelt out, so they cannot be derived when the program runs. `make
format` runs this program; `tests/project/test_keywords.py` fails if it was forgotten.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from mlxr.core.model_settings import ModelSettings, Setting, list_rows

TARGET = Path(__file__).resolve().parents[1] / "src" / "mlxr" / "core" / "model_keywords.py"
TYPES = {
    "int": "int",
    "bytes": "int | str",
    "seconds": "float",
    "flag": "bool",
    "choice": "str",
    "path": "str | Path",
    "text": "str",
    "list": "str | list[str] | tuple[str, ...]",
    "object": "str | Mapping[str, object]",
}
HEAD = '''"""The model settings as keywords, which `LLM` takes. Written by tools/write_keywords.py: change the rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict


class ModelKeywords(TypedDict, total=False):
    """A value for each row of `ModelSettings`; None leaves the choice to the environment and the defaults."""

'''


def render(rows: Iterable[Setting]) -> str:
    """The source of the module for `rows`."""
    return HEAD + "\n".join(map(_render_row, rows))


def _render_row(row: Setting) -> str:
    text = textwrap.fill(f'"""{row.help}"""', 116)
    return textwrap.indent(f"{row.name}: {TYPES[row.kind]} | None\n{text}\n", "    ")


if __name__ == "__main__":
    TARGET.write_text(render(list_rows(ModelSettings)), encoding="utf-8")
