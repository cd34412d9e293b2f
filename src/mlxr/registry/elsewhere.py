"""Models that other programs keep on this disk: Ollama's, LM Studio's, and the cache of the hub. They are only read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_MANIFEST_BYTES = 1 << 20
_OLLAMA_MODEL = "application/vnd.ollama.image.model"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A model of another program: the name it has there, made fit for ours, and its file or folder."""

    name: str
    path: Path
    size_bytes: int


def find_ollama(environment: Mapping[str, str] = os.environ) -> list[Foreign]:
    """The models that Ollama's manifests list; its weights are GGUF files named by their SHA-256.

    The folder is $OLLAMA_MODELS, else the first of ~/.ollama/models and the one of the system's service that is there.
    """
    places = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    folders = [Path(environment["OLLAMA_MODELS"])] if environment.get("OLLAMA_MODELS") else places
    folder = next((one for one in folders if (one / "manifests").is_dir()), None)
    return [] if folder is None else sorted(_read_manifests(folder), key=lambda model: model.name)


def find_lmstudio(environment: Mapping[str, str] = os.environ) -> list[Foreign]:  # noqa: ARG001
    """The GGUF files below LM Studio's folder of models, PUBLISHER/REPOSITORY/FILE; a split model by its first part."""
    folders = [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]
    found = [_from_gguf(path) for folder in folders for path in folder.glob("*/*/*.gguf")]
    return sorted((model for model in found if model is not None), key=lambda model: model.name)


def find_hub_cache(environment: Mapping[str, str] = os.environ) -> list[Foreign]:
    """What the hub's own tools downloaded: the newest snapshot of each repository, GGUF files or a whole folder."""
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub")
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
    manifests = folder / "manifests"
    for path in manifests.glob("*/*/*/*"):
        host, namespace, model, tag = path.relative_to(manifests).parts
        try:
            with path.open("rb") as file:
                layers: list[dict[str, Any]] = json.loads(file.read(MAX_MANIFEST_BYTES))["layers"]
            digest = next(str(one["digest"]) for one in layers if one["mediaType"] == _OLLAMA_MODEL)
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            continue  # a manifest without weights is an adapter, a cloud model or damaged
        blob = folder / "blobs" / digest.replace(":", "-")
        if "/" not in digest and blob.is_file():
            prefix = "" if namespace == "library" else f"{namespace}/"
            prefix = prefix if host == "registry.ollama.ai" else f"{host}/{namespace}/"
            yield Foreign(f"{prefix}{model}:{tag}", blob, blob.stat().st_size)


def _from_gguf(path: Path) -> Foreign | None:
    """A GGUF file under its own name; None for what belongs to another model: later parts, projectors, matrices."""
    name = path.name.removesuffix(".gguf")
    if any(word in name.lower() for word in ("mmproj", "imatrix")):
        return None
    head, part, rest = name.rpartition("-of-")
    if part and rest.isdecimal():
        stem, _, number = head.rpartition("-")
        if number != "00001":
            return None
        name = stem
    return Foreign(name, path, path.stat().st_size)


PLACES = {"ollama": find_ollama, "lmstudio": find_lmstudio, "hub": find_hub_cache}
