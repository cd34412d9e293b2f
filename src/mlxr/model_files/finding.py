"""From what the user typed to the file or folder of a model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path

from mlxr.core.errors import NotFound

ASSETS = Path(__file__).parents[1] / "assets"
NAMED_MODELS: Mapping[str, str] = {"demo": "demo.gguf", "demo-draft": "demo-draft.gguf"}
_DRAFT_MODELS: Mapping[str, str] = {"demo.gguf": "demo-draft"}  # that guess tokens for a named model, by its file
_MAX_SHOWN_CHARACTERS = 200


def find_model(path_or_name: str | Path) -> Path:
    """The file or folder of a model given by name or path; raises NotFound with what is near."""
    file_name = NAMED_MODELS.get(str(path_or_name))
    path = _expand_home(Path(path_or_name)) if file_name is None else ASSETS / file_name
    if not _holds(path.exists):
        if file_name is not None:
            raise NotFound(f"the model {path_or_name} is missing from this installation ({path}); install mlxr again")
        name = str(path_or_name)
        shown = name if len(name) <= _MAX_SHOWN_CHARACTERS else name[:_MAX_SHOWN_CHARACTERS] + "…"
        raise NotFound(f"{shown}: no such file, folder or named model{_suggest(path)}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise NotFound(f"{path}: the folder has no config.json, so it is no model{_list_models(path)}")
    if path.suffix == ".safetensors":
        raise NotFound(f"{path}: give the folder that holds it, with config.json and the tokenizer: {path.parent}")
    return path


def find_draft(path: Path) -> str | None:
    """The named model that guesses tokens for the model in a file, if mlxr comes with one."""
    return _DRAFT_MODELS.get(path.name) if path.parent == ASSETS else None


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # ~name without such a user: then it is meant as written
        return path


def _holds(question: Callable[[], bool]) -> bool:
    """The answer to a question about a path; no for one that is too long to be a path."""
    try:
        return question()
    except OSError:
        return False


def _suggest(path: Path) -> str:
    """The end of a NotFound message: names and neighbouring models that look alike."""
    if not _holds(path.parent.is_dir):
        return f"; the folder {str(path.parent)[:_MAX_SHOWN_CHARACTERS]} does not exist either"
    names = {*NAMED_MODELS, *(entry.name for entry in path.parent.iterdir() if _looks_like_model(entry))}
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "; give a .gguf file, a Hugging Face folder, or demo"


def _list_models(folder: Path) -> str:
    found = sorted(str(entry) for entry in folder.iterdir() if _looks_like_model(entry))
    return f"; did you mean {' or '.join(found[:3])}?" if found else ""


def _looks_like_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").is_file()
