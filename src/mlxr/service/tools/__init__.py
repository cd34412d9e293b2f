"""Tool calls, one file per kind of format: describing tools, reading calls from a stream of text, enforcing them."""

from __future__ import annotations

from mlxr.service.tools.blocks import DEEPSEEK, FENCE, KIMI, OLD_DEEPSEEK, Gemma4Format, SectionFormat
from mlxr.service.tools.blocks import START as GEMMA4_START
from mlxr.service.tools.format import CallParser, CallPiece, Piece, ToolFormat
from mlxr.service.tools.harmony import RECOGNISED_BY as HARMONY_HEADER
from mlxr.service.tools.harmony import HarmonyFormat
from mlxr.service.tools.marked_json import TOOLS_VARIABLE, GenericFormat, HermesFormat, Llama3Format, SmolLM3Format
from mlxr.service.tools.mistral import (
    COHERE_START,
    HUNYUAN_END,
    HUNYUAN_START,
    NEMOTRON_END,
    NEMOTRON_START,
    PHI4_END,
    PHI4_START,
    CohereFormat,
    MistralFormat,
    Phi4Format,
)
from mlxr.service.tools.pythonic import LFM2_MARKS, OLMO_START, Lfm2Format, Olmo3Format
from mlxr.service.tools.xml import (
    ARG_KEY,
    ARG_VALUE,
    FUNCTION,
    MINIMAX_START,
    SEED_START,
    GlmFormat,
    QwenXmlFormat,
    Spelling,
)

__all__ = ["TOOLS_VARIABLE", "CallParser", "CallPiece", "Piece", "ToolFormat", "find_format"]


def find_format(template_source: str, *, takes_tools: bool) -> ToolFormat:
    """Return the format that a chat template teaches its model; the generic one if it teaches no known format."""
    if HARMONY_HEADER in template_source:
        return HarmonyFormat()
    if takes_tools:
        if KIMI.start in template_source:
            return SectionFormat(KIMI)
        if DEEPSEEK.start in template_source:
            is_old = FENCE in template_source or repr(FENCE)[1:-1] in template_source
            return SectionFormat(OLD_DEEPSEEK if is_old else DEEPSEEK)
        if "[TOOL_CALLS]" in template_source:
            return MistralFormat(has_args_marker="[ARGS]" in template_source)
        if TOOLS_VARIABLE in template_source:
            return SmolLM3Format()
        if FUNCTION in template_source and "<parameter=" in template_source:
            return QwenXmlFormat(Spelling(SEED_START, breaks_lines=False) if SEED_START in template_source else None)
        if MINIMAX_START in template_source:
            return QwenXmlFormat(Spelling(MINIMAX_START, breaks_lines=False, names=True))
        if HUNYUAN_START in template_source:
            return Phi4Format(HUNYUAN_START, HUNYUAN_END)
        if ARG_KEY in template_source:
            return GlmFormat(breaks_lines=f"</arg_key>{ARG_VALUE}" not in template_source)
        if any(mark in template_source for mark in LFM2_MARKS):
            return Lfm2Format(shows_calls="tool_calls" in template_source)
        if "<tool_call>" in template_source and FUNCTION not in template_source:
            return HermesFormat()
        if PHI4_START in template_source:
            return Phi4Format(PHI4_START, PHI4_END if PHI4_END in template_source else "")
        if NEMOTRON_START in template_source:
            return Phi4Format(NEMOTRON_START, NEMOTRON_END)
        if OLMO_START in template_source:
            return Olmo3Format()
        if GEMMA4_START in template_source:
            return Gemma4Format()
        if COHERE_START in template_source:
            return CohereFormat()
        if "<|start_header_id|>" in template_source or "<|python_tag|>" in template_source:
            return Llama3Format()
    return GenericFormat()
