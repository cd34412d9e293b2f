"""Apertus: heads of queries and keys are normed; feed-forward blocks have no gate, but xIELU, of which each layer has
numbers of its own.

Files keep two of these before their softplus, as folders do (transformers' XIELUActivation, llama.cpp's ggml_xielu).
"""

from __future__ import annotations

import math

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"})
_NUMBERS = {"alpha_n": math.log(math.expm1(0.3)), "alpha_p": math.log(math.expm1(0.8)), "beta": 0.5, "eps": -1e-6}


def state(c: FolderConfig) -> None:
    """State the sizes of a model, and the numbers of its activations."""
    c.state_model(kv_heads=c.heads, activation="xielu", biases="block")
    c.state_width()
    state_rotation(c)
    for name, beginning in _NUMBERS.items():
        c.state_numbers(f"xielu.{name}", f"mlp.act_fn.{name}", beginning)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    numbers = zip(*(m.numbers(f"xielu.{name}", -1e4, 1e4) for name in _NUMBERS), strict=True)
    return m.model(
        Layer(
            m.attention(rope, head_norms="each"),
            m.feed_forward("xielu", gated=False, parameters=(beta + _softplus(alpha_n), _softplus(alpha_p), beta, eps)),
            norms,
        )
        for alpha_n, alpha_p, beta, eps in numbers
    )


def _softplus(number: float) -> float:
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))


FAMILIES = (Family("apertus", build, (Folder("apertus", "ApertusForCausalLM", state, _TENSORS),)),)
