"""Chat templates with a name: the marks of well-known families, for models whose file has no template or a wrong one.

A row says what stands around the text of each role, and `find_named` makes a Jinja template of it. They show no tools,
so the service describes those in words. An order of roles that a family has no place for is refused, as by published
templates, and the service finds one that has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Holds what a family writes; `{}` stands for the text, `<bos>` and `<eos>` for the vocabulary's tokens.

    `begin` is what a prompt begins with, besides a BOS that the vocabulary wants anyway; `opening` stands before an
    answer. Instructions are written as `system`, anywhere or only at the start (`system_first`), or as `in_user`,
    before the text of the user's first message; some families have neither. Texts are stripped of the space around them
    if the family's own template `trims` them.
    """

    user: str
    assistant: str
    opening: str = ""
    system: str = ""
    system_first: bool = True
    in_user: str = ""
    begin: str = ""
    alternates: bool = False
    trims: bool = False


def _mark_roles(
    form: str, roles: tuple[str, str, str] = ("user", "assistant", "system"), *, begin: str = "", trims: bool = False
) -> Marks:
    """A family that writes all roles in one form."""
    user, assistant, system = (form.replace("ROLE", role) for role in roles)
    return Marks(user, assistant, assistant.partition("{}")[0], system, system_first=False, begin=begin, trims=trims)


def _mark_inst(user: str, assistant: str, system: str = "") -> Marks:
    return Marks(user, assistant, system=system, begin="<bos>", alternates=True)


NAMED: Mapping[str, Marks] = {
    "chatml": _mark_roles("<|im_start|>ROLE\n{}<|im_end|>\n"),
    "command-r": _mark_roles(
        "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        ("USER", "CHATBOT", "SYSTEM"),
        begin="<bos>",
        trims=True,
    ),
    "deepseek3": Marks("<｜User｜>{}", "<｜Assistant｜>{}<eos>", "<｜Assistant｜>", "{}", begin="<bos>"),
    "gemma": Marks(
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        begin="<bos>",
        alternates=True,
        trims=True,
    ),
    "granite": _mark_roles("<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>\n"),
    "llama2": Marks(
        "<bos>[INST] {} [/INST]",
        " {} <eos>",
        in_user="<<SYS>>\n{}\n<</SYS>>\n\n",
        alternates=True,
        trims=True,
    ),
    "llama3": _mark_roles("<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>", begin="<bos>", trims=True),
    "mistral": _mark_inst("[INST] {}[/INST]", " {}<eos>"),  # that of v3
    "mistral-v1": _mark_inst(" [INST] {} [/INST]", " {}<eos>"),
    "mistral-v3": _mark_inst("[INST] {}[/INST]", " {}<eos>"),
    "mistral-v3-tekken": _mark_inst("[INST]{}[/INST]", "{}<eos>"),
    "mistral-v7": _mark_inst("[INST] {}[/INST]", " {}<eos>", "[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]"),
    "mistral-v7-tekken": _mark_inst("[INST]{}[/INST]", "{}<eos>", "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]"),
    "phi3": _mark_roles("<|ROLE|>\n{}<|end|>\n"),
    "phi4": _mark_roles("<|im_start|>ROLE<|im_sep|>{}<|im_end|>"),
    "vicuna": Marks("USER: {} ", "ASSISTANT: {}<eos>", "ASSISTANT:", "{} "),
    "zephyr": _mark_roles("<|ROLE|>\n{}<eos>\n"),
}
_BODY = """
{%- set ns = namespace(before='', last='assistant') %}
{{- begin }}
{%- for message in messages %}
    {%- set role = message['role'] %}
    {%- set text = message['content'] | trim if trims else message['content'] %}
    {%- if role == 'system' and in_user and loop.first %}
        {%- set ns.before = in_user.replace('{}', text) %}
    {%- elif not forms[role] or (role == 'system' and system_first and not loop.first) %}
        {{- raise_exception('There is no place here for a message of the role ' ~ role) }}
    {%- elif alternates and role == ns.last %}
        {{- raise_exception('The roles user and assistant must alternate') }}
    {%- else %}
        {{- forms[role].replace('{}', ns.before ~ text) }}
        {%- set ns.before = '' %}
        {%- if role != 'system' %}
            {%- set ns.last = role %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- opening if add_generation_prompt else '' }}"""


def find_named(name: str) -> str | None:
    """Return the Jinja template of that name, None where there is none."""
    marks = NAMED.get(name)
    if marks is None:
        return None
    forms = ", ".join(f"'{role}': {_write(getattr(marks, role))}" for role in ("user", "assistant", "system"))
    sets = {
        "forms": f"{{{forms}}}",
        **{key: _write(getattr(marks, key)) for key in ("begin", "opening", "in_user")},
        **{key: str(getattr(marks, key)).lower() for key in ("system_first", "alternates", "trims")},
    }
    return "\n".join(f"{{%- set {key} = {value} %}}" for key, value in sets.items()) + _BODY


def _write(form: str) -> str:
    """The Jinja expression for a form."""
    tokens = {"<bos>": "bos_token", "<eos>": "eos_token"}
    parts = [part for part in re.split("(<bos>|<eos>)", form) if part]
    return " ~ ".join(tokens.get(part) or json.dumps(part, ensure_ascii=False) for part in parts) or "''"
