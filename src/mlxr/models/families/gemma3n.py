"""Gemma 3n: Gemma 3's layers between four residual streams, with inputs of their own, as Gemma 4's small models have.

A product of low rank stands beside attention; in the first layers numbers of gates that do not stand out are 0. The
last layers read the keys and values of the last layer of their kind before them.
Source: llama.cpp, src/models/gemma3n.cpp; transformers, models/gemma3n.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import sqrt
from statistics import NormalDist

from mlxr.models import limits
from mlxr.models.components import AltUp, Layer, LayerInputs, Norms, Rope
from mlxr.models.components.layer import ALTUP_PRODUCTS
from mlxr.models.families.gemma import NORM_NAMES
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation, state_window_theta, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_COUNT, _ACTIVE, _RANK = "altup.num_inputs", "altup.active_idx", "laurel_rank"
_CUTS, _MOST_CUT = "activation_sparsity_scale", 1e3
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of files and folders that do not state them
_MOST_PARTS = 8
_NAMES = (
    NORM_NAMES
    | {
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale.weight",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
    }
    | {
        f"{prefix}{folder}.{part}.weight": f"{own.removesuffix('.weight')}.{part}.weight"
        for prefix in ("model.language_model.", "language_model.model.", "model.")
        for folder, own in zip(("altup_projections", "altup_unembed_projections"), ALTUP_PRODUCTS, strict=True)
        for part in range(_MOST_PARTS)
    }
)


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    fields, out = c.fields, c.out
    fields.refuse_unless(("altup_active_idx",), (0,), "only the first stream can be the one that blocks compute")
    fields.refuse_unless(("altup_correct_scale",), (True,), "not supported there")
    c.state_model(activation="gelu_tanh", biases="block", tied=True)
    c.note(("vocab_size_per_layer_input", "altup_coef_clip", "altup_lr_multiplier"))
    stated = fields.get("intermediate_size")
    if isinstance(stated, list):
        widths = fields.integers("intermediate_size", c.layers, 1, limits.MAX_WIDTH)
        out.put("feed_forward_length", list(widths), fields, "intermediate_size")
    else:
        c.state_width()
    state_rotation(c)
    state_windows(c, default=512, full_every=5, states_layers=True)
    state_window_theta(c, 10000.0)
    c.state_softcaps()
    out.put(_COUNT, fields.integer("altup_num_inputs", 2, _MOST_PARTS, default=4), fields, "altup_num_inputs")
    out.put(_ACTIVE, 0)
    out.put_own(_RANK, fields.integer("laurel_rank", 1, limits.MAX_WIDTH, default=64), fields, "laurel_rank")
    shared = fields.integer("num_kv_shared_layers", 0, c.layers, default=min(15, c.layers - 1))
    out.put("attention.shared_kv_layers", shared, fields, "num_kv_shared_layers")
    inputs = "hidden_size_per_layer_input"
    out.put(
        "embedding_length_per_layer_input", fields.integer(inputs, 1, limits.MAX_WIDTH, default=256), fields, inputs
    )
    out.put(_CUTS, _state_cuts(c), fields, "activation_sparsity_pattern")


def _state_cuts(c: FolderConfig) -> list[float]:
    """Return how many deviations above the mean stand out in each layer, minus infinity if nothing is cut."""
    name, shares = "activation_sparsity_pattern", [_SPARSITY] * _SPARSE_LAYERS + [0.0] * c.layers
    if c.fields.get(name) is not None:
        shares = [*c.fields.numbers(name, 0.0, 0.999999, c.layers)]
    elif c.layers <= _SPARSE_LAYERS:
        shares = [0.0] * c.layers
    return [NormalDist().inv_cdf(share) if share else -math.inf for share in shares[: c.layers]]


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, windowed = Norms(m.rms_eps, places="both"), m.rope(), m.windowed(full_every=5)
    window_rope = Rope(m.window_theta(10000.0), rope.dim, interleaved=False, has_factors=False)
    own = m.layers - m.integer("attention.shared_kv_layers", 0, m.layers - 1, default=0)
    if not {*windowed} <= {*windowed[:own]}:
        m.fields.refuse("attention.shared_kv_layers", "so many that each kind of layer stands before them")
    streams, inputs, cuts = _read_streams(m), _read_inputs(m), _read_cuts(m)
    widths, layers = m.integers("feed_forward_length", 1, limits.MAX_WIDTH), []
    for index, flag in enumerate(windowed):
        attention = m.attention(
            window_rope if flag else rope, window=m.window if flag else None, head_norms="each", scale=1.0
        )
        attention = replace(attention, norms_values=True)
        if index >= own:
            reads = max(other for other in range(own) if windowed[other] == flag)
            attention = replace(attention, projected="q", reads=reads)
        block = replace(m.feed_forward("gelu_tanh", features=widths[index]), cut=cuts[index])
        is_last = index + 1 == m.layers
        layers.append(Layer(attention, block, norms, inputs=inputs, streams=streams, is_last=is_last))
    softcap = m.number("final_logit_softcapping", 0.0, limits.MAX_SCALE, default=30.0)
    return m.model(layers, embedding_scale=sqrt(m.hidden), final_softcap=softcap or None)


def _read_streams(m: Metadata) -> AltUp:
    if m.integer(_ACTIVE, 0, default=0):
        m.fields.refuse(_ACTIVE, "0, as blocks compute the first stream")
    left = m.tensors.get("blk.0.laurel_l.weight")
    rank = m.own.integer(_RANK, 1, limits.MAX_WIDTH, default=64 if left is None else left.shape[0])
    return AltUp(m.integer(_COUNT, 2, _MOST_PARTS, default=4), rank)


def _read_inputs(m: Metadata) -> LayerInputs:
    features = m.integer("embedding_length_per_layer_input")
    # a product is divided by the root of the hidden size before its norm, which takes that back, but for eps
    eps = m.rms_eps * m.hidden
    return LayerInputs(features, m.activation("gelu_tanh"), table_scale=features**0.5, scale=0.5**0.5, eps=eps)


def _read_cuts(m: Metadata) -> list[float | None]:
    """Return the deviations of each layer, None if nothing is cut."""
    if m.fields.get(_CUTS) is None:
        cut = NormalDist().inv_cdf(_SPARSITY)
        return [cut if index < _SPARSE_LAYERS else None for index in range(m.layers)]
    cuts = m.numbers(_CUTS, -math.inf, _MOST_CUT)
    return [None if cut == -math.inf else cut for cut in cuts]


FAMILIES = (Family("gemma3n", build, (Folder("gemma3n_text", "Gemma3nForCausalLM", state, TensorLayout(_NAMES)),)),)
