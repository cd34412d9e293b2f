"""Replacements in llama.cpp's tests: text and token counts of its test model, and the name of its binary."""

from __future__ import annotations


def adapt(module: str, text: str) -> str:
    """The text of a test module with its replacements; raises ValueError for one that is not there."""
    for old, new in REPLACED.get(module, ()):
        if old not in text:
            raise ValueError(f"{module}: {old!r} is not there any more")
        text = text.replace(old, new)
    return text


# Words of stories260K, llama.cpp's test model. A random model says something else each time.
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
# A module to pairs of what is replaced and what with. Counts are of the vocabulary of the model that is used here; the
# fingerprint begins with the letters of the server that made it.
_FINGERPRINT = ('system_fingerprint.startswith("b")', 'system_fingerprint.startswith("fp_")')
REPLACED: dict[str, tuple[tuple[str, str], ...]] = {
    "test_completion.py": (
        ('"(going|bed)+", 18, 8,', '"(going|bed)+", 8, 8,'),
        ('"(princesses|everyone|kids|Anna|forest)+", 46, 64,', '"(princesses|everyone|kids|Anna|forest)+", 19, 64,'),
        ('"I believe the meaning of life is"*32', '"I believe the meaning of life is"*64'),
        ('"<s> " + prompt', '"<s>" + prompt'),
        ("(40 + r)*5 + 2", "(40 + r)*3 + 2"),
        _FINGERPRINT,
    ),
    "test_chat_completion.py": (
        ('"But she couldn\'t", 69,', '"But she couldn\'t", 48,'),
        ('Sarax.", 77,', 'Sarax.", 51,'),
        ('"^ blue",                    23,', '"^ blue",                    10,'),
        ('alonger)+", 104,', 'alonger)+", 59,'),
        ('"Whillicter", 79,', '"Whillicter", 51,'),
        ('"(Suddenly)+", 77,', '"(Suddenly)+", 51,'),
        ('("1 2 3 4 5 6", 77, 0)', '("1 2 3 4 5 6", 57, 0)'),
        ('("1 2 3 4 5 6", 77, 76)', '("1 2 3 4 5 6", 57, 56)'),
        ('("1 2 3 4 5 9", 77, 51)', '("1 2 3 4 5 9", 57, 38)'),
        ('("1 2 3 9 9 9", 77, 47)', '("1 2 3 9 9 9", 57, 34)'),
        ('["system_fingerprint"].startswith("b")', '["system_fingerprint"].startswith("fp_")'),
        ('"content": "This is a test" * 10},', '"content": "This is a test" * 30},'),
        ('"<s> <|start_header_id|>system', '"<s><|start_header_id|>system'),
        _FINGERPRINT,
    ),
    "test_embedding.py": (
        ('("I believe the meaning of life is", 9)', '("I believe the meaning of life is", 8)'),
        ('("This is a test", 6)', '("This is a test", 5)'),
        ("2 * 9", "2 * 8"),
    ),
    "test_ctx_shift.py": (
        ("(-1, 248, True)", "(-1, 251, True)"),
        ('"prompt": LONG_TEXT,', '"prompt": LONG_TEXT * 3,'),
    ),
}
