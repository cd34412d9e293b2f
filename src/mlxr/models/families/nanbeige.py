"""Nanbeige 4.2: a Llama whose layers run several times, one after another, with their own keys and values each time;
the stream is normed in between.

Source: llama.cpp, src/models/nanbeige.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.families import llama
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    loops = m.integer("num_loops", 1, limits.MAX_LAYERS // m.layers, default=1)
    return replace(llama.build(m), loops=loops, norms_loops=not m.fields.flag("skip_loop_final_norm", False))


FAMILIES = (Family("nanbeige", build),)
