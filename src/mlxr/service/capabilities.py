"""What a model can do beyond continuing text, as far as its chat template tells."""

from __future__ import annotations

import re

_TOOLS = re.compile(r"\btools\b")
_THINKING = re.compile(r"<think>|\benable_thinking\b|\breasoning_content\b|\breasoning_effort\b")


def find_capabilities(template_source: str) -> frozenset[str]:
    """Of "completion", "embedding", "tools" (the template takes them) and "thinking" (it knows such a part)."""
    found = {"completion", "embedding"}
    if _TOOLS.search(template_source):
        found.add("tools")
    if _THINKING.search(template_source):
        found.add("thinking")
    return frozenset(found)
