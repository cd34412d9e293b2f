"""Builds the demo model's corpus from the running Python: questions about its names, its source as text, and held-out
text.

Writes into a folder `entries.jsonl` (one name per line), `contents.json` (names of each well-known module),
`documents.jsonl` (source files and documentation topics), `held_out.txt` and `validation.txt` (beginnings of files
that no other output has seen) and `about.json`; and, when asked, the two files the tests read. The same Python gives
the same bytes. It knows nothing of tokens.

    python tools/demo_model/corpus.py --out FOLDER [--tests tests/real]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from names import LISTS, Entry, collect_entries

CORE = LISTS["core"]
QUESTIONS = LISTS["questions"]
PHRASINGS = ["What does {name} do?", "Explain {name}.", "How do I call {name}?"]

HELD_OUT_ONE_IN = 40
HELD_OUT_BYTES = 20_000
HELD_OUT_BYTES_PER_FILE = 2_500
VALIDATION_BYTES_PER_FILE = 2_000
MAX_DOCUMENT_BYTES = 150_000
# Tables of characters and generated code: many bytes that teach no language.
SKIPPED_FILES = re.compile(
    r"^(encodings/(cp|iso|mac_|koi|kz|tis|ptcp|hp)|lib2to3/tests/data|pydoc_data/|_sysconfigdata"
    r"|test/.*(badsyntax|bad_coding))"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: build the corpus, print its contents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the corpus into")
    parser.add_argument("--tests", type=Path, help="folder to write questions.json and held_out.txt into")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    library = Path(sysconfig.get_paths()["stdlib"])
    entries = collect_entries()
    kept_for_training = {e.file for e in entries if e.well_known and e.file}
    documents, held_out = read_library(library, kept_for_training)
    held_out_files = {str(library / path) for path, _ in held_out}
    records = weigh_entries([e for e in entries if e.file not in held_out_files])
    documents += read_topics() + describe_builtins(entries)

    _write_lines(options.out / "entries.jsonl", records)
    _write_lines(options.out / "documents.jsonl", [{"path": p, "text": t} for p, t in documents])
    questions = list_questions(records)
    excerpt, sources = excerpt_held_out(held_out)
    about = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "entries": len(records),
        "entries_with_sentence": sum(bool(r["sentence"]) for r in records),
        "distinct_sentences": len({r["sentence"] for r in records}),
        "documents": len(documents),
        "document_bytes": sum(len(t.encode()) for _, t in documents),
        "held_out_files": len(held_out),
        "held_out_text_sources": sources,
    }
    (options.out / "contents.json").write_text(json.dumps(list_contents(records), indent=1) + "\n")
    (options.out / "questions.json").write_text(json.dumps(questions, indent=1, ensure_ascii=False) + "\n")
    (options.out / "held_out.txt").write_bytes(excerpt)
    validation = "\n".join(text[:VALIDATION_BYTES_PER_FILE] for path, text in held_out if path not in sources)
    (options.out / "validation.txt").write_text(validation, encoding="utf-8")
    (options.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    if options.tests:
        options.tests.mkdir(parents=True, exist_ok=True)
        for name in ("questions.json", "held_out.txt"):
            (options.tests / name).write_bytes((options.out / name).read_bytes())
    print(json.dumps(about, indent=1))


def weigh_entries(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Entries as plain records with `weight` (how often drawn), `aliases` and `unique_sentence` (may be asked in
    reverse)."""
    aliases = _find_aliases(entries)
    sentences = Counter(e.sentence for e in entries if e.public)
    records = []
    for entry in entries:
        core = entry.module in CORE and entry.public
        weight = 4.0 if core else 1.5 if entry.well_known and entry.public else 1.0 if entry.public else 0.5
        if not entry.sentence:
            weight *= 0.4
        if entry.module.startswith("encodings."):
            weight *= 0.2  # about ninety modules with the same text
        record = asdict(entry)
        del record["file"]
        record["weight"] = weight
        record["aliases"] = aliases.get(entry.name, [])
        record["unique_sentence"] = core and sentences[entry.sentence] == 1 and len(entry.sentence) > 20
        records.append(record)
    return records


