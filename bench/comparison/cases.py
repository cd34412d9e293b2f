"""The table of cases to measure, the cases of each model, and the project's targets for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxr.formats import open_gguf
from mlxr.formats.tensor import TensorSource


@dataclass(frozen=True, slots=True)
class Case:
    """A case: `sequences` contexts of `depth_tokens` tokens are held; then one of them grows by a prompt of `tokens`
    tokens (prefill), or all by one token in each of `tokens` steps (decode)."""

    name: str
    kind: Literal["prefill", "decode"]
    depth_tokens: int
    tokens: int
    sequences: int
    title: str
    context_tokens: int  # size of the contexts; equal for cases that share them

    def options(self) -> list[dict[str, bool]]:
        """The settings of llama.cpp to choose from: fused attention or not, one cache for all sequences or not."""
        unified = (False, True) if self.sequences > 1 else (False,)
        return [{"flash": flash, "unified": one} for flash in (True, False) for one in unified]

    def count_tokens(self) -> int:
        """The tokens of one measurement."""
        return self.tokens * (self.sequences if self.kind == "decode" else 1)


BUSY = 0.05  # share of the machine that other processes may use in a round that counts
STEADY = 1.15  # factor by which the memory's rate may differ between the rounds of a case
SHORT, LONG = 5120, 17408
CURVE_TOKENS = (128, 1024, 4096, 16384)


def _prefill(name: str, until: int, title: str, context_tokens: int = SHORT) -> Case:
    tokens = min(512, until)
    return Case(name, "prefill", until - tokens, tokens, 1, title, context_tokens)


CASES: tuple[Case, ...] = (
    _prefill("prefill-512", 512, "prefill 512"),
    _prefill("prefill-4096", 4096, "prefill of the last 512 of 4,096"),
    Case("decode-128", "decode", 128, 48, 1, "decode at 128 tokens", SHORT),
    Case("decode-4096", "decode", 4096, 32, 1, "decode at 4,096 tokens", SHORT),
    *(Case(f"batch-{n}", "decode", 128, 24, n, f"decode of {n} sequences, total", 256) for n in (4, 8, 16)),
    *(_prefill(f"context-{n}-prefill", n, f"prefill up to {n:,}", LONG) for n in CURVE_TOKENS),
    *(Case(f"context-{n}-decode", "decode", n, 16, 1, f"decode at {n:,}", LONG) for n in CURVE_TOKENS),
)
BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}
CURVE = tuple(case.name for case in CASES if case.name.startswith("context-"))
TABLE = tuple(name for name in BY_NAME if name not in CURVE)
BASIC = ("prefill-512", "decode-128")
# From this depth on, the options of llama.cpp are not tried again: the better one at smaller depths is taken.
MAX_TUNED_DEPTH = 4096

# shape → weight type → cases.
PLANS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "tinyllama-1.1b": {
        "q4_k_m": (*TABLE, *CURVE),
        "q8_0": BASIC,
        "q4_0": BASIC,
        "q6_k": BASIC,
        "f16": BASIC,
        "bf16": BASIC,
    },
    "llama-3-8b": {"q4_k_m": TABLE},
    "olmoe-1b-7b": {"q4_k_m": (*BASIC, "batch-8")},
    "gpt-oss-20b": {"mxfp4": BASIC},
    "lfm2-1.2b": {"q4_k_m": (*BASIC, "batch-8")},
    "qwen3.5-0.8b": {"q4_k_m": (*BASIC, "batch-8")},
    "tiny-spm": {"q4_k_m": (*TABLE, *CURVE), "q8_0": BASIC},
}
QUICK: Mapping[str, tuple[str, ...]] = {"q4_k_m": ("prefill-512", "decode-128", "batch-8")}


@dataclass(frozen=True, slots=True)
class Target:
    """A target: at least `ratio` times llama.cpp, and at least `share` of the probe's rate."""

    ratio: float
    share: float | None = None


