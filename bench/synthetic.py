"""Write a GGUF model of a known shape with random weights, to measure without a download.

    python bench/synthetic.py --shape tinyllama-1.1b --type q4_k_m --out FILE

The blocks are valid: for every type and row length a pool is encoded from normally distributed weights, scaled so
that activations stay finite through all layers, and each tensor draws its blocks from the pool. So files of any size
are written at disk speed and in little memory. The vocabulary is made up, but complete: any text can be encoded.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import MlxrError
from mlxr.formats import TensorToWrite, by_name, encode_tensor, write_gguf
from mlxr.formats.recipes import RECIPES, find_recipe, tensor_type
from mlxr.models import Model, model_from_gguf
from mlxr.models.components import Experts
from mlxr.models.families import read_folder
from mlxr.models.weights import expected_tensors, gguf_name

POOL_VALUES = 1 << 20
CHUNK_BYTES = 1 << 24
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
SPM_UNKNOWN, SPM_CONTROL, SPM_NORMAL, SPM_BYTE = 2, 3, 1, 6
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

ADDED = ("attn_output", "ffn_down", "shortconv.out_proj", "ssm_out")  # to the residual stream

Bytes = NDArray[np.uint8]
Metadata = dict[str, object]


@dataclass(frozen=True)
class Shape:
    """A model's sizes and the kind of its vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab_size: int
    context_length: int
    vocabulary: Callable[[int], Metadata]
    rope_theta: float = 10000.0
    changes: Mapping[str, Any] = field(default_factory=dict)  # to the `config.json` of a llama

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        attention = self.to_config().attention
        assert attention is not None, "all of these models attend"
        return attention.head_dim

    @property
    def mixture(self) -> Experts | None:
        """The experts of the model, if it has any."""
        return next((layer.experts for layer in self.to_config().layers if layer.experts is not None), None)

    def to_config(self) -> Model:
        """The shape as a model's configuration."""
        return model_from_gguf(self.state(), {})

    def to_folder(self) -> dict[str, Any]:
        """The shape as a `config.json`, by default of a llama."""
        llama: dict[str, Any] = {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
        }
        return llama | dict(self.changes)

    def state(self) -> Metadata:
        """The shape as GGUF's metadata."""
        stated = read_folder(self.to_folder()).values
        return stated | {f"{stated['general.architecture']}.context_length": self.context_length}

    def list_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors' names in GGUF's spelling, and shapes (rows, columns)."""
        config = self.to_config()
        yield from ((gguf_name(name, config), shape) for name, shape in expected_tensors(config).items())

    def plan_tensors(self, recipe_name: str) -> Iterator[tuple[str, str, tuple[int, ...], float]]:
        """Name, type by the recipe, shape, and the factor on the tensor's weights.

        Weights that add to the residual stream are scaled down, so that it grows by a constant over all layers.
        """
        for name, dimensions in self.list_tensors():
            type_name = tensor_type(
                recipe_name,
                name,
                dimensions,
                layer=int(name.split(".")[1]) if name.startswith("blk.") else 0,
                layers=self.layers,
                tied_output=self.to_config().is_tied,
                query_groups=self.heads // self.kv_heads,
            )
            if "ffn_gate_inp" in name:
                type_name = "f32"
            is_added = any(part in name for part in ADDED)
            yield name, type_name, dimensions, (2 * self.layers) ** -0.5 if is_added else 1.0


def make_words(alphabet: list[str], first: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of pieces whose concatenations are all different: `first` pieces, then longer and longer words.

    Both halves are `first`, letters of `alphabet`, or the concatenation of an earlier pair, so that merging reaches
    every word.
    """
    stems = first
    while True:
        longer = []
        for stem, letter in itertools.product(stems, alphabet):
            yield stem, letter
            longer.append(stem + letter)
        stems = longer


