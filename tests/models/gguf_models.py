"""Tiny models of families that are known only from GGUF files: metadata and tensors, without any of mlxr's code.

A model is a row of MODELS: its metadata besides the sizes, and the tensors of its layers in a short form. The weights
follow from the name. tests/peers writes them into files for llama.cpp, with `gguf`'s own writer, and keeps llama.cpp's
logits for them in gguf_goldens/.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDENS = Path(__file__).parent / "gguf_goldens"
TOKENS = 60  # of a golden text, longer than the windows
Arrays = dict[str, NDArray[np.float32]]
_ATTENTION = "attn_norm attn_q attn_k attn_v attn_output "
_JOINED = "attn_norm+ attn_qkv attn_output "
_GATED = "ffn_norm ffn_gate ffn_up ffn_down"
_EXPERTS = "ffn_norm ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
_SHARED = " ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
_HEADS = "attn_q_norm attn_k_norm "


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; `kv_heads` may be a number for each layer, and then `heads` and `ffn` are, too."""

    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocabulary: int = 97
    layers: int = 4
    experts: int = 6


@dataclass(frozen=True)
class Tiny:
    """A model: the tensors of a layer, the metadata, and unusual sizes.

    After a name `+` stands for a bias, `!` for no `.weight` after the name, `*2` for twice as many rows, and `*h` for a
    row for each head.
    """

    layer: str
    metadata: Mapping[str, Any]
    ends: str = "output_norm output"
    layers: int = 4
    kv_heads: int | None = None  # if there is one number for all layers
    first: str = ""  # the tensors of the first layer, if it has others
    by_layer: bool = False  # heads and features differ by layer
    step: int = 0  # of so many layers in a row, all but the last have the tensors of the first one
    head_list: tuple[int, ...] = ()  # heads of each layer, if they differ
    kv_list: tuple[int, ...] = ()  # and heads of keys
    value_dim: int = 0  # in sixteenths of a key's, if it differs from that


