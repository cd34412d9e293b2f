"""Small models with random weights and real vocabularies, which are in llama.cpp's source too."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

SOURCE = Path(os.environ["LLAMACPP_SOURCE"])
HIDDEN, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 4, 128, 16384


def make_model(folder: Path, vocabulary: str) -> Path:
    """Write a model of llama's architecture with this vocabulary, unless it is there; return its path."""
    path = folder / f"{vocabulary}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(SOURCE / "models" / f"ggml-vocab-{vocabulary}.gguf")
    making = path.with_suffix(".making")
    writer = gguf.GGUFWriter(making, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    random = np.random.default_rng(7)
    for name, shape in list_tensors(tokens):
        flat = name.endswith("norm.weight")
        values = np.ones(shape, np.float32) if flat else random.normal(0, 1 / np.sqrt(shape[-1]), shape)
        writer.add_tensor(name, values.astype(np.float32 if flat else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    making.rename(path)
    return path


def list_tensors(tokens: int) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the model's tensors, for a vocabulary of `tokens`."""
    outer = [("token_embd", (tokens, HIDDEN)), ("output_norm", (HIDDEN,)), ("output", (tokens, HIDDEN))]
    block = {
        **{f"attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    inner = [(f"blk.{layer}.{name}", shape) for layer in range(LAYERS) for name, shape in block.items()]
    return [(f"{name}.weight", shape) for name, shape in (*outer, *inner)]
