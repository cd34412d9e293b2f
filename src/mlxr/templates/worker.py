"""The process in which templates run: `python -m mlxr.templates.worker`, with its connection as standard input.

The system enforces its limits, because a C function called by a template checks no budget: memory for the whole
process, processor time for each rendering. It can write no file and start no process. It ends when the connection does.

Jinja's own sandbox keeps templates away from Python; it does not keep them from writing without end. So the parsed
template gets a counter in every loop and macro, and everything that can make a large value out of small ones (`*`, `+`,
`~`, `%`, slices, string methods, filters) is measured against a `Budget`, in advance if the size can be known. Filters
that no chat template needs are absent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import resource
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlxr.core.processes import limit
from mlxr.templates.budget import (
    ENTRY_ITEMS,
    MAX_MEMORY_BYTES,
    MAX_SOURCE_CHARACTERS,
    READY,
    STEPS_PER_CALL,
    Budget,
    BudgetExceeded,
    Closed,
    pack,
    receive,
)

_FILTERS = (
    "abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int items "
    "join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title tojson trim truncate unique upper wordcount wordwrap"
)
# Filters that write out or visit all of their input, those that pad or repeat, and those that make lists of it.
_WHOLE_INPUT_FILTERS = frozenset({"e", "escape", "format", "join", "replace", "string", "sum", "tojson"})
_WIDTH_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "wordwrap"})
_LIST_FILTERS = frozenset({"batch", "list", "reverse", "slice", "sort", "unique"})
# String methods whose numbers are positions or limits, not widths.
_POSITION_METHODS = "count endswith find index replace rfind rindex rsplit split startswith"
_TRANSLATE_METHODS = frozenset({"translate", "maketrans"})
# Filters that only `_Meter` can apply: no template can write a name with a space.
_COUNT_TURN, _CONCATENATE, _COUNT_MADE = "count turn", "concatenate values", "count made"


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates within a `Budget`; one rendering per thread at a time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, read_clock: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationExtension],
            finalize=self._finish_output,
            optimized=False,  # nothing is computed before there is a budget for it
        )
        self._local = threading.local()
        self.filters["tojson"] = self._write_json
        self.filters = {name: self._meter_filter(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters[_COUNT_TURN] = self._count_turn
        self.filters[_CONCATENATE] = self._concatenate
        self.filters[_COUNT_MADE] = self._count_made
        del self.globals["lipsum"]
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda text: read_clock().strftime(text)

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering."""
        budget = getattr(self._local, "budget", None)
        if not isinstance(budget, Budget):
            raise RuntimeError("a template runs without a budget")
        return budget

    def compile_metered(self, source: str, name: str) -> jinja2.Template:
        """Compile a template in which every loop and every growing value is counted."""
        self._local.budget = Budget()
        tree = self.parse(source, name=name, filename=name)
        tree = _Meter().visit(tree)
        code = self.compile(tree, name=name, filename=name)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def render_metered(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """Return the text that `template` writes, within a new budget."""
        budget = self._local.budget = Budget()
        parts: list[str] = []
        for part in template.generate(dict(variables)):
            budget.count_output(len(part))
            parts.append(part)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, if its result will not be too large."""
        self.budget.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Do a call, if its result will not be too large."""
        args = self._check_method(called, args, kwargs)
        result = super().call(context, called, *args, **kwargs)
        self.budget.count_value(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format`, sandboxed by Jinja and with bounded widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            self.budget.check_brace_format(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return checked

    def _check_method(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Check a call of a method of a string or number; returns the arguments, with lists in place of iterators."""
        owner, name, budget = getattr(method, "__self__", None), getattr(method, "__name__", ""), self.budget
        if not isinstance(owner, str | bytes | int):
            return args
        if name in _TRANSLATE_METHODS:
            raise jinja2.exceptions.SecurityError(f"{name} is not available to chat templates")
        if name not in _POSITION_METHODS.split():
            budget.check_width(*args, *kwargs.values())
        if isinstance(owner, int):
            return args
        if name == "join" and args:
            items = list(args[0])
            budget.count_items(budget.measure(items) + len(owner) * len(items))
            return (items, *args[1:])
        if name == "replace" and len(args) >= 2:
            _count_replacements(budget, owner, args[0], args[1])
        elif name == "expandtabs":
            budget.count_items(len(owner) + _count_in(owner, "\t") * int(args[0] if args else 8))
        elif name in ("split", "rsplit", "splitlines"):
            separator = args[0] if args and name != "splitlines" else None
            pieces = _count_in(owner, separator) if separator else len(owner) // 2
            budget.count_items(pieces * ENTRY_ITEMS)
        return args

    def _meter_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with a check of its input before and a count of its result after."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment that Jinja passes first

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            value, options = args[skipped], (*args[skipped + 1 :], *kwargs.values())
            if (
                name in _WHOLE_INPUT_FILTERS
                and isinstance(value, Iterable)
                and not isinstance(value, str | Mapping | list)
            ):
                value = list(value)
            self._check_filter(name, value, options)
            result = function(*args[:skipped], value, *args[skipped + 1 :], **kwargs)
            self.budget.count_value(result)
            return result

        return metered

    def _check_filter(self, name: str, value: Any, options: tuple[Any, ...]) -> None:
        budget = self.budget
        if name in _WIDTH_FILTERS:
            budget.check_width(*options)
        if name in _WHOLE_INPUT_FILTERS:
            budget.count_items(budget.measure(value, *options))
        if name in _LIST_FILTERS and isinstance(value, str):
            budget.count_items(len(value) * ENTRY_ITEMS)
        if name == "format":
            budget.check_format(str(value), *options)
        elif name == "replace" and len(options) >= 2:
            _count_replacements(budget, str(value), str(options[0]), str(options[1]))
        elif name == "join" and options and isinstance(value, list):
            budget.count_items(len(str(options[0])) * len(value))
        elif name == "indent" and options:
            width = len(options[0]) if isinstance(options[0], str) else int(options[0])
            budget.count_items(width * (str(value).count("\n") + 1))

    def _finish_output(self, value: Any) -> Any:
        """Count each `{{ value }}` before it is written."""
        self.budget.count_items(len(value) if isinstance(value, str) else self.budget.measure(value))
        return value

    def _write_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter `tojson`, without HTML escapes and with keys in their order."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None and separators is None:
            return encoder.encode(value)
        parts: list[str] = []
        for part in encoder.iterencode(value):  # indentation grows with depth, so the value's size gives no bound
            self.budget.count_items(len(part))
            parts.append(part)
        return "".join(parts)

    def _count_turn(self, costs: tuple[int, int]) -> None:
        """Count the beginning of a loop's turn or a macro's call: the characters of its fixed text, and its steps."""
        written, steps = costs
        self.budget.count_steps(steps)
        self.budget.count_items(written)

    def _concatenate(self, values: tuple[Any, ...]) -> str:
        """Join the values as the operator `~` does; counts the result first."""
        self.budget.count_items(self.budget.measure(*values))
        return "".join(map(str, values))

    def _count_made(self, value: Any) -> Any:
        """Count a value that was just copied out of another."""
        self.budget.count_value(value)
        return value


class GenerationExtension(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training; a prompt only has its contents."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the contents of a `generation` block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Meter(NodeTransformer):
    """Puts the environment's own filters into a parsed template, wherever it could grow or run without end."""

    def get_visitor(self, node: nodes.Node) -> Callable[..., nodes.Node] | None:
        """Return the function that changes a node of this kind; None for the default, which visits its children."""
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            return self._count_body
        if isinstance(node, nodes.Concat):
            return self._replace_concat
        return self._count_slice if isinstance(node, nodes.Getitem) else None

    def _replace_concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _apply_filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _CONCATENATE)

    def _count_slice(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _apply_filter(node, _COUNT_MADE) if isinstance(node.arg, nodes.Slice) else node

    def _count_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(text.data) for part in node.body for text in part.find_all(nodes.TemplateData))
        steps = 1 if isinstance(node, nodes.For) else STEPS_PER_CALL
        count = _apply_filter(nodes.Const((written, steps), lineno=node.lineno), _COUNT_TURN)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node


def _apply_filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def raise_exception(message: object) -> NoReturn:
    """Refuse a conversation; called by templates."""
    raise jinja2.TemplateError(str(message))


def _count_in(text: str | bytes, part: object) -> int:
    """Count `part` in `text`; 0 for a part of another type (with which the call will fail)."""
    if isinstance(text, str):
        return text.count(part) if isinstance(part, str) else 0
    return text.count(part.encode() if isinstance(part, str) else part) if isinstance(part, str | bytes) else 0


def _count_replacements(budget: Budget, text: str | bytes, old: object, new: object) -> None:
    if isinstance(new, str | bytes):
        budget.count_items(len(text) + _count_in(text, old) * len(new))


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

        `label` is the template's name in tracebacks. Raises ProgramError if the template does not compile, refuses
        the variables, fails, or goes past a bound of `budget`; raises MemoryError if memory ran out.
        """
        self._now = now
        self.check(source, label)
        try:
            return self._environment.render_metered(self._compile(source, label), variables)
        except MemoryError:
            raise
        except Exception as error:  # an untrusted program can fail in any way
            is_refusal = not isinstance(error, BudgetExceeded | RecursionError)
            raise ProgramError(_explain(error, label), is_refusal=is_refusal) from None

    def check(self, source: str, label: str) -> str:
        """Return an empty text if `source` compiles; otherwise raises as `render` does."""
        try:
            self._compile(source, label)
        except MemoryError:
            raise
        except Exception as error:
            raise ProgramError(_explain(error, label)) from None
        return ""

    def find_variables(self, source: str) -> list[str]:
        """Return the variables that `source` reads and does not set itself, sorted; none if it does not compile."""
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
    """Return the template's line in a traceback: Jinja rewrites its frames to tell it."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == label:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def main() -> None:
    """Answer messages until the other side is gone."""
    connection = socket.socket(fileno=0)
    programs = Programs()
    limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NPROC, 0)
    connection.sendall(pack((READY, "")))
    with contextlib.suppress(Closed, ConnectionError):
        while True:
            processor_s, kind, *given = receive(connection)
            limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + processor_s)
            try:
                reply = pack(_answer(programs, kind, given))
            except MemoryError:
                del programs, given  # frees memory for the last message
                connection.sendall(pack(("memory", "")))
                return
            connection.sendall(reply)
            del given, reply  # before the next message is received


def _answer(programs: Programs, kind: str, given: list[Any]) -> tuple[str, object]:
    if kind == "variables":
        return "text", programs.find_variables(*given)
    try:
        if kind == "check":
            return "text", programs.check(*given)
        source, label, variables, now = given
        return "text", programs.render(source, label, variables, datetime.fromisoformat(now))
    except ProgramError as error:
        return "refusal" if error.is_refusal else "error", str(error)


if __name__ == "__main__":
    main()