def _find_aliases(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Short names people use (`defaultdict`, `Path.mkdir`) that can mean only one well-known entry."""
    taken = {e.name for e in entries}
    claims: dict[str, list[str]] = {}
    for entry in entries:
        if entry.module not in CORE or not entry.public or not entry.sentence or entry.module == "builtins":
            continue
        parts = entry.name.split(".")
        short = ".".join(parts[-2:]) if entry.kind in ("method", "property") else parts[-1]
        if entry.kind != "module" and len(short) >= 4 and short not in taken:
            claims.setdefault(short, []).append(entry.name)
    aliases: dict[str, list[str]] = {}
    for short, names in claims.items():
        if len(names) == 1:
            aliases.setdefault(names[0], []).append(short)
    return aliases


def list_contents(records: Iterable[dict[str, Any]], most: int = 14) -> dict[str, list[str]]:
    """For each well-known module the first `most` public names directly inside it."""
    contents: dict[str, list[str]] = {}
    for record in records:
        module, _, short = record["name"].rpartition(".")
        if record["well_known"] and module == record["module"] and record["kind"] in ("function", "class"):
            contents.setdefault(module, []).append(short)
    return {module: names[:most] for module, names in contents.items() if len(names) >= 2}


def list_questions(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The fixed list of questions for acceptance, with the text that a right answer must quote."""
    by_name = {r["name"]: r for r in records}
    functions = []
    for name in QUESTIONS:
        record = by_name[name]
        if not record["sentence"]:
            raise SystemExit(f"{name}: no docstring in this Python; choose another for QUESTIONS")
        functions.append({"name": name, "first_sentence": record["sentence"], "signature": record["signature"]})
    return {"python": platform.python_version(), "phrasings": PHRASINGS, "functions": functions}


def read_library(library: Path, kept: set[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Source files as (relative path, text): those to train on, and one in HELD_OUT_ONE_IN, by hash of the path, held
    out.

    Files in `kept` define names of the question list and are never held out.
    """
    documents, held_out = [], []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library).as_posix()
        if "site-packages" in relative or "__pycache__" in relative or SKIPPED_FILES.match(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 200:
            continue
        digest = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], "big")
        if digest % HELD_OUT_ONE_IN == 0 and str(path) not in kept:
            held_out.append((relative, text))
        else:
            documents.append((relative, text[:MAX_DOCUMENT_BYTES]))
    return documents, held_out


def read_topics() -> list[tuple[str, str]]:
    """The language reference's topics that `help()` shows: prose about Python."""
    from pydoc_data.topics import topics

    return [(f"topic:{name}", text) for name, text in sorted(topics.items())]


def describe_builtins(entries: Iterable[Entry]) -> list[tuple[str, str]]:
    """Names written in C have no source here: their signatures and paragraphs, one document per module."""
    pages: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.file and entry.sentence and entry.public:
            pages.setdefault(entry.module, []).append(f"{entry.signature or entry.name}\n    {entry.paragraph}\n")
    return [(f"module:{module}", "\n".join(parts)) for module, parts in sorted(pages.items())]


def excerpt_held_out(held_out: Sequence[tuple[str, str]]) -> tuple[bytes, list[str]]:
    """About HELD_OUT_BYTES of the held-out files' beginnings, library files before tests, and their paths.

    Files with a copyright line of their own are left out: the text is shipped under the PSF licence alone.
    """
    plain = [(p, t) for p, t in held_out if t.isascii() and "opyright" not in t and len(t) > 1_500]
    ordered = sorted(plain, key=lambda item: ("test" in item[0], hashlib.sha256(item[0].encode()).digest()))
    excerpt, sources = b"", []
    for path, text in ordered:
        piece = text.encode()[:HELD_OUT_BYTES_PER_FILE]
        piece = piece[: piece.rfind(b"\n") + 1]
        if len(excerpt) + len(piece) > HELD_OUT_BYTES:
            break
        excerpt += piece + b"\n"
        sources.append(path)
    return excerpt, sources


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
