"""Chat templates, which turn a conversation into the text that the model was trained to continue.

A model brings its own template, a Jinja program, in `tokenizer.chat_template` or beside its tokenizer. Takes messages
and tools as plain mappings, returns one string, special tokens spelt out. Knows no vocabulary except two spellings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.core.frozen import frozen
from mlxr.templates.workers import template_workers
from mlxr.tokenizers.folder import DEFAULT_TEMPLATE, TOOL_TEMPLATE, FolderConfig

_TOOLS_IN_MESSAGE = "message['tools']"  # where Phi-4-mini's own template looks for tools

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
    """The template to use with tools instead of `source`, None unless that is Phi-4-mini's."""
    return TOOL_SOURCE if _TOOLS_IN_MESSAGE in source and "<|tool|>" in source else None


@frozen
class Marks:
    """The forms of a family's messages; `{}` stands for the text, `<bos>` and `<eos>` for the vocabulary's tokens.

    `begin` begins a prompt, after the BOS that the vocabulary itself adds; `opening` stands before an answer.
    Instructions are written as `system`, anywhere or only at the start (`system_first`), or as `in_user`, before the
    text of the user's first message; some families have neither. If the family's own template `trims` texts, the space
    around them is removed.
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
    """The marks of a family that writes all roles in one form."""
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
        "<bos>[INST] {} [/INST]", " {} <eos>", in_user="<<SYS>>\n{}\n<</SYS>>\n\n", alternates=True, trims=True
    ),
    "llama3": _mark_roles("<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>", begin="<bos>", trims=True),
    "mistral": _mark_inst("[INST] {}[/INST]", " {}<eos>"),  # the form of v3
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
    """Return the Jinja template of that name, None if there is none."""
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
    """Return the Jinja expression for a form."""
    tokens = {"<bos>": "bos_token", "<eos>": "eos_token"}
    parts = [part for part in re.split("(<bos>|<eos>)", form) if part]
    return " ~ ".join(tokens.get(part) or json.dumps(part, ensure_ascii=False) for part in parts) or "''"


RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


def read_local_clock() -> datetime:
    """Return the present moment in local time."""
    return datetime.now(UTC).astimezone()


class SpellingVocabulary(Protocol):
    """The parts of a tokenizer that a template uses."""

    bos_id: int | None
    eos_ids: frozenset[int]

    def token_text(self, token_id: int, /) -> str:
        """The vocabulary's spelling of the token."""
        ...

    def token_id(self, text: str, /) -> int | None:
        """The token with that spelling, or None."""
        ...


class ChatTemplate:
    """One model's chat template. Safe to use from several threads at once.

    `name` is its name in errors. `tool_source`, if set, is used instead of `source` when there are tools. The template
    is compiled at the first rendering, so that a model with a broken one can still continue text, and it runs in a
    worker process (`mlxr.templates`), because it is a stranger's program. `values` are further variables; those of a
    rendering win.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        name: str,
        tool_source: str | None = None,
        read_clock: Callable[[], datetime] = read_local_clock,
    ) -> None:
        self.source, self.tool_source, self.name = source, tool_source, name
        self.tokens: Mapping[str, str] = {"bos_token": bos_token, "eos_token": eos_token}
        self.values: Mapping[str, object] = {}
        self._read_clock = read_clock

    def prepare(self) -> None:
        """Start a worker process for the first conversation, without waiting for it."""
        template_workers.prepare()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        documents: Sequence[object] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages`, ready for the assistant's turn if `add_generation_prompt`.

        `tools` and `documents` are None if there are none, as templates expect; `extra` are further variables, such as
        `enable_thinking`. Raises TemplateError naming the template and its line if it does not compile, refuses the
        messages, fails, or exceeds a bound of `mlxr.templates`. Raises InvalidRequest for an `extra` that
        would replace one of the template's own variables.
        """
        taken = sorted(RESERVED & (extra or {}).keys())
        if taken:
            raise InvalidRequest(f"extra.{taken[0]}", "is a variable that the template gets from the conversation")
        now = self._read_clock()
        variables = {
            **self.tokens,
            "date_string": now.strftime("%d %b %Y"),  # Llama 3's name for today
            "datetime": now.strftime("%b %d %Y"),  # Firefunction's
            "functions": "",  # Firefunction's too; for templates that know no `tools`, these are in the system message
            **self.values,
            **(extra or {}),
            "messages": list(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        with_tools = bool(tools) and self.tool_source is not None
        source = self.tool_source if with_tools and self.tool_source is not None else self.source
        label = f"{self.name} ({TOOL_TEMPLATE})" if with_tools else self.name
        return template_workers.render(source, label, variables, now)

    def check(self) -> None:
        """Raise TemplateError for a template that does not compile."""
        for source in filter(None, (self.source, self.tool_source)):
            template_workers.check(source, self.name)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself; none if it does not compile."""
        sources = filter(None, (self.source, self.tool_source))
        return frozenset().union(*map(template_workers.find_variables, sources))


def chat_template_from_gguf(metadata: Mapping[str, object], tokenizer: SpellingVocabulary) -> ChatTemplate | None:
    """The chat template in a GGUF file's metadata, or None if it has none."""
    source = metadata.get("tokenizer.chat_template")
    tool_source = metadata.get(f"tokenizer.chat_template.{TOOL_TEMPLATE}")
    for key, value in (("", source), (f".{TOOL_TEMPLATE}", tool_source)):
        if value is not None and not isinstance(value, str):
            raise TemplateError(f"tokenizer.chat_template{key} must be a string")
    eos_id = metadata.get("tokenizer.ggml.eos_token_id")
    eos_token = tokenizer.token_text(eos_id) if isinstance(eos_id, int) and eos_id in tokenizer.eos_ids else None
    name = metadata.get("general.name")
    return _make_template(
        source if isinstance(source, str) else None,
        tool_source if isinstance(tool_source, str) else None,
        tokenizer,
        eos_token,
        name if isinstance(name, str) and name else "in the file",
    )


def chat_template_from_folder(path: str | os.PathLike[str], tokenizer: SpellingVocabulary) -> ChatTemplate | None:
    """The chat template in a model folder, or None if it has none; template files win over tokenizer_config.json."""
    config = FolderConfig(Path(path))
    templates = config.read_templates()
    return _make_template(
        templates.get(DEFAULT_TEMPLATE),
        templates.get(TOOL_TEMPLATE),
        tokenizer,
        config.read_role("eos_token"),
        config.folder.name,
    )


def chat_template_from_source(
    source: str, tokenizer: SpellingVocabulary, own: ChatTemplate | None, name: str
) -> ChatTemplate:
    """A template to use instead of a model's `own`, with the same spellings of tokens. `name` is for errors."""
    template = _make_template(source, None, tokenizer, None, name)
    assert template is not None  # there is a source
    if own is not None:
        template.tokens, template.values = own.tokens, own.values
    return template


def refuse_chat(model_name: str) -> TemplateError:
    """The error for a conversation with a model that has no chat template."""
    return TemplateError(
        f"{model_name} has no chat template, so it can continue text but not chat; "
        "use plain completion (`mlxr run --raw`, `LLM.generate`)"
    )


def _make_template(
    source: str | None, tool_source: str | None, tokenizer: SpellingVocabulary, eos_token: str | None, name: str
) -> ChatTemplate | None:
    if source is None:
        source = tool_source
    if source is None:
        return None
    if eos_token is None:
        eos_token = tokenizer.token_text(min(tokenizer.eos_ids)) if tokenizer.eos_ids else ""
    bos_token = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    tool_source = tool_source or find_tool_source(source)
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token, name=name, tool_source=tool_source)
