"""Sources of models: short names of well-known ones (`llama3.2:1b`), and the models of other programs on this disk.

The table ships as `assets/library.json`; `refresh` writes a newer one, with the sizes that the hub lists, into the
models folder. A name without a tag is the first size of its family. Ollama's models, LM Studio's and the cache of the
hub are only read.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlxr.core.errors import MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.types import is_tower_file

FILE_NAME = "library.json"
SHIPPED = Path(__file__).parents[1] / "assets" / FILE_NAME
MAX_FILE_BYTES = 1 << 20


@frozen
class LibraryModel:
    """A well-known model in one size."""

    family: str  # llama3.2
    tag: str  # 1b
    about: str
    repository: str  # owner/name on the hub
    quant: str
    size_bytes: int  # of its files, about
    active: float  # the share of the weights that a token reads; 1 for dense models

    @property
    def name(self) -> str:
        """The name that people type."""
        return f"{self.family}:{self.tag}"

    @property
    def reference(self) -> str:
        """The same model as `hf.co/owner/repo:quant`."""
        return f"hf.co/{self.repository}:{self.quant}"

    def speed(self, read_bytes_per_s: float | None) -> float | None:
        """Estimate the tokens per second of one answer: each token reads the share `active` of the weights."""
        return None if read_bytes_per_s is None else read_bytes_per_s / (self.size_bytes * self.active)


def read_library(folder: Path | None = None) -> list[LibraryModel]:
    """All models of the table, the usual size of each family first; the table of a models `folder` if it has one."""
    own = None if folder is None else folder / FILE_NAME
    if own is not None and own.is_file():
        try:
            return _read(own, own.stat().st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MlxrError(f"{own}: is no table of models ({error}); remove it, and the one of mlxr is used") from None
    return _read(SHIPPED, 0)


def find(text: str, folder: Path | None = None) -> LibraryModel | None:
    """The model that a short name means: `llama3.2`, `llama3.2:1b`; None for any other text."""
    family, _, tag = text.lower().partition(":")
    models = [model for model in read_library(folder) if model.family == family]
    if tag in ("", "latest"):
        return models[0] if models else None
    return next((model for model in models if tag in (model.tag, f"{model.tag}-{model.quant}".lower())), None)


def search(words: str, folder: Path | None = None) -> list[LibraryModel]:
    """The models whose name, description or repository has all the words; all models if there are no words."""
    wanted = words.lower().split()
    models = read_library(folder)
    return [m for m in models if all(word in f"{m.name} {m.about} {m.repository}".lower() for word in wanted)]


def suggest(text: str, folder: Path | None = None) -> list[str]:
    """Short names that are spelled like `text`, the nearest first, three at most."""
    models = read_library(folder)
    family, _, tag = text.lower().partition(":")
    if any(model.family == family for model in models):
        return [model.name for model in models if model.family == family][:3] if tag else []
    names = list(dict.fromkeys([model.family for model in models]))
    return difflib.get_close_matches(family, names, n=3, cutoff=0.7)


def refresh(folder: Path, ask_size: Callable[[LibraryModel], int]) -> tuple[int, list[str]]:
    """Write the shipped table into a models folder, with the size in bytes that `ask_size` returns for each model.

    Returns how many sizes changed, and the names for which `ask_size` raised MlxrError; these keep their size.
    """
    table: dict[str, Any] = json.loads(SHIPPED.read_text())
    changed, failed = 0, []
    for model in read_library():
        row = table["models"][model.family]["sizes"][model.tag]
        try:
            size_bytes = ask_size(model)
        except MlxrError:
            failed.append(model.name)
            continue
        changed += size_bytes != row["bytes"]
        row["bytes"] = size_bytes
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(table, indent=1))
    temporary.replace(folder / FILE_NAME)
    return changed, failed


@lru_cache(4)
def _read(path: Path, _changed_ns: int) -> list[LibraryModel]:
    with path.open("rb") as file:
        families: Mapping[str, Any] = json.loads(file.read(MAX_FILE_BYTES))["models"]
    return [
        LibraryModel(
            str(family),
            str(tag),
            str(row["about"]),
            str(size["repository"]),
            str(size["quant"]),
            int(size["bytes"]),
            float(size.get("active", 1.0)),
        )
        for family, row in families.items()
        for tag, size in row["sizes"].items()
    ]


MAX_MANIFEST_BYTES = 1 << 20
_OLLAMA_MODEL, _OLLAMA_TOWER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.projector"


@frozen
class Foreign:
    """A model of another program: its name there, changed to one that we allow, and its file or folder.

    `tower` is set if the name of the tower's file does not show that it is one.
    """

    name: str
    path: Path
    size_bytes: int
    tower: Path | None = None


def find_ollama() -> list[Foreign]:
    """The models that Ollama's manifests list; their weights are GGUF files named by their SHA-256.

    The folder is $OLLAMA_MODELS, else ~/.ollama/models, else that of the system's service.
    """
    places = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    folders = [Path(os.environ["OLLAMA_MODELS"])] if os.environ.get("OLLAMA_MODELS") else places
    folder = next((one for one in folders if (one / "manifests").is_dir()), None)
    return [] if folder is None else sorted(_read_manifests(folder), key=lambda model: model.name)


def find_lmstudio() -> list[Foreign]:
    """The GGUF files below LM Studio's folder of models, PUBLISHER/REPOSITORY/FILE; a split model by its first part."""
    folders = [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]
    found = [_from_gguf(path) for folder in folders for path in folder.glob("*/*/*.gguf")]
    return sorted((model for model in found if model is not None), key=lambda model: model.name)