def make_spm_vocabulary(vocab_size: int) -> Metadata:
    """A SentencePiece-like vocabulary: three control tokens, 256 bytes, letters and words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [SPM_UNKNOWN, SPM_CONTROL, SPM_CONTROL, *[SPM_BYTE] * 256]
    pieces = ["\u2581", *LETTERS]
    words = ("".join(pair) for pair in make_words(list(LETTERS), ["\u2581"]))
    tokens += [*pieces, *itertools.islice(words, vocab_size - len(tokens) - len(pieces))]
    types += [SPM_NORMAL] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def make_bpe_vocabulary(vocab_size: int) -> Metadata:
    """A byte-level BPE vocabulary like Llama 3's: 256 bytes, merged words, and special tokens at the end."""
    special_count = 256 if vocab_size > 100_000 else len(LLAMA3_SPECIALS)
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(special_count - len(LLAMA3_SPECIALS)))
    specials = [*LLAMA3_SPECIALS, *reserved]
    pieces = spell_bytes()
    pairs = list(itertools.islice(make_words(list(LETTERS), ["\u0120"]), vocab_size - len(pieces) - len(specials)))
    tokens = [*pieces, *("".join(pair) for pair in pairs), *specials]
    normal_count = len(tokens) - len(specials)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [SPM_NORMAL] * normal_count + [SPM_CONTROL] * len(specials),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": normal_count,
        "tokenizer.ggml.eos_token_id": normal_count + 1,
        "tokenizer.ggml.eot_token_id": normal_count + 4,
        "tokenizer.ggml.add_bos_token": True,
    }