RMS, LAYER = {"attention.layer_norm_rms_epsilon": 1e-5}, {"attention.layer_norm_epsilon": 1e-5}
_WINDOWS = {"attention.sliding_window": 12, "rope.freq_base": 20000.0}
_EVERY_FOURTH = {"attention.sliding_window_pattern": [True, True, True, False]}
_FIRST_FULL = {"attention.sliding_window_pattern": [False, True, True, True]}
_MIXTURE = {"expert_count": 6, "expert_used_count": 2}
MODELS: dict[str, Tiny] = {
    "bloom": Tiny(
        "attn_norm+ attn_qkv+ attn_output+ ffn_norm+ ffn_up+ ffn_down+", LAYER, "token_embd_norm+ output_norm+"
    ),
    "mpt": Tiny(
        "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down",
        {**LAYER, "attention.max_alibi_bias": 8.0},
        "output_norm",
    ),
    "refact": Tiny(_ATTENTION + _GATED, RMS, kv_heads=1),
    "jais": Tiny(
        "attn_norm+ attn_qkv+ attn_output+ ffn_norm+ ffn_gate+ ffn_up+ ffn_down+",
        {**LAYER, "attention.max_alibi_bias": 8.0},
        "output_norm+ output",
    ),
    "baichuan": Tiny(_ATTENTION + _GATED, RMS, layers=40),  # which tells that it is the model of 13B
    "gptneox": Tiny(
        "attn_norm+ attn_qkv+ attn_output+ ffn_norm+ ffn_up+ ffn_down+",
        {**LAYER, "use_parallel_residual": True, "rope.dimension_count": 8},
        "output_norm+ output",
    ),
    "falcon": Tiny(
        _JOINED + "attn_norm_2+ ffn_up ffn_down", {**LAYER, "tensor_data_layout": "jploski"}, "output_norm+"
    ),
    "codeshell": Tiny(
        "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm+ ffn_up+ ffn_down+", LAYER, "output_norm+ output"
    ),
    "olmo": Tiny("attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down", LAYER, "output"),
    "jais2": Tiny(
        "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm+ ffn_up+ ffn_down+", LAYER, "output_norm+ output"
    ),
    "maincoder": Tiny(_ATTENTION + _HEADS + _GATED, RMS, "output_norm"),
    "plamo": Tiny(_ATTENTION + "ffn_gate ffn_up ffn_down", RMS),
    "plamo3": Tiny(
        "attn_norm attn_qkv attn_output post_attention_norm! ffn_norm ffn_up*2 ffn_down post_ffw_norm! " + _HEADS,
        {
            **RMS,
            **_WINDOWS,
            "rope.freq_base_swa": 7000.0,
            "attention.sliding_window_pattern": [True, False, True, True],
        },
    ),
    "openelm": Tiny("attn_norm attn_qkv attn_output " + _HEADS + _GATED, RMS, "output_norm", by_layer=True),
    "smallthinker": Tiny(
        _ATTENTION + _EXPERTS,
        {**RMS, **_MIXTURE, "attention.sliding_window": 4096, "context_length": 8192, "expert_gating_func": 2},
        layers=5,  # of four llama.cpp takes it that all rotate
    ),
    "mellum": Tiny(_ATTENTION + _HEADS + _EXPERTS, {**RMS, **_MIXTURE, **_WINDOWS, **_EVERY_FOURTH}),
    "hy_v3": Tiny(
        _ATTENTION + _HEADS + _EXPERTS + " exp_probs_b!" + _SHARED,
        {**RMS, **_MIXTURE, "expert_weights_norm": True, "expert_weights_scale": 1.7, "expert_gating_func": 2},
        first=_ATTENTION + _HEADS + _GATED,
    ),
    "cohere2moe": Tiny(
        _ATTENTION + _EXPERTS.removeprefix("ffn_norm ") + _SHARED,
        {
            **LAYER,
            **_MIXTURE,
            **_WINDOWS,
            "attention.sliding_window_pattern": [False, True, True, False],
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "logit_scale": 0.7,
        },
        "output_norm",
        first=_ATTENTION + _GATED.removeprefix("ffn_norm "),
    ),
    "granite_swa": Tiny(
        _ATTENTION + "attn_sinks " + _GATED,
        {
            **RMS,
            **_WINDOWS,
            "attention.sliding_window_pattern": [False, True, True, True],
            "attention.rope_pattern": [True, False, True, True],
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "logit_scale": 0.5,
        },
        "output_norm",
    ),
    "spark2_5": Tiny(
        "attn_norm attn_qkv attn_gate*h attn_output " + _GATED,
        {
            **RMS,
            **_WINDOWS,
            "rope.freq_base_swa": 7000.0,
            "rope.dimension_count": 8,
            "rope.dimension_count_swa": 12,
            "attention.sliding_window_pattern": [True, True, False, True],
        },
    ),
    "nanbeige": Tiny(_ATTENTION + _GATED, {**RMS, "num_loops": 2, "skip_loop_final_norm": False}, layers=3),
    "plm": Tiny(
        "attn_norm attn_q attn_kv_a_mqa attn_kv_a_norm attn_kv_b attn_output ffn_norm ffn_up ffn_down",
        {**RMS, "attention.kv_lora_rank": 0},  # which follows from the sizes
        "output_norm",
    ),
    "arctic": Tiny(_ATTENTION + _GATED + " ffn_norm_exps " + _EXPERTS.removeprefix("ffn_norm "), {**RMS, **_MIXTURE}),
    "bitnet": Tiny(_ATTENTION + "attn_sub_norm ffn_sub_norm " + _GATED, RMS, "output_norm"),
    "llama4": Tiny(
        _ATTENTION + _EXPERTS + _SHARED,
        {**RMS, "expert_count": 6, "expert_used_count": 1, "interleave_moe_layer_step": 2, "rope.freq_base": 20000.0},
        first=_ATTENTION + _GATED,
        step=2,
    ),
    "mimo2": Tiny(
        _ATTENTION + "attn_sinks " + _EXPERTS + " exp_probs_b.bias!",
        {
            **RMS,
            **_MIXTURE,
            **_WINDOWS,
            **_FIRST_FULL,
            "rope.freq_base_swa": 7000.0,
            "rope.dimension_count": 8,
            "attention.value_scale": 0.7,
        },
        first=_ATTENTION + _GATED,
        kv_list=(1, 2, 2, 2),
        value_dim=8,
    ),
    "laguna": Tiny(
        _ATTENTION + _HEADS + "attn_gate*h " + _EXPERTS + " exp_probs_b.bias!" + _SHARED,
        {
            **RMS,
            **_MIXTURE,
            **_WINDOWS,
            **_FIRST_FULL,
            "rope.freq_base_swa": 7000.0,
            "rope.dimension_count": 8,
            "rope.dimension_count_swa": 12,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.7,
            "expert_gating_func": 2,
        },
        first=_ATTENTION + _HEADS + "attn_gate*h " + _GATED,
        head_list=(4, 8, 8, 8),
    ),
    "muse-glimmer": Tiny(
        _ATTENTION + _HEADS + "attn_gate post_attention_norm post_ffw_norm " + _GATED,
        {**RMS, **_WINDOWS, **_EVERY_FOURTH, "logit_scale": 1.5, "final_logit_softcapping": 6.0},
    ),
}


