"""From a conversation to the text that the model was trained to continue.

A model brings its own template, a Jinja program, in `tokenizer.chat_template` or beside its tokenizer. Gets messages
and tools as plain mappings, gives one string, special tokens spelt out. Knows no vocabulary but two spellings.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

import jinja2
import jinja2.meta

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.tokenizers.folder_config import DEFAULT_TEMPLATE, TOOL_TEMPLATE, FolderConfig
from mlxr.tokenizers.template_budget import BudgetExceeded
from mlxr.tokenizers.template_sandbox import MeteredEnvironment, read_local_clock

MAX_SOURCE_CHARACTERS = 1 << 20
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


class SpellingVocabulary(Protocol):
    """What a template needs of a tokenizer."""

    bos_id: int | None
    eos_ids: frozenset[int]

    def token_text(self, token_id: int, /) -> str:
        """The token as the vocabulary spells it."""
        ...

    def token_id(self, text: str, /) -> int | None:
        """The token that the vocabulary spells so, or None."""
        ...


class ChatTemplate:
    """One model's chat template. Safe to use from several threads at once.

    `name` is what errors call it. `tool_source` is used instead of `source` when there are tools, if the model has
    one. Compiled at the first rendering, so that a broken template does not keep a model from continuing text.
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
        self._environment = MeteredEnvironment(read_clock)
        self._compiled: dict[str, jinja2.Template] = {}
        self._lock = threading.Lock()

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

        `tools` and `documents` are None where there are none, as templates expect; `extra` are further variables,
        such as `enable_thinking`. Raises TemplateError naming the template and its line: it does not compile, refuses
        the messages, fails, or goes past a bound of `template_budget`. Raises InvalidRequest for an `extra` that
        would replace one of the template's own variables.
        """
        taken = sorted(_RESERVED & (extra or {}).keys())
        if taken:
            raise InvalidRequest(f"extra.{taken[0]}", "is a variable that the template gets from the conversation")
        variables = {
            **self.tokens,
            **(extra or {}),
            "messages": list(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        with_tools = bool(tools) and self.tool_source is not None
        source = self.tool_source if with_tools and self.tool_source is not None else self.source
        label = f"{self.name} ({TOOL_TEMPLATE})" if with_tools else self.name
        try:
            return self._environment.render_metered(self._compile(source, label), variables)
        except TemplateError:
            raise
        except Exception as error:  # a stranger's program can fail in any way
            raise _explain(error, label) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself; none where it does not compile."""
        names: set[str] = set()
        for source in (self.source, self.tool_source):
            if source is not None and len(source) <= MAX_SOURCE_CHARACTERS:
                with contextlib.suppress(jinja2.TemplateError, RecursionError):
                    names |= jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        return frozenset(names)

    def _compile(self, source: str, label: str) -> jinja2.Template:
        with self._lock:
            compiled = self._compiled.get(label)
            if compiled is None:
                if len(source) > MAX_SOURCE_CHARACTERS:
                    raise TemplateError(
                        f"chat template {label}: has {len(source)} characters, more than {MAX_SOURCE_CHARACTERS}"
                    )
                compiled = self._compiled[label] = self._environment.compile_metered(source, label)
            return compiled


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


def chat_template_from_source(source: str, tokenizer: SpellingVocabulary, own: ChatTemplate | None) -> ChatTemplate:
    """A template to use instead of a model's `own`, with the same spellings of its tokens."""
    template = _make_template(source, None, tokenizer, None, own.name if own is not None else "set for the model")
    assert template is not None  # there is a source
    if own is not None:
        template.tokens = own.tokens
    return template


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
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token, name=name, tool_source=tool_source)


def _explain(error: Exception, label: str) -> TemplateError:
    """One line about a template that failed: its name, the line, the reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, BudgetExceeded):
        reason = f"{reason}; it was stopped"
    elif isinstance(error, RecursionError):
        reason = "is nested too deeply, or calls itself without end"
    elif not isinstance(error, jinja2.TemplateError):
        reason = f"{reason} ({type(error).__name__})"
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _find_line(error, label)
    return TemplateError(f"chat template {label}{f', line {line}' if line else ''}: {reason}")


def _find_line(error: Exception, label: str) -> int | None:
    """The template's line in a traceback: Jinja rewrites its frames to say it."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == label:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
