"""Qwen3.8-Flash-Next: the layers of Qwen3.5 MoE between four residual streams, and rows of a table that n-grams name.

Gated attention has an indexer that chooses blocks of tokens. In a text with no more tokens than it may choose, it
chooses all, so these models run with contexts of that length, and the indexer's weights are left in the file. Source:
llama.cpp, src/models/qwen4exp.cpp and conversion/qwen4exp.py; transformers, models/qwen4_exp.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.kernels.embed import Ngrams
from mlxr.kernels.sources import make_words
from mlxr.models import limits
from mlxr.models.components import Attention, GatedDelta, Layer, NgramInputs, Norms, Streams
from mlxr.models.components.layer import TABLE, TABLE_PARTS
from mlxr.models.families import qwen35
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_INDEXER, _HYPER, _PLE = "attention.indexer.", "hyper_connection.", "ple."
_MOST_PARTS = 1024  # of a folder's table
_MOST_SIZES = 1 << 31
_NAMES = (
    {name: part for name, part in qwen35.NAMES.items() if name != "post_attention_layernorm"}
    | {
        "self_attn.indexer.index_qk_proj": "indexer.qk_proj",
        "self_attn.indexer.q_layernorm": "indexer.q_norm",
        "self_attn.indexer.k_layernorm": "indexer.k_norm",
        **{f"ple.{name}_proj": f"ple_{name}" for name in ("key", "value")},
        **{f"ple.norm_{name}": f"ple_norm_{name}" for name in ("key", "query", "conv")},
        "ple.conv1d": "ple_conv1d",
    }
    | {
        f"{module}.{name}": f"{block}_{part}"
        for module, block in (("attn_hyper_connection", "hc_attn"), ("mlp_hyper_connection", "hc_ffn"))
        for name, part in (
            ("hc_norm", "norm"),
            ("input_mix_weight_down", "down"),
            ("input_mix_weight_up", "up"),
            ("block_inject_weight", "inject"),
        )
    }
    | {
        f"{prefix}hyper_connection_mixer.{name}.weight": f"output_hc_{part}.weight"
        for prefix in ("model.", "model.language_model.")
        for name, part in (("hc_norm", "norm"), ("input_mix_weight_down", "down"), ("input_mix_weight_up", "up"))
    }
    | {f"ple.ple_embedding.ngram_embedding.shard_{part}": f"{TABLE_PARTS}{part}" for part in range(_MOST_PARTS)}
)


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.fields.refuse_unless(("output_gate_type",), ("sigmoid",), "only gates by sigmoids are supported there")
    qwen35.state_mixture(c)
    fields, out = c.fields, c.out
    out.put(f"{_HYPER}count", fields.integer("hc_count", 2, 64, default=4), fields, "hc_count")
    out.put(f"{_HYPER}low_rank", fields.integer("hc_lowrank", 1, limits.MAX_WIDTH, default=320), fields, "hc_lowrank")
    budget = fields.integer("indexer_budget", 1, limits.MAX_CONTEXT, default=limits.MAX_CONTEXT)
    if fields.get("indexer_budget") is not None:
        out.put(f"{_INDEXER}top_k", budget, fields, "indexer_budget")
    layers = fields.get("ple_layer_ids") or []
    if layers:
        _state_table(c, layers)


def _state_table(c: FolderConfig, layers: object) -> None:
    """State the table and the hash by which rows are found, which follows from a seed and sizes
    (transformers, models/qwen4_exp)."""
    fields, out = c.fields, c.out
    if not isinstance(layers, list) or len(layers) != 1 or type(layers[0]) is not int:
        fields.refuse("ple_layer_ids", "the number of one layer, from 1 on")
    longest = fields.integer("ngram_size", 2, 8, default=3)
    heads = fields.integer("heads_per_ngram", 1, 64, default=8) * (longest - 1)
    width = fields.integer("ple_embed_dim", 1, limits.MAX_WIDTH, default=c.hidden)
    if width % heads:
        fields.refuse("ple_embed_dim", f"a multiple of the {heads} rows of a token")
    end = fields.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int:
        fields.refuse("eos_token_id", "the id of a token, which begins n-grams anew")
    base = fields.integer("ngram_vocab_size_base", 2, 1 << 26, default=20_000_000)
    sizes = _find_primes(base, heads)
    whole = fields.integer("make_ngram_vocab_size_divisible_by", 1, 1 << 20, default=128)
    offsets = [sum(sizes[:head]) for head in range(heads)]
    out.put(f"{_PLE}layers", [layers[0] - 1], fields, "ple_layer_ids")
    out.put(f"{_PLE}ngram_size", longest)
    out.put(f"{_PLE}heads_per_ngram", heads // (longest - 1))
    out.put(f"{_PLE}conv_kernel", fields.integer("ple_conv_kernel_size", 2, limits.MAX_TAPS, default=4))
    out.put(f"{_PLE}eos_token_id", end)
    out.put("embedding_length_per_layer_input", width // heads)
    seed = fields.integer("seed", 0, 1 << 62, default=1234)
    multipliers = _draw_multipliers(seed, out.integer("vocab_size"), longest)
    for name, numbers in (("layer_multipliers", multipliers), ("head_offsets", offsets), ("head_vocab_sizes", sizes)):
        out.put(f"{_PLE}{name}", make_words(numbers))
    out.put_own("ngram_rows", -(-sum(sizes) // whole) * whole)


def _draw_multipliers(seed: int, vocabulary: int, count: int) -> list[int]:
    """Return odd numbers whose products with ids stay below 2**63, by the generator splitmix64."""
    most, drawn, mask = max(1, ((1 << 63) - 1) // vocabulary // 2), list[int](), (1 << 64) - 1
    for index in range(count):
        value = (seed + 0x9E3779B97F4A7C15 * (index + 2)) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        drawn.append(2 * ((value ^ (value >> 31)) % most) + 1)
    return drawn


def _find_primes(least: int, count: int) -> list[int]:
    """Return the first primes from `least` on."""
    found, number = list[int](), least
    while len(found) < count:
        if number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    m.fields.note(f"{_INDEXER}{name}" for name in ("head_count", "key_length"))
    m.fields.note(("attention.compress_ratios", f"{_PLE}image_token_id"))
    streams = Streams(m.integer(f"{_HYPER}count", 2, 64), m.integer(f"{_HYPER}low_rank", 1, limits.MAX_WIDTH))
    named, inputs = _read_table(m, streams.count)
    model, norms = qwen35.build(m), Norms(m.rms_eps)
    if named >= 0 and model.layers[named].recurrence is None:
        m.fields.refuse(f"{_PLE}layers", "a layer that is recurrent, which keeps the last tokens")
    layers = []
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        if isinstance(mixer, GatedDelta):
            mixer = replace(mixer, by_sigmoid=True)
        elif isinstance(mixer, Attention):
            mixer = replace(mixer, indexed=True)
        own, is_last = inputs if index == named else None, index + 1 == len(model.layers)
        layers.append(Layer(mixer, layer.feed_forward, norms, streams=streams, ngrams=own, is_last=is_last))
    most = m.integer(f"{_INDEXER}top_k", 1, limits.MAX_CONTEXT, default=model.context_length)
    context = min(model.context_length, most)
    return replace(model, layers=tuple(layers), output_norm=None, context_length=context)


def _read_table(m: Metadata, streams: int) -> tuple[int, NgramInputs | None]:
    """Return the layer that has rows of n-grams, -1 if none has, and its additions."""
    if m.fields.get(f"{_PLE}layers") is None:
        return -1, None
    (layer,) = m.fields.integers(f"{_PLE}layers", 1, 0, m.layers - 1)
    longest = m.integer(f"{_PLE}ngram_size", 2, 8)
    heads = m.integer(f"{_PLE}heads_per_ngram", 1, 64) * (longest - 1)
    ngrams = Ngrams(
        m.integer(f"{_PLE}eos_token_id", 0, m.vocabulary - 1),
        m.fields.integers(f"{_PLE}layer_multipliers", longest, 0, (1 << 64) - 1),
        m.fields.integers(f"{_PLE}head_vocab_sizes", heads, 1, _MOST_SIZES),
        m.fields.integers(f"{_PLE}head_offsets", heads, 0, _MOST_SIZES),
    )
    least = max(offset + size for offset, size in zip(ngrams.offsets, ngrams.sizes, strict=True))
    table = m.tensors.get(TABLE) if m.own.get("ngram_rows") is None else None
    rows = m.own.integer("ngram_rows", 1, _MOST_SIZES, default=least) if table is None else table.shape[0]
    if rows < least:
        m.fields.refuse(f"{_PLE}head_vocab_sizes", f"no more than the {rows} rows of {TABLE} together")
    features = m.integer("embedding_length_per_layer_input")
    taps = m.integer(f"{_PLE}conv_kernel", 2, limits.MAX_TAPS)
    return layer, NgramInputs(ngrams, rows, features, streams, m.hidden, taps)


FAMILIES = (
    Family(
        "qwen4exp",
        build,
        (Folder("qwen4_exp_text", "Qwen4ExpForCausalLM", state, TensorLayout(_NAMES, norms_from_one=True)),),
    ),
)
