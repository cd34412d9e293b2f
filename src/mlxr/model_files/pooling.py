"""How the files of a model say that the states of a text's tokens become one vector.

GGUF has a number for it, folders of sentence-transformers a list of modules. Nothing is refused here: a model that
pools in a way of its own may still answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlxr.formats.safetensors import read_json_list, read_json_object

GGUF_POOLINGS = ("none", "mean", "cls", "last", "rank")  # by their numbers in GGUF
GGUF_KEY = "pooling_type"
_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_FOLDER_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_FOLDER_WORDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_HARMLESS_MODULES = ("Transformer", "Pooling", "Normalize")  # vectors are brought to length 1 in any case


def read_gguf_pooling(metadata: Mapping[str, object]) -> str | None:
    """`mean`, `cls`, `last`, `rank`, `none`, or what else a GGUF file states; None where it states nothing."""
    value = metadata.get(f"{metadata.get('general.architecture')}.{GGUF_KEY}")
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(GGUF_POOLINGS):
        return GGUF_POOLINGS[value]
    return f"{GGUF_KEY} {value!r:.40}"


def read_folder_pooling(folder: Path) -> str | None:
    """The same of a folder. Raises FormatError for files that are no JSON."""
    place, others = _read_modules(folder)
    if others:
        return f"a module {others[0]}"
    if not (folder / place).is_file():
        return None
    stated = read_json_object(folder / place)
    if isinstance(word := stated.get("pooling_mode"), str):
        return _FOLDER_WORDS.get(word, word)
    names = [
        str(key).removeprefix("pooling_mode_") for key, value in stated.items() if "pooling_mode_" in key and value
    ]
    if not names:
        return None
    return _FOLDER_POOLINGS.get(names[0], names[0]) if len(names) == 1 else " and ".join(names)


def _read_modules(folder: Path) -> tuple[str, list[str]]:
    """Where the configuration of the pooling lies, and the modules that change vectors in other ways."""
    if not (folder / _MODULES).is_file():
        return _POOLING, []
    modules = [one for one in read_json_list(folder / _MODULES) if isinstance(one, Mapping)]
    kinds = [(str(one.get("type")).rpartition(".")[2], str(one.get("path"))) for one in modules]
    place = next((f"{path}/config.json" for kind, path in kinds if kind == "Pooling" and _is_below(path)), _POOLING)
    return place, [kind for kind, _ in kinds if kind not in _HARMLESS_MODULES]


def _is_below(path: str) -> bool:
    return bool(path) and "/" not in path and "\\" not in path and path not in (".", "..")
