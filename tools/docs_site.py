"""Hooks by which mkdocs extends docs/: references made from the code, pages from elsewhere, links to files of the tree.

mkdocs calls the functions `on_*` (`hooks` in mkdocs.yml). The pages are not written into docs/, so the references
cannot be older than the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import typer.main

import mlxr
from mlxr.cli.main import ALL_FLAGS, COMMANDS, EXAMPLE_OF, build_app
from mlxr.registry.library import LibraryModel, read_library
from mlxr.server.app import DIALECTS, describe_routes

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
COPIED = ("ARCHITECTURE.md", "CHANGELOG.md")  # lie in the root, for readers of the tree
MEMORY_GB = (4, 8, 16, 24, 32, 48, 64, 96)
GB = 10**9
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Turn links to files outside the site into their paths in the sources, and insert the table of models."""
    base = PurePosixPath(page.file.src_uri).parent
    own = COPIED if page.file.src_uri in COPIED else ()

    def turn(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups(default="")
        if not target or image:
            return match[0]
        inside = os.path.normpath(base / target)
        if own and inside.startswith("docs/"):
            return f"[{text}]({inside.removeprefix('docs/')}{anchor})"
        if files.get_file_from_path(inside) is not None:
            return match[0]
        name = inside.removeprefix("../")
        name = "examples.md" if name == "examples" else name
        if name in PAGES:
            return f"[{text}]({os.path.relpath(name, base)}{anchor})"
        if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists():
            return match[0]  # mkdocs warns that it leads nowhere
        shown = name if (ROOT / name).exists() else f"docs/{name}"
        return f"`{shown}`" if text.strip("`") in (shown, name) else f"{text} (`{shown}`)"

    return LINK.sub(turn, markdown).replace("{{models}}", write_models())


def write_models() -> str:
    """List for each size of memory the largest models of the table that fit, chat and code before others."""
    rows = ["| memory | largest that fit, with their files | quick ones |", "|---|---|---|"]
    models = [model for model in read_library() if not re.search("embed|rank|vector", model.about)]
    for memory in MEMORY_GB:
        fitting = [model for model in models if needed_bytes(model) <= memory * GB]
        fitting.sort(key=lambda model: -model.size_bytes)
        quick = sorted(fitting, key=lambda model: model.size_bytes * model.active)
        quick = [model for model in quick if model.size_bytes * 8 > memory * GB] or quick[-3:]
        rows.append(f"| {memory} GB | {show_models(fitting[:4])} | {show_models(quick[:3])} |")
    return "\n".join(rows)


def needed_bytes(model: LibraryModel) -> int:
    """Memory of a machine that runs a model with a short context beside a system that takes 2 GB.

    The same share as in `mlxr search`: a tenth of the weights, and 512 MiB.
    """
    return model.size_bytes * 11 // 10 + (512 << 20) + 2 * GB


def show_models(models: list[LibraryModel]) -> str:
    """Names with the size of their files."""
    return ", ".join(f"`{model.name}` ({model.size_bytes / GB:.1f} GB)" for model in models) or "none"


def write_commands() -> str:
    """The reference of commands, from the texts of `mlxr COMMAND --help`."""
    lines = [
        "# Commands",
        "",
        f"Made from the commands themselves; `mlxr COMMAND {ALL_FLAGS}` shows the same.",
        "",
    ]
    lines += ["| command | |", "|---|---|"]
    lines += [f"| [`mlxr {row.name}`](#mlxr-{row.name}) | {row.help} |" for row in COMMANDS]
    seen: dict[tuple[str, str], str] = {}
    for row in COMMANDS:
        command: Any = typer.main.get_command(build_app([row.name, ALL_FLAGS])).commands[row.name]  # type: ignore[attr-defined]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name != "argument" and not one.hidden]
        usage = " ".join(["mlxr", row.name, *(show_argument(one) for one in arguments), "[OPTIONS]" * bool(options)])
        lines += ["", f"## mlxr {row.name}", "", f"`{usage.strip()}`", "", clean(command.help or row.help)]
        lines += ["", f"For example `{EXAMPLE_OF[row.name]}`."] if row.name in EXAMPLE_OF else []
        if arguments or options:
            lines += ["", "| | |", "|---|---|"]
        lines += [f"| `{one.metavar or one.name.upper()}` | {cell(one.help)} |" for one in arguments]
        shared: dict[str, list[str]] = defaultdict(list)
        for one in options:
            names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            text, first = cell(one.help), seen.setdefault((names, one.help or ""), row.name)
            if first != row.name:
                shared[first].append(names)
            else:
                lines.append(f"| {names} | {text} |")
        for first, names_of in shared.items():
            lines.append(f"| {', '.join(names_of)} | as in [`mlxr {first}`](#mlxr-{first}) |")
    return "\n".join(lines) + "\n"


def show_argument(argument: Any) -> str:
    """An argument in the line of usage."""
    name = (argument.metavar or argument.name.upper()) + "..." * (argument.nargs == -1)
    return str(name if argument.required or name.startswith("[") else f"[{name}]")


def cell(text: str | None) -> str:
    """A text of `--help` in the cell of a table."""
    return clean(text or "").replace("\n", " ").replace("|", "\\|")


def clean(text: str) -> str:
    """A text of `--help` without rich's marks."""
    return re.sub(r"(?<!`)<(\w+)>", r"`<\1>`", inspect.cleandoc(text).replace("\\[", "[").replace("\b", ""))


def write_python() -> str:
    """The reference of the public names of `mlxr`, from their docstrings and signatures."""
    lines = ["# Python", "", "Made from the docstrings of the names that `mlxr` exports.", ""]
    for name in mlxr.__all__:
        value = getattr(mlxr, name)
        if name == "__version__":
            continue
        lines += ["", f"## {name}", ""]
        if not inspect.isclass(value):
            members = ", ".join(f"[`{one.__name__}`](#{one.__name__.lower()})" for one in value.__args__)
            lines += [f"Any of {members}.", ""]
            for one in value.__args__:
                lines += [] if one.__name__ in mlxr.__all__ else ["", f"### {one.__name__}", "", *describe_class(one)]
            continue
        lines += describe_class(value)
    return "\n".join(lines) + "\n"


def describe_class(value: type[Any]) -> Iterator[str]:
    """The docstring of a class, its fields, and its public methods with theirs."""
    yield from describe_docstring(value.__doc__)
    if dataclasses.is_dataclass(value):
        yield from ("", "| field | type | default |", "|---|---|---|")
        for field in dataclasses.fields(value):
            default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            kind = str(field.type).replace("|", "\\|")
            yield f"| `{field.name}` | `{kind}` | {default} |"
    elif "__init__" in vars(value):
        yield from ("", *show_signature(value.__name__, value))
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        yield from ("", f"### {value.__name__}.{name}", "")
        if not isinstance(member, property):
            yield from (*show_signature(name, function), "")
        yield from describe_docstring(function.__doc__)


def show_signature(name: str, value: Callable[..., Any]) -> Iterator[str]:
    """A call with all its parameters, one on each line if there are many."""
    signature = inspect.signature(value)
    parts = [str(one) for one in signature.parameters.values() if one.name != "self"]
    keyword = [key for key, one in signature.parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    if keyword:
        parts.insert(len(parts) - len(keyword), "*")
    text = ", ".join(parts).replace("'", "")
    text = text if len(text) < 90 else "\n    " + ",\n    ".join(parts).replace("'", "") + ",\n"
    result = signature.return_annotation
    arrow = "" if result in (inspect.Signature.empty, "None") else f" -> {str(result).strip(chr(39))}"
    yield from ("```python", f"{name}({text}){arrow}", "```")


def describe_docstring(text: str | None) -> Iterator[str]:
    """Return the lines of a docstring as Markdown; indented text is code in both."""
    yield from inspect.cleandoc(text or "").splitlines()


def write_http() -> str:
    """The reference of routes, from the server's OpenAPI document."""
    document = describe_routes([row for dialect in DIALECTS for row in dialect.router.rows])
    schemas = document["components"]["schemas"]
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = defaultdict(list)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            groups[operation["tags"][-1] if operation["tags"] else "own"].append((method.upper(), path, operation))
    lines = [
        "# HTTP",
        "",
        "Made from the document that a running server gives at `/openapi.json`; its page `/docs` lets",
    ]
    lines += ["you try each route. [The server](../server.md) and [its clients](../dialects.md) say what is meant.", ""]
    bodies: dict[str, dict[str, Any]] = {}
    for group, rows in groups.items():
        title = {"own": "For everybody", "admin": "For whoever runs the server"}.get(group, group)
        lines += [f"## {title}", "", "| route | | body | reply |", "|---|---|---|---|"]
        for method, path, operation in rows:
            body, reply = (
                schema_name(operation.get("requestBody", {})),
                schema_name(operation["responses"].get("200", {})),
            )
            for name in (body, reply):
                if name:
                    bodies[name] = schemas[name]
            about = cell(operation.get("description") or operation.get("summary")).split(". ")[0].rstrip(".")
            lines.append(f"| `{method} {path}` | {about} | {link_schema(body)} | {link_schema(reply)} |")
        lines.append("")
    lines += ["## Bodies and replies", ""]
    for name, schema in sorted(bodies.items()):
        lines += [f"### {name}", "", cell(schema.get("description")), ""]
        rows_of = []
        for key, one in schema.get("properties", {}).items():
            needed = " (needed)" if key in schema.get("required", ()) else ""
            rows_of.append(f"| `{key}`{needed} | {show_type(one)} | {cell(one.get('description'))} |")
        lines += ["| field | type | |", "|---|---|---|", *rows_of, ""] if rows_of else []
    return "\n".join(lines)


def schema_name(content: Mapping[str, Any]) -> str:
    """The name of the JSON schema of a body or a reply, "" if it has none."""
    schema = content.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]


def link_schema(name: str) -> str:
    """A link to the table of a schema."""
    return f"[{name.rpartition('__')[2]}](#{name.lower()})" if name else ""


def show_type(schema: Mapping[str, Any]) -> str:
    """The type of a field, in a few words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2].rpartition('__')[2]}`"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(show_type(one) for one in schema[key] if one.get("type") != "null"))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {show_type(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([kind, *bounds])


def write_examples() -> str:
    """The gallery: each script of examples/ with its first line."""
    lines = [
        "# Examples",
        "",
        "Short scripts that run as they stand, with the model that comes with mlxr. The tests run each.",
        "",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        about = text.split('"""')[1]
        code = text.split('"""', 2)[2].replace("from __future__ import annotations\n", "").strip()
        lines += [f"## {path.stem.replace('_', ' ').capitalize()}", "", about, ""]
        lines += [f"`python examples/{path.name}`", "", "```python", code, "```", ""]
    return "\n".join(lines)


def copy(name: str) -> Callable[[], str]:
    """Return a maker of a page from the root of the tree."""
    return lambda: (ROOT / name).read_text(encoding="utf-8")


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": write_commands,
    "reference/python.md": write_python,
    "reference/http.md": write_http,
    "examples.md": write_examples,
    **{name: copy(name) for name in COPIED},
}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
