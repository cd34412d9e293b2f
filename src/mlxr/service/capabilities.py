"""What a model can do beyond continuing text, as far as its chat template tells."""

from __future__ import annotations

from mlxr.service.reasoning import find_tags


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
