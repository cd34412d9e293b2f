"""What a model can do beyond continuing text, as far as its chat template tells."""

from __future__ import annotations

from mlxr.service.reasoning import EFFORT, SWITCHES, find_tags
from mlxr.service.tools import TOOLS_VARIABLE, find_format
from mlxr.templates.workers import template_workers


def find_capabilities(template_source: str) -> frozenset[str]:
    """Of "completion", "embedding", "tools" and "thinking".

    Every model that can chat can be told of tools; one thinks if its template speaks of where that begins and ends.
    """
    found = {"completion", "embedding"}
    if template_source:
        found.add("tools")
        if find_tags(template_source) is not None:
            found.add("thinking")
    return frozenset(found)


def describe_template(template_source: str) -> dict[str, str]:
    """What conversations with a model are like, by its chat template: how it calls tools, how it thinks, and how that
    is switched. Empty without a template.
    """
    if not template_source:
        return {}
    variables = template_workers.find_variables(template_source)
    takes_tools = bool({"tools", TOOLS_VARIABLE} & variables)
    tool_format, tags = find_format(template_source, takes_tools=takes_tools), find_tags(template_source)
    switches = [name for name in SWITCHES if name in variables]
    if EFFORT in variables:
        levels = "" if tags is None or not tags.levels else f" ({', '.join(tags.levels)})"
        switches.append(f"{EFFORT}{levels}")
    return {
        "tool calls": type(tool_format).__module__.rpartition(".")[2],
        "thoughts": "" if tags is None else f"{tags.open} ... {tags.close}",
        "switches": ", ".join(switches if tags is not None else ()),
    }
