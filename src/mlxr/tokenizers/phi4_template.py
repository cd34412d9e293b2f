"""A chat template with tools for Phi-4-mini, whose own shows no calls and takes tools only as text in a message.

Source of the format: the model card of microsoft/Phi-4-mini-instruct, and the special tokens of its vocabulary.
"""

from __future__ import annotations

_TOOLS_IN_MESSAGE = "message['tools']"  # where the model's own template expects them

TOOL_SOURCE = """\
{%- set has_system = messages[0].role == "system" -%}
<|system|>{{ messages[0].content if has_system else "You are a helpful assistant with some tools." -}}
<|tool|>{{ tools | map(attribute="function") | list | tojson }}<|/tool|><|end|>
{%- for message in (messages[1:] if has_system else messages) -%}
<|{{ "tool_response" if message.role == "tool" else message.role }}|>{{ message.content -}}
{%- if message.tool_calls -%}
<|tool_call|>{{ message.tool_calls | map(attribute="function") | list | tojson }}<|/tool_call|>
{%- endif -%}
<|end|>
{%- endfor -%}
{{ "<|assistant|>" if add_generation_prompt else eos_token }}"""


def find_tool_source(source: str) -> str | None:
    """The template to use with tools instead of `source`, None where that is not Phi-4-mini's."""
    return TOOL_SOURCE if _TOOLS_IN_MESSAGE in source and "<|tool|>" in source else None
