"""Tiny random encoders from their goldens, which `tools/make_encoder_goldens.py` wrote, and a way to run them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the tool that writes goldens has no mlxr
    from mlxr.kernels.attend import KVType
    from mlxr.kernels.context import Context
    from mlxr.models import Decoder

GOLDENS = Path(__file__).parent / "encoder_goldens"
CASES = sorted(path.name for path in GOLDENS.iterdir()) if GOLDENS.is_dir() else []
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def draw_weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Floats]:
    """Random weights of these shapes: norms near 1 (or near 0 where they count from 1), none of them trivial."""
    weights = {}
    for name, shape in shapes.items():
        random = np.random.RandomState(zlib.crc32(name.encode()) ^ seed)
        values = random.standard_normal(tuple(shape))
        if len(shape) == 2 and "embed" not in name:
            values *= 1.2 / np.sqrt(shape[1])
        elif name.endswith(".bias"):
            values *= 0.2
        elif len(shape) == 1:
            values = 1 + 0.2 * values
        weights[name] = values.astype(np.float32)
    return weights


@dataclass(frozen=True)
class Golden:
    """A case: a model, its weights, one text, and its states (T, hidden) or logits (1, labels)."""

    config: dict[str, Any]
    weights: dict[str, Floats]
    tokens: Ints
    types: Ints
    states: Floats

    @property
    def ranks(self) -> bool:
        """True if the states are logits of labels."""
        return len(self.states) == 1


def read_golden(case: str) -> Golden:
    """One of CASES."""
    stated = json.loads((GOLDENS / case / "model.json").read_text())
    with np.load(GOLDENS / case / "states.npz") as stored:
        arrays = [stored[name] for name in ("tokens", "types", "states")]
    return Golden(stated["config"], draw_weights(stated["shapes"], stated["seed"]), *arrays)


def run_texts(model: Decoder, texts: Sequence[Ints], types: Sequence[Ints] = (), kv_type: KVType = "f32") -> Floats:
    """The states of all tokens of several texts in one batch."""
    from tiny_models import TinyRun

    run = TinyRun(model, len(texts), kv_type=kv_type)
    batch = run.append(dict(enumerate(texts)))
    if types:
        batch = batch.with_types(np.concatenate(types))
    return model.forward_hidden(batch, run.arena)


def build(ctx: Context, golden: Golden, way: str = "folder", type_name: str = "f32") -> Decoder:
    """Build the model of a golden, read as a folder, or through GGUF's metadata and names."""
    from tiny_models import make_gguf, make_hf_tensors

    from mlxr.models import Decoder, model_from_folder, model_from_gguf

    if way == "folder":
        tensors = make_hf_tensors(golden.weights, golden.config, type_name)
        return Decoder(ctx, model_from_folder(golden.config), tensors)
    metadata, named = make_gguf(golden.weights, golden.config)
    return Decoder(ctx, model_from_gguf(metadata, named), named)


def answer(model: Decoder, golden: Golden, kv_type: KVType = "f32") -> Floats:
    """Compute what the golden has: states, or logits of labels."""
    states = run_texts(model, [golden.tokens], [golden.types], kv_type)
    return model.finish(states[0], ranks=True)[None] if golden.ranks else states
