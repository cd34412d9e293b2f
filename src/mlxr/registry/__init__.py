"""Models on disk: their names, their records, and the files that belong to us.

`Registry` is the front door. Imports nothing but `core`: the caller hands in an `Inspect` function that reads model
files. Names come from strangers and are checked, records are plain values (`record`); the catalogue
(`catalogue`) is SQLite, the files (`blobs`) are named by their SHA-256; `pull` fetches from a hub.
Low-rank adapters (`adapters`) stand beside the models.
"""

from __future__ import annotations

from mlxr.registry.blobs import Blobs
from mlxr.registry.record import (
    AdapterRecord,
    AdapterRef,
    Changes,
    Inspect,
    ModelFacts,
    ModelFile,
    ModelName,
    ModelRecord,
)
from mlxr.registry.registry import Registry

__all__ = [
    "AdapterRecord",
    "AdapterRef",
    "Blobs",
    "Changes",
    "Inspect",
    "ModelFacts",
    "ModelFile",
    "ModelName",
    "ModelRecord",
    "Registry",
]