def make(name: str, sizes: Sizes = Sizes()) -> tuple[dict[str, Any], Arrays]:
    """Return a model's metadata, without the prefix of its architecture, and its tensors by GGUF's names."""
    tiny, random = MODELS[name], np.random.RandomState(zlib.crc32(name.encode()))
    layers = tiny.layers if tiny.layers != Tiny.layers else sizes.layers
    heads, widths = [sizes.heads] * layers, [sizes.ffn] * layers
    kv_heads = [
        tiny.kv_heads or (sizes.heads if name in ("bloom", "jais", "gptneox", "mpt", "plm") else sizes.kv_heads)
    ] * layers
    if tiny.by_layer:
        heads, kv_heads = [(2, 4)[i % 2] for i in range(layers)], [(1, 2)[i % 2] for i in range(layers)]
        widths = [sizes.ffn * (1 + i % 2) for i in range(layers)]
    heads, kv_heads = list(tiny.head_list) or heads, list(tiny.kv_list) or kv_heads
    values = sizes.head_dim * (tiny.value_dim or 16) // 16
    metadata: dict[str, Any] = {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": sizes.hidden,
        "feed_forward_length": widths if tiny.by_layer else sizes.ffn,
        "attention.head_count": heads if tiny.by_layer or tiny.head_list else sizes.heads,
        "attention.head_count_kv": kv_heads if tiny.by_layer or tiny.kv_list else kv_heads[0],
        "vocab_size": sizes.vocabulary,
    }
    if name == "arctic":
        widths = [sizes.hidden] * layers
    if tiny.by_layer or {"expert_count", "attention.kv_lora_rank"} & tiny.metadata.keys():
        metadata |= {"attention.key_length": sizes.head_dim, "attention.value_length": values}
    if "expert_count" in tiny.metadata:
        metadata["expert_feed_forward_length"] = sizes.ffn
    is_latent = "attention.kv_lora_rank" in tiny.metadata
    if "rope.dimension_count" not in tiny.metadata:
        metadata["rope.dimension_count"] = sizes.head_dim // (1 + is_latent)
    arrays: Arrays = {"token_embd.weight": 0.5 * _draw(random, sizes.vocabulary, sizes.hidden)}
    for part in tiny.ends.split():
        _add(arrays, "", part, sizes, random, (sizes.heads, kv_heads[0], sizes.ffn, values))
    for index in range(layers):
        is_first = (index + 1) % tiny.step if tiny.step else not index
        for part in (tiny.first if tiny.first and is_first else tiny.layer).split():
            own = heads[index], kv_heads[index], widths[index], values
            _add(arrays, f"blk.{index}.", part, sizes, random, own)
    count = {"expert_count": sizes.experts} if "expert_count" in tiny.metadata else {}
    count |= {"attention.kv_lora_rank": sizes.hidden} if is_latent else {}
    return metadata | dict(tiny.metadata) | count, arrays


def make_tokens(name: str, sizes: Sizes = Sizes(), count: int = TOKENS) -> list[int]:
    """A random text."""
    tokens = np.random.RandomState(zlib.crc32(name.encode()) ^ 1).randint(0, sizes.vocabulary, count)
    return [int(token) for token in tokens]


def _draw(random: np.random.RandomState, *shape: int) -> NDArray[np.float32]:
    return np.asarray(random.standard_normal(shape), np.float32)


def _add(
    arrays: Arrays, prefix: str, part: str, sizes: Sizes, random: np.random.RandomState, own: tuple[int, int, int, int]
) -> None:
    """Draw a tensor, and its bias."""
    has_bias, part = part.endswith("+"), part.removesuffix("+")
    is_bare, part = part.endswith("!"), part.removesuffix("!")
    twice, part = part.endswith("*2"), part.removesuffix("*2")
    by_head, name = part.endswith("*h"), part.removesuffix("*h")
    (heads, kv_heads, ffn, values_dim), hidden, dim = own, sizes.hidden, sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "output": (sizes.vocabulary, hidden),
        "attn_q": (heads * dim, hidden),
        "attn_k": (kv_heads * dim, hidden),
        "attn_v": (kv_heads * values_dim, hidden),
        "attn_qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "attn_gate": (heads * (1 if by_head else dim), hidden),
        "attn_kv_a_mqa": (hidden + dim // 2, hidden),
        "attn_kv_b": (heads * (dim + dim // 2), hidden),
        "attn_sub_norm": (heads * dim,),
        "ffn_sub_norm": (ffn,),
        "attn_output": (hidden, heads * values_dim),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
        "attn_sinks": (heads,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn * (1 + twice), hidden),
        "ffn_down": (hidden, ffn),
        "ffn_gate_shexp": (ffn, hidden),
        "ffn_up_shexp": (ffn, hidden),
        "ffn_down_shexp": (hidden, ffn),
        "exp_probs_b": (sizes.experts,),
        "exp_probs_b.bias": (sizes.experts,),
        "ffn_gate_inp": (sizes.experts, hidden),
        "ffn_gate_exps": (sizes.experts, sizes.ffn, hidden),
        "ffn_up_exps": (sizes.experts, sizes.ffn, hidden),
        "ffn_down_exps": (sizes.experts, hidden, sizes.ffn),
    }
    shape = shapes.get(name, (hidden,))  # a norm
    values = _draw(random, *shape)
    if name == "attn_sinks":
        values += np.float32(0.5)
    elif len(shape) == 1:
        values = np.float32(1.0) + np.float32(0.2) * values
    else:
        values *= np.float32((2.4 if name == "output" else 4.0 if name == "ffn_gate_inp" else 1.0) / shape[-1] ** 0.5)
    if name.startswith("exp_probs_b"):
        values = np.float32(0.3) * (values - np.float32(1.0))
    arrays[prefix + name + ("" if is_bare else ".weight")] = values
    if has_bias:
        arrays[f"{prefix}{name}.bias"] = np.float32(0.3) * _draw(random, shape[0])
