"""Docstrings say what a thing is or does: none begins with a question word."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "bench", "tools", "examples")
QUESTION = re.compile(r'^\s*"""(What|Whether|How|Where|Who|When)\b')
REMEDY = 'say what it does ("Return the ..."), when it is true ("True if ...") or what it is ("The number of ...")'


def find_questions(source: str) -> list[tuple[int, str]]:
    """Return line and question word of each docstring that begins with one, including those of attributes."""
    lines = enumerate(source.splitlines(), 1)
    return [(number, found[1]) for number, line in lines if (found := QUESTION.match(line))]


def test_no_docstring_begins_with_a_question_word() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: the docstring begins with {word}; {REMEDY}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "model_keywords.py"  # written from the help texts of options
        for line, word in find_questions(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_question_words_are_found_in_docstrings_alone() -> None:
    source = '"""What."""\nx = "How"\n"""Where it is."""\ndef f():\n    """Whoever calls."""\n    """When?"""\n'
    assert find_questions(source) == [(1, "What"), (3, "Where"), (6, "When")]