TARGETS: Mapping[tuple[str, str, str], Target] = {
    ("tinyllama-1.1b", "q4_k_m", "prefill-512"): Target(2.6),
    ("tinyllama-1.1b", "q8_0", "prefill-512"): Target(3.5),
    ("tinyllama-1.1b", "q4_0", "prefill-512"): Target(2.4),
    ("tinyllama-1.1b", "q6_k", "prefill-512"): Target(1.8),
    ("tinyllama-1.1b", "f16", "prefill-512"): Target(2.0),
    ("tinyllama-1.1b", "q4_k_m", "prefill-4096"): Target(3.5),
    ("tinyllama-1.1b", "q4_k_m", "decode-128"): Target(1.15, 0.90),
    ("tinyllama-1.1b", "q4_0", "decode-128"): Target(1.15, 0.90),
    ("tinyllama-1.1b", "q8_0", "decode-128"): Target(1.10, 0.90),
    ("tinyllama-1.1b", "q6_k", "decode-128"): Target(1.10, 0.90),
    ("tinyllama-1.1b", "f16", "decode-128"): Target(1.0, 0.92),
    ("tinyllama-1.1b", "q4_k_m", "decode-4096"): Target(1.8),
    ("tinyllama-1.1b", "q4_k_m", "batch-4"): Target(2.2),
    ("tinyllama-1.1b", "q4_k_m", "batch-8"): Target(3.2),
    ("tinyllama-1.1b", "q4_k_m", "batch-16"): Target(3.5),
    ("llama-3-8b", "q4_k_m", "prefill-512"): Target(2.4),
    ("llama-3-8b", "q4_k_m", "decode-128"): Target(1.1),
    ("olmoe-1b-7b", "q4_k_m", "prefill-512"): Target(2.5),
    ("olmoe-1b-7b", "q4_k_m", "decode-128"): Target(1.3, 0.85),
    ("olmoe-1b-7b", "q4_k_m", "batch-8"): Target(2.0),
    ("gpt-oss-20b", "mxfp4", "prefill-512"): Target(2.0),
    ("gpt-oss-20b", "mxfp4", "decode-128"): Target(1.3),
    ("lfm2-1.2b", "q4_k_m", "prefill-512"): Target(2.2),
    ("lfm2-1.2b", "q4_k_m", "decode-128"): Target(1.2),
    ("lfm2-1.2b", "q4_k_m", "batch-8"): Target(3.5),
    ("qwen3.5-0.8b", "q4_k_m", "prefill-512"): Target(2.2),
    ("qwen3.5-0.8b", "q4_k_m", "decode-128"): Target(1.2),
    ("qwen3.5-0.8b", "q4_k_m", "batch-8"): Target(3.5),
}


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one token: `head` is the output matrix, which a prompt needs once."""

    layer_bytes: int
    head_bytes: int
    layer_macs: int
    head_macs: int

    def bytes_of_step(self, case: Case, kv_bytes_per_token: int) -> int:
        """The bytes that a decode step must read: all weights once, and the keys and values of each context."""
        depth = case.depth_tokens + case.tokens // 2
        return self.layer_bytes + self.head_bytes + case.sequences * depth * kv_bytes_per_token

    def macs_of_token(self, case: Case) -> float:
        """The multiply-adds with weights for each token, without attention."""
        head = self.head_macs / (case.tokens if case.kind == "prefill" else 1)
        return self.layer_macs + head


def measure_work(path: Path) -> Work:
    """The work of a model file; only the experts that a token uses count."""
    with open_gguf(path) as file:
        prefix = f"{file.metadata['general.architecture']}.expert"
        used = float(file.metadata.get(f"{prefix}_used_count", 1)) / float(file.metadata.get(f"{prefix}_count", 1))
        layers = [tensor for name, tensor in file.tensors.items() if name.startswith("blk.")]
        matrices, experts = ([tensor for tensor in layers if len(tensor.shape) == axes] for axes in (2, 3))
        head = [file.tensors.get("output.weight") or file.tensors["token_embd.weight"]]
        return Work(
            _bytes(matrices) + int(used * _bytes(experts)),
            _bytes(head),
            _values(matrices) + int(used * _values(experts)),
            _values(head),
        )


def _bytes(tensors: Sequence[TensorSource]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _values(tensors: Sequence[TensorSource]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)
