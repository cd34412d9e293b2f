"""Writes the table of families in docs/models.md: `make format` runs this program, `tests/project/test_family_files.py`
fails if it was forgotten.

The comparisons follow from the tests' cases. The format of tool calls follows from a model's template: the table below
has the marks in it, and `find_format` names their format.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "models.md"
MODELS, PEERS, GPU = (ROOT / "tests" / name for name in ("models", "peers", "gpu"))
sys.path.insert(0, str(MODELS))

from gguf_models import MODELS as OF_FILES  # noqa: E402 -- needs the path above
from random_model import RELATIVES  # noqa: E402

from mlxr.models import families  # noqa: E402
from mlxr.models.families import read_folder  # noqa: E402
from mlxr.service.tools import find_format  # noqa: E402
from mlxr.service.tools.harmony import RECOGNISED_BY  # noqa: E402

HEAD = "| file | GGUF's names | golden | llama.cpp | GPU | tools |\n|---|---|---|---|---|---|\n"
_HERMES, _XML, _GLM = "<tool_call>", "<tool_call><function=NAME><parameter=KEY>", "<arg_key>"
_LLAMA3, _MISTRAL, _PHI, _COHERE = "<|start_header_id|>", "[TOOL_CALLS]", "<|tool_call|>", "<|START_ACTION|>"
_DEEPSEEK, _KIMI = "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>"
# Marks in the templates of an architecture's models; other templates have no tools, or unknown marks.
MARKS: dict[str, tuple[str, ...]] = {
    "bailingmoe2": (_HERMES,),
    "cohere2": (_COHERE,),
    "cohere2moe": (_COHERE,),
    "deepseek2": (_DEEPSEEK, _KIMI, _GLM),
    "deepseek32": (_DEEPSEEK,),
    "ernie4_5": (_HERMES,),
    "ernie4_5-moe": (_HERMES,),
    "gemma4": ("<|tool_call>call:",),
    "glm-dsa": (_GLM,),
    "glm5-next": (_GLM,),
    "glm4moe": (_GLM,),
    "gpt-oss": (RECOGNISED_BY,),
    "granite": (_PHI, _HERMES),
    "granitehybrid": (_HERMES,),
    "granitemoe": (_PHI,),
    "hunyuan-moe": ("<tool_calls>",),
    "lfm2": ("<|tool_call_start|>",),
    "lfm2moe": ("<|tool_call_start|>",),
    "llama": (_LLAMA3, _MISTRAL, _HERMES),
    "minimax-m2": ("<minimax:tool_call>",),
    "mistral3": (_MISTRAL,),
    "mistral4": (_MISTRAL,),
    "nemotron_h": (_XML, "<TOOLCALL>"),
    "nemotron_h_moe": (_XML,),
    "olmo2": ("<function_calls>",),
    "phi3": (_PHI,),
    "qwen2": (_HERMES,),
    "qwen2vl": (_HERMES,),
    "qwen3": (_HERMES,),
    "qwen35": (_XML,),
    "qwen35moe": (_XML,),
    "qwen3moe": (_HERMES, _XML),
    "qwen3next": (_HERMES, _XML),
    "qwen3vl": (_HERMES,),
    "qwen3vlmoe": (_HERMES,),
    "spark2_5": (_GLM,),
    "seed_oss": ("<seed:tool_call><function=NAME><parameter=KEY>",),
    "smollm3": ("xml_tools <tool_call>",),
}


def _read_cases() -> dict[str, str]:
    """Return the architecture of each golden case."""
    configs = {path.parent.name: json.loads(path.read_text()) for path in (MODELS / "goldens").glob("*/config.json")}
    return {case: read_folder(config).architecture for case, config in configs.items()}


def _list_words(*paths: Path) -> set[str]:
    """Return all quoted words in some sources."""
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {node.value for node in nodes if isinstance(node.value, str)}


def _list_encoders() -> set[str]:
    """Return the architectures of models that write no text."""
    configs = [json.loads(path.read_text())["config"] for path in (MODELS / "encoder_goldens").glob("*/model.json")]
    return {read_folder(config).architecture for config in configs}


def _name_formats(architecture: str) -> Iterator[str]:
    """Return the formats of the calls of an architecture's models, by the names of their classes."""
    for mark in MARKS.get(architecture, ()):
        name = type(find_format(mark, takes_tools=True)).__name__.removesuffix("Format")
        yield f"{name} (`{mark}`)" if name in ("Section", "Phi4") else name


def _say_which(names: Collection[str], have: Collection[str]) -> str:
    found = [name for name in names if name in have]
    return "all" if len(found) == len(names) else ", ".join(found) or "–"


def list_rows() -> list[str]:
    """Return the rows of the table, without its head."""
    cases, encoders, rows = _read_cases(), _list_encoders(), []
    with_peers = {cases[word] for word in _list_words(PEERS / "test_families.py") & cases.keys()}
    with_peers |= OF_FILES.keys() | RELATIVES.keys() - {"qwen"}
    on_gpu = {cases.get(word, word) for word in _list_words(GPU / "test_gpu_models.py") & (cases.keys() | {*OF_FILES})}
    golden = {*cases.values(), *RELATIVES}
    for file in families._FILES:
        names = [family.name for family in getattr(file, "FAMILIES", ()) if family.name not in encoders]
        if not names:
            continue
        formats = dict.fromkeys(name for own in names for name in _name_formats(own))
        columns = [_say_which(names, have) for have in (golden, with_peers, on_gpu)]
        cells = [f"`{file.__name__.rpartition('.')[2]}`", ", ".join(names), *columns, ", ".join(formats) or "–"]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return rows


def render(text: str) -> str:
    """Return the document with the table in it."""
    pattern = re.compile(r"\| file \| GGUF's names \|.*?\n(?=\n)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{TARGET} has no table of families")
    return pattern.sub(lambda _: HEAD + "".join(list_rows()), text)


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
