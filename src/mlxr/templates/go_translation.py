"""Translates a template of Ollama's, in the syntax of Go's text/template, to a Jinja template with the same meaning.

A template that uses `.Messages` is rendered once, with consecutive messages of the same role joined. One that does not
is for a single turn (`.System`, `.Prompt`, `.Response`): it is rendered for each turn, and for the last one only up to
`.Response`, where the answer begins. Constructs without an equivalent are refused by name.
Meaning: https://github.com/ollama/ollama/blob/main/template/template.go
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.templates.go_syntax import Action, Block, Node, Path, Pipe, Text, Value, Word, list_fields, parse, refuse


@frozen
class Kind:
    """A kind of values. `fields`: name in Go → (key here, kind). `item` is the kind of its entries, `is_map` says that
    they have names. `writes` is the form in which it is written: unchanged, as JSON, as true or false, or never ("").
    """

    name: str
    fields: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    item: str = ""
    is_map: bool = False
    writes: str = ""


_ROWS = (
    Kind("text", writes="plain"),
    Kind("number", writes="plain"),
    Kind("bool", writes="bool"),
    Kind("value", writes="plain", item="value"),
    Kind("texts", item="text"),
    Kind(
        "message",
        {
            "Role": ("role", "text"),
            "Content": ("content", "text"),
            "Thinking": ("thinking", "text"),
            "Images": ("images", "texts"),
            "ToolCalls": ("tool_calls", "calls"),
            "ToolName": ("name", "text"),
            "ToolCallID": ("tool_call_id", "text"),
        },
    ),
    Kind("messages", item="message"),
    Kind("call", {"ID": ("id", "text"), "Function": ("function", "called")}),
    Kind("calls", item="call"),
    Kind("called", {"Name": ("name", "text"), "Arguments": ("arguments", "arguments"), "Index": ("index", "number")}),
    Kind("arguments", item="value", is_map=True, writes="json"),
    Kind("tool", {"Type": ("type", "text"), "Function": ("function", "function")}, writes="json"),
    Kind("tools", item="tool", writes="json"),
    Kind(
        "function",
        {"Name": ("name", "text"), "Description": ("description", "text"), "Parameters": ("parameters", "parameters")},
        writes="json",
    ),
    Kind(
        "parameters",
        {"Type": ("type", "text"), "Required": ("required", "texts"), "Properties": ("properties", "properties")},
    ),
    Kind("properties", item="property", is_map=True),
    Kind(
        "property",
        {
            "Type": ("type", "text"),
            "Description": ("description", "text"),
            "Enum": ("enum", "value"),
            "Items": ("items", "value"),
        },
    ),
)
KINDS: Mapping[str, Kind] = {row.name: row for row in _ROWS}
# Fields of the root: the expression here and its kind. A chat template fills no gap between a prefix and a suffix.
ROOT: Mapping[str, tuple[str, str]] = {
    "Messages": ("turns", "messages"),
    "System": ("system", "text"),
    "Prompt": ("''", "text"),
    "Response": ("''", "text"),
    "Suffix": ("''", "text"),
    "Tools": ("(tools or [])", "tools"),
    "Think": ("(enable_thinking is defined and enable_thinking)", "bool"),
    "IsThinkSet": ("(enable_thinking is defined)", "bool"),
    "ThinkLevel": ("(reasoning_effort or '')", "text"),
}
# A template without Messages is rendered turn by turn; these three fields belong to the turn.
TURN: Mapping[str, tuple[str, str]] = {
    **ROOT,
    "Prompt": ("prompt", "text"),
    "Response": ("response", "text"),
    "Tools": ("[]", "tools"),
}


Typed = tuple[str, str]
_COMPARISONS = {"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def write_json(expression: str) -> str:
    """Return JSON as Go writes it: without spaces, and with escapes for characters that have a meaning in HTML."""
    escaped = "".join(f"|replace('{char}', '\\\\u{ord(char):04x}')" for char in "&<>")
    return f"({expression}|tojson(separators=(',', ':')){escaped})"


def call(name: str, arguments: Sequence[Typed]) -> Typed:
    """Return the call of function `name`; raises ValueError for an unknown one, or for wrong arguments."""
    if name in _COMPARISONS:
        left, right = _take(arguments, 2)
        return f"({left[0]} {_COMPARISONS[name]} {right[0]})", "bool"
    function = _FUNCTIONS.get(name)
    if function is None:
        raise ValueError(f"the function {name[:40]} is not supported")
    return function(arguments)


def _take(arguments: Sequence[Typed], count: int) -> Sequence[Typed]:
    if len(arguments) != count:
        raise ValueError(f"a function takes {count} arguments and gets {len(arguments)}")
    return arguments


def _choose(word: str) -> Callable[[Sequence[Typed]], Typed]:
    def join(arguments: Sequence[Typed]) -> Typed:
        if not arguments:
            raise ValueError(f"{word} takes at least one argument")
        kinds = {kind for _, kind in arguments}
        return f"({f' {word} '.join(text for text, _ in arguments)})", kinds.pop() if len(kinds) == 1 else "value"

    return join


def _equal(arguments: Sequence[Typed]) -> Typed:
    """Compare the first argument with the others; true if it equals one of them."""
    if len(arguments) < 2:
        raise ValueError("eq takes at least two arguments")
    first, *others = arguments
    return f"({' or '.join(f'{first[0]} == {other}' for other, _ in others)})", "bool"


def _negate(arguments: Sequence[Typed]) -> Typed:
    ((text, _),) = _take(arguments, 1)
    return f"(not {text})", "bool"


def _count(arguments: Sequence[Typed]) -> Typed:
    ((text, kind),) = _take(arguments, 1)
    if kind == "text":
        raise ValueError("len of a text counts bytes, which a chat template cannot")
    return f"(({text} or [])|length)", "number"


def _slice(arguments: Sequence[Typed]) -> Typed:
    (text, kind), *bounds = arguments or [("", "")]
    if not 0 < len(bounds) <= 2 or not KINDS[kind].item or KINDS[kind].is_map:
        raise ValueError("slice takes a list and one or two positions")
    return f"({text})[{bounds[0][0]}:{bounds[1][0] if len(bounds) == 2 else ''}]", kind


def _index(arguments: Sequence[Typed]) -> Typed:
    (text, kind), (key, _) = _take(arguments, 2)
    if not KINDS[kind].item:
        raise ValueError("index takes a list or a map, and a position or a key")
    return f"({text})[{key}]", KINDS[kind].item


def _json(arguments: Sequence[Typed]) -> Typed:
    ((text, _),) = _take(arguments, 1)
    return write_json(text), "text"


def _date(arguments: Sequence[Typed]) -> Typed:
    _take(arguments, 0)
    return "strftime_now('%Y-%m-%d')", "text"


_FUNCTIONS: Mapping[str, Callable[[Sequence[Typed]], Typed]] = {
    "and": _choose("and"),
    "or": _choose("or"),
    "not": _negate,
    "eq": _equal,
    "len": _count,
    "slice": _slice,
    "index": _index,
    "json": _json,
    "currentDate": _date,
}


MAX_CHARACTERS = 1 << 18
_JOINED = """\
{%- set ns = namespace(role='', repeats=false, turns=[]) -%}
{%- for message in messages -%}
{%- if message['role'] == ns.role and ns.role != 'tool' -%}{%- set ns.repeats = true -%}{%- endif -%}
{%- set ns.role = message['role'] -%}
{%- endfor -%}
{%- set turns = messages -%}
{%- if ns.repeats -%}
{%- for message in messages -%}
{%- if ns.turns and message['role'] == ns.turns[-1]['role'] and message['role'] != 'tool' -%}
{%- set content = ns.turns[-1]['content'] ~ '\\n\\n' ~ message['content'] -%}
{%- set ns.turns = ns.turns[:-1] + [dict(ns.turns[-1], content=content)] -%}
{%- else -%}{%- set ns.turns = ns.turns + [message] -%}{%- endif -%}
{%- endfor -%}
{%- set turns = ns.turns -%}
{%- endif -%}
{%- set system = messages|selectattr('role', 'eq', 'system')|map(attribute='content')|join('\\n\\n') +%}"""
_TURNS = """\
{%- set ns = namespace(system='', prompt='', response='', role='') -%}
{%- for message in messages -%}
{%- set role, content = message['role'], message['content'] -%}
{%- set repeats = role == ns.role -%}
{%- if role == 'system' -%}
{%- if not repeats and (ns.prompt or ns.response) -%}
{{- render_turn(ns.system, ns.prompt, ns.response) -}}
{%- set ns.prompt = '' -%}{%- set ns.response = '' -%}
{%- endif -%}
{%- set ns.system = ns.system ~ '\\n\\n' ~ content if repeats else content -%}
{%- elif role == 'user' -%}
{%- if not repeats and ns.response -%}
{{- render_turn(ns.system, ns.prompt, ns.response) -}}
{%- set ns.system = '' -%}{%- set ns.response = '' -%}
{%- endif -%}
{%- set ns.prompt = ns.prompt ~ '\\n\\n' ~ content if repeats else content -%}
{%- elif role == 'assistant' -%}
{%- set ns.response = ns.response ~ '\\n\\n' ~ content if repeats else content -%}
{%- endif -%}
{%- set ns.role = role -%}
{%- endfor -%}
{{- render_last(ns.system, ns.prompt, ns.response) -}}"""
_RESPONSE = Action(Pipe(((Path(".", ("Response",)),),)), 0)


def looks_like_go(source: str) -> bool:
    """Return True if a template looks like a Go template, not like Jinja."""
    return "{{" in source and "{%" not in source


def translate(source: str) -> str:
    """Return the Jinja template; raises InvalidRequest naming the line and the construct that cannot be translated."""
    if len(source) > MAX_CHARACTERS:
        raise InvalidRequest("template", f"has {len(source)} characters, more than {MAX_CHARACTERS}")
    nodes = parse(source)
    fields = list_fields(nodes)
    if "Messages" in fields:
        written = _JOINED + _Writer(ROOT, "go").write(nodes)
    else:
        if "Response" not in fields:
            nodes = (*nodes, _RESPONSE)
        last, _ = _cut_after_response(nodes)
        written = "".join(
            f"{{%+ macro {name}(system, prompt, response) +%}}{_Writer(TURN, name).write(part)}{{%+ endmacro +%}}"
            for name, part in (("render_turn", nodes), ("render_last", last))
        )
        written += _TURNS
    return written + "{{ '' }}" if written.endswith("\n") else written


def _cut_after_response(nodes: Sequence[Node], is_cut: bool = False) -> tuple[tuple[Node, ...], bool]:
    """Return the nodes up to the first that writes `.Response`, and whether there was one."""
    kept: list[Node] = []
    for node in nodes:
        if is_cut:
            break
        if isinstance(node, Block):
            body, is_cut = _cut_after_response(node.body)
            otherwise: tuple[Node, ...] = ()
            if not is_cut:
                otherwise, is_cut = _cut_after_response(node.otherwise)
            node = replace(node, body=body, otherwise=otherwise)
        elif isinstance(node, Action):
            is_cut = "Response" in list_fields((node,))
        kept.append(node)
    return tuple(kept), is_cut


@frozen
class _Scope:
    """The values of the dot and the variables at one place."""

    dot: Typed | None  # None: the root
    variables: Mapping[str, Typed]


class _Writer:
    """Writes the nodes of one template; `root` are its root fields."""

    def __init__(self, root: Mapping[str, Typed], name: str) -> None:
        self._root = root
        self._names = f"{name}_vars"  # a namespace, so that values set inside a loop stay after it
        self._count = 0

    def write(self, nodes: Sequence[Node]) -> str:
        """Write the nodes as one text of Jinja."""
        body = self._write_all(nodes, _Scope(None, {}))
        return _tag(f"set {self._names} = namespace()") + body if f"{self._names}." in body else body

    def _write_all(self, nodes: Sequence[Node], scope: _Scope) -> str:
        written = []
        for node in nodes:
            if isinstance(node, Text):
                written.append(_write_text(node.text))
            elif isinstance(node, Action):
                text, scope = self._write_action(node, scope)
                written.append(text)
            elif isinstance(node, Block):
                written.append(self._write_block(node, scope))
            else:
                written.append(_tag(node.kind))
        return "".join(written)

    def _write_action(self, node: Action, scope: _Scope) -> tuple[str, _Scope]:
        pipe, line = node.pipe, node.line
        text, kind = self._read_pipe(pipe, scope, line)
        if not pipe.variables:
            return f"{{{{ {self._write_value(text, kind, line)} }}}}", scope
        (name,) = pipe.variables
        if pipe.assigns:
            target, known = scope.variables.get(name, ("", ""))
            if not target.startswith(self._names):
                refuse(line, f"{name} is assigned and not declared")
            if KINDS[kind].item != KINDS[known].item or KINDS[kind].fields != KINDS[known].fields:
                refuse(line, f"{name} gets a value of another kind, which is not supported")
            return _tag(f"set {target} = {text}"), scope
        target = self._declare(name)
        scope = replace(scope, variables={**scope.variables, name: (target, kind)})
        return _tag(f"set {target} = {text}"), scope

    def _write_block(self, node: Block, scope: _Scope) -> str:
        if node.kind == "range":
            return self._write_range(node, scope)
        text, kind = self._read_pipe(node.pipe, scope, node.line)
        head, inner = "", scope
        if node.pipe.variables:
            (name,) = node.pipe.variables
            target = self._declare(name)
            head, text = _tag(f"set {target} = {text}"), target
            inner = replace(inner, variables={**inner.variables, name: (target, kind)})
        otherwise = self._write_all(node.otherwise, inner)
        if node.kind == "with":
            inner = replace(inner, dot=(text, kind))
        body = self._write_all(node.body, inner)
        return head + _tag(f"if {text}") + body + (_tag("else") + otherwise if otherwise else "") + _tag("endif")

    def _write_range(self, node: Block, scope: _Scope) -> str:
        text, kind = self._read_pipe(node.pipe, scope, node.line)
        row, names = KINDS[kind], node.pipe.variables
        if not row.item or node.pipe.assigns or len(names) > 2:
            refuse(node.line, "{{ range }} goes through lists and maps, with at most two new variables")
        self._count += 1
        item = f"item{self._count}"
        variables = dict(scope.variables)
        key, head = "", ""
        if row.is_map:
            key = f"key{self._count}"
            head = f"for {key}, {item} in ({text} or {{}})|dictsort(true)"
        else:
            head = f"for {item} in {text} or []"
        start = ""
        if names:
            variables[names[-1]] = (item, row.item)
        if len(names) == 2:
            if not row.is_map:
                key = f"index{self._count}"
                start = _tag(f"set {key} = loop.index0")
            variables[names[0]] = (key, "text" if row.is_map else "number")
        body = self._write_all(node.body, _Scope((item, row.item), variables))
        otherwise = self._write_all(node.otherwise, scope)
        loop = _tag(head) + start + body + _tag("endfor")
        return _tag(f"if {text}") + loop + _tag("else") + otherwise + _tag("endif") if otherwise else loop

    def _declare(self, name: str) -> str:
        """Return a new name for a declaration, since those of inner blocks hide outer ones only inside the block."""
        self._count += 1
        return f"{self._names}.v{self._count}_{name.removeprefix('$')}"

    def _read_pipe(self, pipe: Pipe, scope: _Scope, line: int) -> Typed:
        value: Typed | None = None
        if len(pipe.variables) > 1 and pipe.assigns:
            refuse(line, "two variables are assigned at once")
        for command in pipe.commands:
            first, *rest = command
            given = [self._read_term(term, scope, line) for term in rest] + ([value] if value is not None else [])
            if isinstance(first, Word):
                try:
                    value = call(first.name, given)
                except ValueError as error:
                    refuse(line, str(error))
            elif given:
                refuse(line, "a value that is no function gets arguments")
            else:
                value = self._read_term(first, scope, line)
        assert value is not None  # there is a command
        return value

    def _read_term(self, term: Value | Path | Word, scope: _Scope, line: int) -> Typed:
        if isinstance(term, Value):
            if isinstance(term.value, str):
                return _quote(term.value), "text"
            if isinstance(term.value, bool):
                return str(term.value).lower(), "bool"
            return ("none", "value") if term.value is None else (str(term.value), "number")
        if isinstance(term, Word):
            return self._read_pipe(Pipe(((term,),)), scope, line)
        return self._read_path(term, scope, line)

    def _read_path(self, path: Path, scope: _Scope, line: int) -> Typed:
        fields = path.fields
        if isinstance(path.start, Pipe):
            value: Typed | None = self._read_pipe(path.start, scope, line)
        elif path.start in (".", "$"):
            value = scope.dot if path.start == "." else None
        else:
            value = scope.variables.get(path.start)
            if value is None:
                refuse(line, f"{path.start} is not declared")
        if value is None:
            if not fields:
                refuse(line, "the dot stands for everything, which is no value")
            if fields[0] not in self._root:
                refuse(line, f".{fields[0][:40]} is not supported")
            value, fields = self._root[fields[0]], fields[1:]
        for name in fields:
            known = KINDS[value[1]].fields.get(name)
            if known is None:
                refuse(line, f".{name[:40]} of a {value[1]} is not supported")
            value = f"{value[0]}['{known[0]}']", known[1]
        return value

    def _write_value(self, text: str, kind: str, line: int) -> str:
        written = {"plain": text, "json": write_json(text), "bool": f"{text}|string|lower"}.get(KINDS[kind].writes)
        return written or refuse(line, f"a value of the kind {kind} cannot be written out")


def _tag(words: str) -> str:
    """Return a block tag that leaves the text around it unchanged."""
    return f"{{%+ {words} +%}}"


def _write_text(text: str) -> str:
    return text if "{%" not in text and "{#" not in text and text[-1] != "{" else f"{{{{ {_quote(text)} }}}}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"
