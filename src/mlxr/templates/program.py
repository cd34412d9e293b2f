"""Compiling and rendering a template, and saying in one line why that failed. This runs in the worker process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime

import jinja2
import jinja2.meta

from mlxr.templates.budget import MAX_SOURCE_CHARACTERS, BudgetExceeded
from mlxr.templates.sandbox import MeteredEnvironment

MAX_KEPT_PROGRAMS = 32


class ProgramError(Exception):
    """A template failed. The message is one line: the line of the template and the reason.

    `is_refusal` says that it compiled and stayed within its bounds, so that it might take another conversation.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class Programs:
    """Templates, compiled once each; the most recently used ones are kept."""

    def __init__(self) -> None:
        self._now = datetime.now(UTC)
        self._environment = MeteredEnvironment(lambda: self._now)
        self._compiled: OrderedDict[tuple[str, str], jinja2.Template] = OrderedDict()

    def render(self, source: str, label: str, variables: Mapping[str, object], now: datetime) -> str:
        """Return the text that `source` makes of `variables`, at the moment `now`.

        `label` is the template's name in tracebacks. Raises ProgramError when the template does not compile, refuses
        the variables, fails, or goes past a bound of `budget`; raises MemoryError when memory ran out.
        """
        self._now = now
        self.check(source, label)
        try:
            return self._environment.render_metered(self._compile(source, label), variables)
        except MemoryError:
            raise
        except Exception as error:  # a stranger's program can fail in any way
            is_refusal = not isinstance(error, BudgetExceeded | RecursionError)
            raise ProgramError(_explain(error, label), is_refusal=is_refusal) from None

    def check(self, source: str, label: str) -> str:
        """Return an empty text where `source` compiles; raises as `render` does where it does not."""
        try:
            self._compile(source, label)
        except MemoryError:
            raise
        except Exception as error:
            raise ProgramError(_explain(error, label)) from None
        return ""

    def find_variables(self, source: str) -> list[str]:
        """Return the variables that `source` reads and does not set itself, sorted; none where it does not compile."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            return []
        try:
            return sorted(jinja2.meta.find_undeclared_variables(self._environment.parse(source)))
        except (jinja2.TemplateError, RecursionError):
            return []

    def _compile(self, source: str, label: str) -> jinja2.Template:
        compiled = self._compiled.get((source, label))
        if compiled is None:
            if len(source) > MAX_SOURCE_CHARACTERS:
                raise BudgetExceeded(f"has {len(source)} characters, more than {MAX_SOURCE_CHARACTERS}")
            compiled = self._compiled[source, label] = self._environment.compile_metered(source, label)
            if len(self._compiled) > MAX_KEPT_PROGRAMS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end((source, label))
        return compiled


def _explain(error: Exception, label: str) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, BudgetExceeded):
        reason = f"{reason}; it was stopped"
    elif isinstance(error, RecursionError):
        reason = "is nested too deeply, or calls itself without end"
    elif not isinstance(error, jinja2.TemplateError):
        reason = f"{reason} ({type(error).__name__})"
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _find_line(error, label)
    return f"{f', line {line}' if line else ''}: {reason}"


def _find_line(error: Exception, label: str) -> int | None:
    """Return the template's line in a traceback: Jinja rewrites its frames to say it."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == label:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
