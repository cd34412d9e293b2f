"""What a caller can ask for, in one form for all front doors: a text to continue or a conversation to answer.

Plain values. The dialects of the server and the command line make them; `service` turns them into token ids,
parameters and a grammar for the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from mlxr.core.types import Grammar, SamplingParams
from mlxr.service.prompt import Message, Prompt
from mlxr.service.window import Window

if TYPE_CHECKING:
    from mlxr.loading import Adapter
    from mlxr.service.adapters import AdapterChoice


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({"type": "object"}))


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The tool choice "this one"."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool
Ending = Literal["new turn", "continued", "closed"]


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Continue `prompt`. With `cache_prompt` off nothing that is cached is used for it. `window` bounds its part of the
    context; None is all of it. `adapter` is a low-rank adapter of the model that is loaded, or the name of one; None is
    that which the model was made with, if any.

    A higher `priority` (-100 to 100) is served first; after `deadline_s` seconds the answers end with DEADLINE. Each
    answer begins with the text `echo`, which comes with the prompt's tokens where the parameters ask for logprobs.
    """

    prompt: Prompt
    params: SamplingParams
    grammar: Grammar | None = None
    cache_prompt: bool = True
    priority: int = 0
    deadline_s: float | None = None
    echo: str | None = None
    window: Window | None = None
    adapter: AdapterChoice | Adapter | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Answer a conversation.

    `think` switches reasoning on or off, or sets its effort, where the model's template knows such a switch; None
    leaves it to the template. The prompt ends where the assistant's turn begins (`ending` "new turn"), inside the last
    message, which is the assistant's ("continued"), or behind the last message ("closed"). `chat_template` is a
    template to use instead of the model's, or the name of one that comes with mlxr, and `template_values` are further
    variables of the template. `thinking_message` is said before a thought that is used up is closed; None is what the
    setting says. The other fields are those of `TextRequest`; a `grammar` holds for the answer's text, after any
    reasoning. With tools to choose from, an answer is calls of them or that text.
    """

    messages: Sequence[Message]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    think: bool | str | None = None
    ending: Ending = "new turn"
    chat_template: str | None = None
    template_values: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    thinking_message: str | None = None
    cache_prompt: bool = True
    priority: int = 0
    deadline_s: float | None = None
    window: Window | None = None
    adapter: AdapterChoice | Adapter | None = None