def find_hub_cache() -> list[Foreign]:
    """The models that the hub's tools downloaded: each repository's newest snapshot, GGUF files or a folder."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found: list[Foreign] = []
    for repository in sorted(cache.glob("models--*--*")):
        snapshots = sorted((repository / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
        if not snapshots:
            continue
        files = sorted(snapshots[-1].glob("*.gguf"))
        found += [model for path in files if (model := _from_gguf(path)) is not None]
        weights = list(snapshots[-1].glob("*.safetensors"))
        if not files and weights and (snapshots[-1] / "config.json").is_file():
            name = repository.name.rpartition("--")[2]
            found.append(Foreign(name, snapshots[-1], sum(path.stat().st_size for path in weights)))
    return found


def _read_manifests(folder: Path) -> Iterator[Foreign]:
    manifests, kinds = folder / "manifests", (_OLLAMA_MODEL, _OLLAMA_TOWER)
    for path in manifests.glob("*/*/*/*"):
        host, namespace, model, tag = path.relative_to(manifests).parts
        try:
            with path.open("rb") as file:
                layers: list[dict[str, Any]] = json.loads(file.read(MAX_MANIFEST_BYTES))["layers"]
            digests = {kind: [str(one["digest"]) for one in layers if one["mediaType"] == kind] for kind in kinds}
            blob = _find_blob(folder, digests[_OLLAMA_MODEL][0])
            tower = next((_find_blob(folder, digest) for digest in digests[_OLLAMA_TOWER]), None)
        except (OSError, ValueError, LookupError, TypeError):
            continue  # a manifest without weights is an adapter, a cloud model or damaged
        if blob is not None:
            prefix = "" if namespace == "library" else f"{namespace}/"
            prefix = prefix if host == "registry.ollama.ai" else f"{host}/{namespace}/"
            size_bytes = sum(file.stat().st_size for file in (blob, tower) if file is not None)
            yield Foreign(f"{prefix}{model}:{tag}", blob, size_bytes, tower)


def _find_blob(folder: Path, digest: str) -> Path | None:
    blob = folder / "blobs" / digest.replace(":", "-")
    return blob if "/" not in digest and blob.is_file() else None


def _from_gguf(path: Path) -> Foreign | None:
    """A GGUF file under its own name; None if it belongs to another model: later parts, projectors, matrices."""
    name = path.name.removesuffix(".gguf")
    if is_tower_file(path.name) or "imatrix" in name.lower():
        return None
    head, part, rest = name.rpartition("-of-")
    if part and rest.isdecimal():
        stem, _, number = head.rpartition("-")
        if number != "00001":
            return None
        name = stem
    return Foreign(name, path, path.stat().st_size)


PLACES = {"ollama": find_ollama, "lmstudio": find_lmstudio, "hub": find_hub_cache}


def fits_room(size_bytes: int, room_bytes: int | None) -> bool:
    """Return True if a model with files of that size fits the memory, or if the memory is not known.

    A short conversation needs about a tenth of the weights more; 512 MiB are left for other programs.
    """
    return room_bytes is None or size_bytes * 11 // 10 + (512 << 20) <= room_bytes
