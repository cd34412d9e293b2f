"""What is replaced in llama.cpp's tests: text and token counts of its test model, and the name of its binary."""

from __future__ import annotations


def adapt(module: str, text: str) -> str:
    """The text of a test module with its replacements; raises ValueError for one that is not there."""
    for old, new in REPLACED.get(module, ()):
        if old not in text:
            raise ValueError(f"{module}: {old!r} is not there any more")
        text = text.replace(old, new)
    return text


# What stories260K, llama.cpp's test model, says. A random model says something else each time.
MODEL_TEXTS = frozenset(
    {
        "(going|bed)+",
        "(princesses|everyone|kids|Anna|forest)+",
        "But she couldn't",
        '(Suddenly)+|\\{ " Sarax.',
        "^ blue",
        "(Aside|she|felter|alonger)+",
        "Whillicter",
        "(Suddenly)+",
        "(Ann|small|shiny|Daddy|Jimmy)+",
        "(Dad|excited|park|Jimmy)+",
        "(little|girl)+",
    }
)
REPLACED: dict[str, tuple[tuple[str, str], ...]] = {}