def spell_bytes() -> list[str]:
    """The 256 bytes in byte-level BPE's spelling (GPT-2's table): printable ones unchanged, others from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)}
    others = itertools.count(256)
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def make_experts(experts: int, used: int, features: int, head_dim: int) -> dict[str, Any]:
    """The changes to a llama's configuration for a model of Qwen 3's kind with experts."""
    return {
        "model_type": "qwen3_moe",
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": features,
        "norm_topk_prob": True,
    }


def make_gpt_oss(experts: int, used: int, features: int, head_dim: int, window: int) -> dict[str, Any]:
    """The changes to a llama's configuration for gpt-oss's kind: every other layer has a window, heads have sinks."""
    return {
        "model_type": "gpt_oss",
        "head_dim": head_dim,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "attention_bias": True,
        "sliding_window": window,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "intermediate_size": features,
    }


def make_qwen35(value_heads: int, experts: int = 0, used: int = 0, features: int = 0) -> dict[str, Any]:
    """The changes to a llama's configuration for Qwen 3.5's kind: three of four layers have a gated delta net."""
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": features,
        "shared_expert_intermediate_size": features,
    }
    return {
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **(mixture if experts else {}),
    }


SHAPES = {
    "tiny": Shape(2, 256, 4, 2, 512, 2048, 512, make_bpe_vocabulary),  # to try things on an emulator
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 5632, 32_000, 2048, make_spm_vocabulary),
    "llama-3-8b": Shape(32, 4096, 32, 8, 14336, 128_256, 8192, make_bpe_vocabulary, 500000.0),
    "llama-3-70b": Shape(80, 8192, 64, 8, 28672, 128_256, 8192, make_bpe_vocabulary, 500000.0),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 8192, 128_256, 8192, make_bpe_vocabulary, 500000.0),
    "llama-3-draft": Shape(4, 1024, 16, 8, 4096, 128_256, 8192, make_bpe_vocabulary, 500000.0),
    "qwen3-30b-a3b": Shape(
        48, 2048, 32, 4, 6144, 151_936, 32_768, make_bpe_vocabulary, 1e6, make_experts(128, 8, 768, 128)
    ),
    "olmoe-1b-7b": Shape(
        16, 2048, 16, 16, 1024, 50_304, 4096, make_bpe_vocabulary, 10000.0, make_experts(64, 8, 1024, 128)
    ),
    "gpt-oss-20b": Shape(
        24, 2880, 64, 8, 2880, 201_088, 131_072, make_bpe_vocabulary, 150_000.0, make_gpt_oss(32, 4, 2880, 64, 128)
    ),
    "lfm2-1.2b": Shape(
        16,
        2048,
        32,
        8,
        8192,
        65_536,
        128_000,
        make_bpe_vocabulary,
        1e6,
        {
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "qwen3.5-0.8b": Shape(
        24,
        1024,
        8,
        2,
        3584,
        248_320,
        262_144,
        make_bpe_vocabulary,
        1e7,
        make_qwen35(16) | {"tie_word_embeddings": True},
    ),
    "qwen3.6-27b": Shape(64, 5120, 24, 4, 17_408, 248_320, 262_144, make_bpe_vocabulary, 1e7, make_qwen35(48)),
    "qwen3.5-35b-a3b": Shape(
        40, 2048, 16, 2, 512, 248_320, 262_144, make_bpe_vocabulary, 1e7, make_qwen35(32, 256, 8, 512)
    ),
    "tiny-delta": Shape(
        4,
        256,
        2,
        1,
        512,
        512,
        512,
        make_bpe_vocabulary,
        10000.0,
        make_qwen35(4)
        | {
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "tiny-moe": Shape(2, 256, 4, 2, 512, 512, 512, make_bpe_vocabulary, 10000.0, make_experts(8, 2, 256, 64)),
    "tiny-oss": Shape(4, 256, 8, 2, 192, 512, 512, make_bpe_vocabulary, 10000.0, make_gpt_oss(8, 2, 192, 32, 32)),
    "tiny-spm": Shape(2, 256, 4, 2, 512, 512, 512, make_spm_vocabulary),
    "tiny-bpe": Shape(2, 256, 4, 1, 512, 512, 512, make_bpe_vocabulary),
}


class Pools:
    """Encoded blocks to draw from, made once per type, row length and scale."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, int, float], Bytes] = {}

    def draw_chunks(self, name: str, type_name: str, shape: tuple[int, ...], gain: float) -> Iterator[Bytes]:
        """Yield a tensor's raw blocks in pieces. Vectors are ones, like fresh norms, or minus ones; biases zeros."""
        if len(shape) == 1:
            if name.endswith(".bias"):
                yield np.zeros(shape, np.float32).view(np.uint8)
                return
            if name.endswith("ssm_a"):  # negative, so that the state decays
                yield np.full(shape, -1, np.float32).view(np.uint8)
                return
            yield np.ones(shape, np.float32).view(np.uint8)
            return
        columns = shape[-1]
        pool = self.get_pool(type_name, columns, gain)
        generator = np.random.default_rng([self._seed, *name.encode()])
        blocks = math.prod(shape) // _count_drawn_values(type_name)
        step = max(1, CHUNK_BYTES // pool.shape[1])
        for start in range(0, blocks, step):
            yield pool[generator.integers(0, len(pool), min(step, blocks - start))].reshape(-1)

    def get_pool(self, type_name: str, columns: int, gain: float) -> Bytes:
        """Blocks (n, bytes) of weights for rows of `columns`; each `columns` and `gain` has a pool of its own."""
        key = (type_name, columns, gain)
        if key not in self._pools:
            generator = np.random.default_rng([self._seed, columns])
            values = generator.standard_normal((POOL_VALUES // 256, 256), np.float32) * np.float32(gain / columns**0.5)
            row, drawn_values = by_name(type_name), _count_drawn_values(type_name)
            drawn_bytes = drawn_values // row.block_size * row.type_size
            self._pools[key] = encode_tensor(type_name, values).reshape(-1, drawn_bytes)
        return self._pools[key]


def _count_drawn_values(type_name: str) -> int:
    """The number of values drawn from a pool at a time: several small blocks together, which is far quicker."""
    return max(by_name(type_name).block_size, 256)


def write_model(out: Path, shape: Shape, recipe_name: str, seed: int, progress: Callable[[int, int], None]) -> int:
    """Write the file; returns its size in bytes."""
    pools = Pools(seed)
    tensors = []
    for name, type_name, dimensions, gain in shape.plan_tensors(recipe_name):
        chunks = partial(pools.draw_chunks, name, type_name, dimensions, gain)
        tensors.append(TensorToWrite(name, type_name, dimensions, chunks))
    metadata = {
        "general.name": f"synthetic {recipe_name}",
        **shape.state(),
        "general.file_type": find_recipe(recipe_name).file_type,
        "general.quantization_version": 2,
        **shape.vocabulary(shape.vocab_size),
    }
    return write_gguf(out, metadata, tensors, progress=progress)


def show_progress(done: int, total: int) -> None:
    """Show the percentage on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{100 * done // total} %", end="\n" if done == total else "", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--type", required=True, choices=[recipe.name for recipe in RECIPES])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        size_bytes = write_model(given.out, SHAPES[given.shape], given.type, given.seed, show_progress)
    except MlxrError as error:
        print(f"synthetic: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {size_bytes / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
