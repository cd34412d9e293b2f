"""Write a GGUF model of a known shape with random weights: something to measure that nobody has to download.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import MlxrError
from mlxr.formats import TensorToWrite, by_name, encode_tensor, write_gguf
from mlxr.formats.recipes import RECIPES, find_recipe, tensor_type
from mlxr.kernels.moe import RoutingRule
from mlxr.models import ModelConfig
from mlxr.models.names import gguf_metadata
from mlxr.models.specs import Mixture

POOL_VALUES = 1 << 20
CHUNK_BYTES = 1 << 24
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
SPM_UNKNOWN, SPM_CONTROL, SPM_NORMAL, SPM_BYTE = 2, 3, 1, 6
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

Bytes = NDArray[np.uint8]
Metadata = dict[str, object]


@dataclass(frozen=True)
class Shape:
    """A model's measures and the kind of its vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab_size: int
    context_length: int
    vocabulary: Callable[[int], Metadata]
    rope_theta: float = 10000.0
    own_head_dim: int | None = None
    mixture: Mixture | None = None

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.own_head_dim or self.hidden // self.heads

    def to_config(self) -> ModelConfig:
        """The same as the configuration of a llama model, or with a mixture of experts of a Qwen 3 model."""
        head_dim = self.head_dim
        return ModelConfig(
            architecture="llama" if self.mixture is None else "qwen3_moe",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            ffn=self.ffn,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            rms_eps=1e-5,
            rope_theta=self.rope_theta,
            rope_dim=head_dim,
            rope_interleaved=self.mixture is None,
            qk_norm=self.mixture is not None,
            mixture=self.mixture,
        )

    def list_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names as GGUF spells them, and shapes (rows, columns)."""
        q_rows, kv_rows = self.head_dim * self.heads, self.head_dim * self.kv_heads
        yield "token_embd.weight", (self.vocab_size, self.hidden)
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", (self.hidden,)
            yield f"blk.{layer}.attn_q.weight", (q_rows, self.hidden)
            yield f"blk.{layer}.attn_k.weight", (kv_rows, self.hidden)
            yield f"blk.{layer}.attn_v.weight", (kv_rows, self.hidden)
            yield f"blk.{layer}.attn_output.weight", (self.hidden, q_rows)
            yield f"blk.{layer}.ffn_norm.weight", (self.hidden,)
            for name, dimensions in self._list_feed_forward():
                yield f"blk.{layer}.{name}.weight", dimensions
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (self.vocab_size, self.hidden)

    def _list_feed_forward(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        suffix, first, rows = "", (), self.ffn
        if self.mixture is not None:
            suffix, first, rows = "_exps", (self.mixture.experts,), self.mixture.features
            yield "attn_q_norm", (self.head_dim,)
            yield "attn_k_norm", (self.head_dim,)
            yield "ffn_gate_inp", (self.mixture.experts, self.hidden)
        yield f"ffn_gate{suffix}", (*first, rows, self.hidden)
        yield f"ffn_up{suffix}", (*first, rows, self.hidden)
        yield f"ffn_down{suffix}", (*first, self.hidden, rows)

    def plan_tensors(self, recipe_name: str) -> Iterator[tuple[str, str, tuple[int, ...], float]]:
        """Name, type by the recipe, shape, and the factor on the tensor's weights.

        What is added to the residual stream is scaled down, so that it grows by a constant over all layers.
        """
        for name, dimensions in self.list_tensors():
            type_name = tensor_type(
                recipe_name,
                name,
                dimensions,
                layer=int(name.split(".")[1]) if name.startswith("blk.") else 0,
                layers=self.layers,
                tied_output=False,
                query_groups=self.heads // self.kv_heads,
            )
            if "ffn_gate_inp" in name:
                type_name = "f32"
            is_added = "attn_output" in name or "ffn_down" in name
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
    """A byte-level BPE vocabulary as Llama 3 has it: 256 bytes, merged words, and special tokens at the end."""
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
    """The 256 bytes as byte-level BPE spells them (GPT-2's table): printable ones as they are, others from U+0100."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)}
    others = itertools.count(256)
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


QWEN3_RULE, OLMOE_RULE, TINY_RULE = (RoutingRule(used, renormalises=True) for used in (8, 8, 2))
SHAPES = {
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 5632, 32_000, 2048, make_spm_vocabulary),
    "llama-3-8b": Shape(32, 4096, 32, 8, 14336, 128_256, 8192, make_bpe_vocabulary, 500000.0),
    "qwen3-30b-a3b": Shape(
        48, 2048, 32, 4, 6144, 151_936, 32_768, make_bpe_vocabulary, 1e6, 128, Mixture(128, 768, "silu", QWEN3_RULE)
    ),
    "olmoe-1b-7b": Shape(
        16, 2048, 16, 16, 1024, 50_304, 4096, make_bpe_vocabulary, 10000.0, None, Mixture(64, 1024, "silu", OLMOE_RULE)
    ),
    "tiny-moe": Shape(
        2, 256, 4, 2, 512, 512, 512, make_bpe_vocabulary, 10000.0, None, Mixture(8, 256, "silu", TINY_RULE)
    ),
    "tiny-spm": Shape(2, 256, 4, 2, 512, 512, 512, make_spm_vocabulary),
    "tiny-bpe": Shape(2, 256, 4, 1, 512, 512, 512, make_bpe_vocabulary),
}


class Pools:
    """Encoded blocks to draw from, made once per type, row length and scale."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, int, float], Bytes] = {}

    def draw_chunks(self, name: str, type_name: str, shape: tuple[int, ...], gain: float) -> Iterator[Bytes]:
        """The raw blocks of a tensor, in pieces. Vectors are all ones, as norms begin."""
        if len(shape) == 1:
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
        """Blocks (n, bytes) of weights for rows of `columns`, with each `columns` and `gain` of its own."""
        key = (type_name, columns, gain)
        if key not in self._pools:
            generator = np.random.default_rng([self._seed, columns])
            values = generator.standard_normal((POOL_VALUES // 256, 256), np.float32) * np.float32(gain / columns**0.5)
            row, drawn_values = by_name(type_name), _count_drawn_values(type_name)
            drawn_bytes = drawn_values // row.block_size * row.type_size
            self._pools[key] = encode_tensor(type_name, values).reshape(-1, drawn_bytes)
        return self._pools[key]


def _count_drawn_values(type_name: str) -> int:
    """Values drawn from a pool at a time: small blocks go several together, which is as random and far quicker."""
    return max(by_name(type_name).block_size, 256)


def write_model(out: Path, shape: Shape, recipe_name: str, seed: int, progress: Callable[[int, int], None]) -> int:
    """Write the file; its size in bytes."""
    pools = Pools(seed)
    tensors = []
    for name, type_name, dimensions, gain in shape.plan_tensors(recipe_name):
        chunks = partial(pools.draw_chunks, name, type_name, dimensions, gain)
        tensors.append(TensorToWrite(name, type_name, dimensions, chunks))
    metadata = {
        "general.name": f"synthetic {recipe_name}",
        **gguf_metadata(shape.to_config()),
        "general.file_type": find_recipe(recipe_name).file_type,
        "general.quantization_version": 2,
        **shape.vocabulary(shape.vocab_size),
    }
    return write_gguf(out, metadata, tensors, progress=progress)


def show_progress(done: int, total: int) -> None:
    """Percent on a terminal."""
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
