"""Digests of the sources of the built page, so that a check without Node can tell if the page is older than they are.

The build calls this program (`web/vite.config.ts`), which writes the digest of the sources and that of the files that
were built into `src/mlxr/server/page/build.json`. `tests/project/test_page_build.py` computes both again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "web"
BUILT = ROOT / "src" / "mlxr" / "server" / "page"
RECORD = BUILT / "build.json"
SINGLE = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
FOLDERS = ("public", "src")


def list_sources() -> list[Path]:
    """The files that the build reads; tests are not among them."""
    inside = [path for folder in FOLDERS for path in (WEB / folder).rglob("*") if path.is_file()]
    return sorted([*(WEB / name for name in SINGLE), *(path for path in inside if ".test." not in path.name)])


def list_built() -> list[Path]:
    """The files that the build wrote."""
    return sorted(path for path in BUILT.rglob("*") if path.is_file() and path != RECORD)


def hash_files(paths: Iterable[Path], base: Path) -> str:
    """One digest of the names and the contents of all files."""
    digest = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content} {path.relative_to(base).as_posix()}\n".encode())
    return digest.hexdigest()


def describe_build() -> dict[str, str]:
    """The present digests of the sources and of the built files."""
    return {"sources": hash_files(list_sources(), WEB), "built": hash_files(list_built(), BUILT)}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(describe_build(), indent=1) + "\n")
