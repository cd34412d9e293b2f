"""EuroBERT, NeoBERT, and Llamas that see whole texts (llama-embed-nemotron): Llama's layers without mask and output.

GGUF keeps the rotation of the first in halves and that of the others in neighbouring pairs, as of every Llama. Folders
and files of NeoBERT have the rows of a head's query, key and value together (llama.cpp, whose converter leaves them so,
reads them as if all queries came first).
"""

from __future__ import annotations

from functools import partial

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.components.attention import QKV_OF_HEADS
from mlxr.models.components.feed_forward import GATE_AND_UP
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State an encoder with the sizes of a Llama."""
    c.state_model(kv_heads=c.heads, biases="block")
    c.state_width()
    state_rotation(c)
    c.state_encoder()


def build(m: Metadata, *, interleaved: bool) -> Model:
    """Return the model of these metadata."""
    attention = m.attention(m.rope(interleaved=interleaved), is_causal=m.is_causal(False))
    return m.model([Layer(attention, m.feed_forward(), Norms(m.rms_eps))] * m.layers, has_output=False)


_NEO_NAMES = {
    **{f"{prefix}encoder.weight": "token_embd.weight" for prefix in ("", "model.")},
    **{f"{prefix}layer_norm.weight": "enc.output_norm.weight" for prefix in ("", "model.")},
    "decoder.weight": "",  # of masked words
    "decoder.bias": "",
    "qkv": "attn_qkv",
    "wo": "attn_output",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "ffn.w12": "ffn_up",
    "ffn.w3": "ffn_down",
}
_NEO_MULTIPLE = 8  # of features


def state_neo(c: FolderConfig) -> None:
    """State NeoBERT, whose folders say how many features a feed-forward block without a gate would have."""
    fields = c.fields
    fields.refuse_unless(("rope", "rms_norm"), (True,), "not supported in this family")
    fields.refuse_unless(("ngpt",), (False,), "not supported in this family")
    fields.refuse_unless(("hidden_act",), ("SwiGLU", "swiglu"), "only SwiGLU is supported in this family")
    c = c.rename({"hidden_act": "neo_hidden_act", "max_length": "max_position_embeddings"}, {"norm_eps": 1e-6})
    c.state_model(kv_heads=c.heads, eps_key="norm_eps")
    stated = int(2 * c.fields.integer("intermediate_size", 2, limits.MAX_WIDTH) / 3)
    width = -(-stated // _NEO_MULTIPLE) * _NEO_MULTIPLE
    c.out.put("feed_forward_length", width, c.fields, "intermediate_size")
    state_rotation(c)
    c.state_encoder()


def build_neo(m: Metadata) -> Model:
    """Return the NeoBERT of these metadata."""
    attention = m.attention(m.rope(interleaved=True), is_causal=m.is_causal(False))
    layer, joins = Layer(attention, m.feed_forward(), Norms(m.rms_eps)), (QKV_OF_HEADS, GATE_AND_UP)
    return m.model([layer] * m.layers, output_norm="enc.output_norm", has_output=False, joins=joins, rank_pooling="cls")


FAMILIES = (
    Family("eurobert", partial(build, interleaved=False), (Folder("eurobert", "EuroBertModel", state),)),
    Family(
        "neo-bert",
        build_neo,
        (Folder("neobert", "NeoBERT", state_neo, TensorLayout(_NEO_NAMES, turns_neighbours=True), "NeoBERTLMHead"),),
    ),
    Family(
        "llama-embed",
        partial(build, interleaved=True),
        (Folder("llama_bidirec", "LlamaBidirectionalModel", state),),
    ),
)
