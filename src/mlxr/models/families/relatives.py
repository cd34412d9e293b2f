"""Families that GGUF has names for and whose layers are those of others.

InternLM 2, XVERSE and Baichuan (7B) are Llamas, EXAONE 3 and Pangu Embedded those whose halves of a head rotate, as
Qwen 2's do, MiniCPM (1 and 2) is a Granite, and Orion a StableLM. Source: llama.cpp, src/models.
"""

from __future__ import annotations

from mlxr.models.families import granite, llama, qwen, stablelm
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_LAYERS_OF_BAICHUAN_13B = 40


def build_baichuan(m: Metadata) -> Model:
    """Return the model of these metadata. Raises ModelError for that of 13B, which has ALiBi in place of a rotation."""
    if m.layers == _LAYERS_OF_BAICHUAN_13B:
        m.fields.refuse("block_count", "another number, as Baichuan's model of 13B has ALiBi, which is not supported")
    return llama.build(m)


def build_minicpm(m: Metadata) -> Model:
    """Return the model of these metadata; older files state none of the three multipliers."""
    return granite.build(m, embedding=12.0, residual=1.4 / m.layers**0.5, logits=m.hidden / 256)


FAMILIES = (
    Family("internlm2", llama.build),
    Family("xverse", llama.build),
    Family("baichuan", build_baichuan),
    Family("exaone", qwen.build_qwen2),
    Family("pangu-embedded", qwen.build_qwen2),
    Family("minicpm", build_minicpm),
    Family("orion", stablelm.build),
)
