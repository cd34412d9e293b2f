"""Calls of tools, one file per format: how they are asked for, read from a stream of text, and enforced by grammar."""

from __future__ import annotations

from mlxr.service.tools.cohere import START as COHERE_START
from mlxr.service.tools.cohere import CohereFormat
from mlxr.service.tools.format import CallParser, CallPiece, Piece, ToolFormat
from mlxr.service.tools.gemma4 import START as GEMMA4_START
from mlxr.service.tools.gemma4 import Gemma4Format
from mlxr.service.tools.generic import GenericFormat
from mlxr.service.tools.glm import KEY as ARG_KEY
from mlxr.service.tools.glm import VALUE as ARG_VALUE
from mlxr.service.tools.glm import GlmFormat
from mlxr.service.tools.harmony import RECOGNISED_BY as HARMONY_HEADER
from mlxr.service.tools.harmony import HarmonyFormat
from mlxr.service.tools.hermes import HermesFormat
from mlxr.service.tools.lfm2 import RECOGNISED_BY as LFM2_MARKS
from mlxr.service.tools.lfm2 import Lfm2Format
from mlxr.service.tools.llama3 import Llama3Format
from mlxr.service.tools.mistral import MistralFormat
from mlxr.service.tools.olmo3 import START as OLMO_START
from mlxr.service.tools.olmo3 import Olmo3Format
from mlxr.service.tools.phi4 import END, NEMOTRON_END, NEMOTRON_START, START, Phi4Format
from mlxr.service.tools.qwen_xml import FUNCTION, QwenXmlFormat
from mlxr.service.tools.smollm3 import TOOLS_VARIABLE, SmolLM3Format

__all__ = ["TOOLS_VARIABLE", "CallParser", "CallPiece", "Piece", "ToolFormat", "find_format"]


def find_format(template_source: str, *, takes_tools: bool) -> ToolFormat:
    """The format that a chat template teaches its model; the generic one where it teaches none that is known."""
    if HARMONY_HEADER in template_source:
        return HarmonyFormat()
    if takes_tools:
        if "[TOOL_CALLS]" in template_source:
            return MistralFormat(has_args_marker="[ARGS]" in template_source)
        if TOOLS_VARIABLE in template_source:
            return SmolLM3Format()
        if FUNCTION in template_source and "<parameter=" in template_source:
            return QwenXmlFormat()
        if ARG_KEY in template_source:
            return GlmFormat(breaks_lines=f"</arg_key>{ARG_VALUE}" not in template_source)
        if any(mark in template_source for mark in LFM2_MARKS):
            return Lfm2Format(shows_calls="tool_calls" in template_source)
        if "<tool_call>" in template_source and FUNCTION not in template_source:
            return HermesFormat()
        if START in template_source:
            return Phi4Format(START, END if END in template_source else "")
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
