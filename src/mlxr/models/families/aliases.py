"""Families that have their own name in GGUF, but layers of other families.

InternLM 2, XVERSE and Baichuan are Llamas; Baichuan 13B has ALiBi in place of a rotation. EXAONE 3 and Pangu Embedded
are Llamas whose halves of a head rotate, like those of Qwen 2. MiniCPM (1 and 2) is a Granite, Orion a StableLM, and
CodeShell a StarCoder 2. Llama Nemotron Super (`deci`) is a Llama some of whose layers lack a block, and whose blocks
differ in width; so do those of OpenELM, which have as many heads as the file says. Source: llama.cpp, src/models.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.families import granite, llama, qwen, stablelm, starcoder2
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_LAYERS_OF_BAICHUAN_13B = 40


def build_baichuan(m: Metadata) -> Model:
    """Return the model of these metadata; only their depth tells that scores fall with the distance of a key."""
    if m.layers != _LAYERS_OF_BAICHUAN_13B:
        return llama.build(m)
    m.rope()
    layer = Layer(m.attention(NO_ROPE, biases=m.slopes()), m.feed_forward(), Norms(m.rms_eps))
    return m.model([layer] * m.layers)


def build_minicpm(m: Metadata) -> Model:
    """Return the model of these metadata; older files state none of the three multipliers."""
    return granite.build(m, embedding=12.0, residual=1.4 / m.layers**0.5, logits=m.hidden / 256)


def build_deci(m: Metadata) -> Model:
    """Return the model of these metadata. Raises ModelError for layers that neither attend nor have features, and for
    those whose attention is one product (51B)."""
    counts = m.integers("attention.head_count_kv", 0, limits.MAX_HEADS)
    widths = m.integers("feed_forward_length", 0, limits.MAX_WIDTH)
    norms, rope, layers = Norms(m.rms_eps), m.rope(interleaved=True), []
    for heads, kv_heads, width in zip(m.head_counts, counts, widths, strict=True):
        if bool(heads) != bool(kv_heads):
            m.fields.refuse("attention.head_count_kv", "0 in layers without heads alone")
        if not heads and not width:
            m.fields.refuse("feed_forward_length", "a number above 0 in layers that do not attend")
        attention = m.attention(rope, kv_heads=kv_heads) if heads else None
        layers.append(Layer(attention, m.feed_forward(features=width) if width else None, norms))
    return m.model(layers)


def build_openelm(m: Metadata) -> Model:
    """Return the model of these metadata."""
    m.fields.note(("attention.head_count",))
    counts = m.integers("attention.head_count_kv", 1, limits.MAX_HEADS)
    widths, norms, rope = m.integers("feed_forward_length", 1, limits.MAX_WIDTH), Norms(m.rms_eps), m.rope()
    return m.model(
        Layer(
            m.attention(rope, heads=heads, kv_heads=kv_heads, head_norms="each"), m.feed_forward(features=width), norms
        )
        for heads, kv_heads, width in zip(m.head_counts, counts, widths, strict=True)
    )


FAMILIES = (
    Family("internlm2", llama.build),
    Family("xverse", llama.build),
    Family("baichuan", build_baichuan),
    Family("deci", build_deci),
    Family("exaone", qwen.build_qwen2),
    Family("pangu-embedded", qwen.build_qwen2),
    Family("minicpm", build_minicpm),
    Family("orion", stablelm.build),
    Family("codeshell", starcoder2.build),
    Family("openelm", build_openelm),
)
