"""Models for the registry's tests: a few bytes that say how long they must be, so that half a model is noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlxr.core.errors import FormatError, ModelError
from mlxr.core.types import is_tower_file
from mlxr.registry import ModelFacts, Registry


def make_model(seed: int = 0, size_bytes: int = 1000, *, sees: bool = False) -> bytes:
    """Make a paper model: its length and the checksum of its body come first. One that `sees` takes towers."""
    body = hashlib.shake_128(b"%d" % seed).digest(size_bytes)
    kind = b"seeing" if sees else b"paper"
    return kind + b" %d %s\n" % (size_bytes, hashlib.sha256(body).hexdigest().encode()) + body


TOWER = b"tower\n" + bytes(2000)


def inspect_paper(path: Path, tower: Path | None = None, /) -> ModelFacts:
    """Return the facts of one file, or of all parts beside it, with a tower that fits; refuse incomplete ones."""
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.suffix in {".safetensors", ".json"})
    elif "-00001-of-" in path.name:
        stem = path.name.split("-00001-of-")[0]
        files = sorted(path.parent.glob(f"{stem}-*-of-*.gguf"))
    else:
        files = [path]
    for file in files:
        check_paper(file)
    takes_tower = files[0].read_bytes().startswith(b"seeing") and not path.is_dir()
    towers = [tower] if tower else sorted(one for one in path.parent.glob("*.gguf") if is_tower_file(one.name))
    seen_by = [one for one in towers if takes_tower and one.read_bytes().startswith(b"tower")][:1]
    return ModelFacts(
        format="safetensors" if path.is_dir() else "gguf",
        architecture="paper",
        parameters=1_100_000_000,
        quantization="Q4_K_M",
        context_tokens=2048,
        embedding_length=64,
        template="{{ messages }}",
        capabilities=frozenset({"completion", "vision"} if seen_by else {"completion"}),
        files=(*files, *seen_by),
        takes_tower=takes_tower,
    )


def check_paper(file: Path) -> None:
    data = file.read_bytes()
    head, _, body = data.partition(b"\n")
    if head == b"{}":
        return
    if head.startswith(b"unknown"):
        raise ModelError(f"{file}: architecture 'unknown' is not supported")
    if head.replace(b"seeing", b"paper") != b"paper %d %s" % (len(body), hashlib.sha256(body).hexdigest().encode()):
        raise FormatError(file, "body", None, "is not whole")


def paper_registry(folder: Path, wait_s: float = 60.0) -> Registry:
    return Registry(folder, inspect=inspect_paper, wait_s=wait_s)
