"""The public names of the running Python's standard library, with sentences from their docstrings.

One `Entry` per name a reader may ask for: a module, function, class, method or property, with its signature and the
first sentence of its docstring. An object with several names (`os.path.join` is also `posixpath.join`) has an entry
for each. It knows nothing of questions, tokens or models. Everything is read from live objects, so the result belongs
to one Python version on one platform; `corpus.py` writes that version down.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pkgutil
import re
import sys
import tomllib
import types
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

# Modules whose import does something visible (opens a browser, prints a poem, starts a window) or that need a display.
NOT_IMPORTED = {
    "antigravity",
    "this",
    "idlelib",
    "turtledemo",
    "turtle",
    "test",
    "tkinter",
    "lib2to3",
    "__main__",
    "msilib",
}
NOT_IMPORTED_PARTS = {"tests", "test", "__main__", "_test", "idle_test"}

LISTS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "names.toml").read_text(encoding="utf-8"))
WELL_KNOWN = LISTS["well_known"]

MAX_SIGNATURE_CHARACTERS = 600
MAX_SENTENCE_CHARACTERS = 400
MAX_PARAGRAPH_CHARACTERS = 420


@dataclass(frozen=True)
class Entry:
    """One name: `kind` is module, function, class, method or property; `signature` is the name with its parameters,
    or "".

    `sentence` is the first sentence of the docstring, `paragraph` up to three sentences of its first paragraph, both
    with runs of white space turned into one space; both are "" when there is no docstring. `public` is False for a
    second name of an object that has a better one. `file` is the Python source file it was defined in, or "".
    """

    name: str
    kind: str
    signature: str
    sentence: str
    paragraph: str
    module: str
    public: bool
    well_known: bool
    file: str


def collect_entries() -> list[Entry]:
    """Every entry of the running Python, sorted by name."""
    found: dict[str, tuple[object, object, str]] = {}
    methods: set[str] = set()
    for module_name, module in _import_public_modules():
        if module_name != "builtins":
            found.setdefault(module_name, (module, module, module_name))
        for name, value in _public_members(module_name, module):
            full = name if module_name == "builtins" else f"{module_name}.{name}"
            found[full] = (value, value, module_name)
            if inspect.isclass(value):
                for method, raw, bound in _class_members(value, module_name in WELL_KNOWN):
                    found[f"{full}.{method}"] = (raw, bound, module_name)
                    methods.add(f"{full}.{method}")
    best = _best_names(found)
    entries = []
    for name in sorted(found):
        raw, value, module_name = found[name]
        public = best[_identity(value)] == name
        entry = _describe(name, raw, value, module_name, public=public, in_class=name in methods)
        if entry is not None:
            entries.append(entry)
    return entries


def _import_public_modules() -> Iterator[tuple[str, types.ModuleType]]:
    names = [n for n in sorted(sys.stdlib_module_names) if not n.startswith("_") and n not in NOT_IMPORTED]
    yield "builtins", importlib.import_module("builtins")
    yield "os.path", importlib.import_module("os.path")
    for name in names:
        module = _import_quietly(name)
        if module is None or name == "builtins":
            continue
        yield name, module
        if hasattr(module, "__path__"):
            for info in pkgutil.walk_packages(module.__path__, name + ".", onerror=lambda _: None):
                parts = info.name.split(".")
                if any(p.startswith("_") or p in NOT_IMPORTED_PARTS for p in parts):
                    continue
                inner = _import_quietly(info.name)
                if inner is not None:
                    yield info.name, inner


def _import_quietly(name: str) -> types.ModuleType | None:
    # Modules for other systems (winreg, msvcrt) and optional ones do not import here: they have no docstrings to read.
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, AttributeError, RuntimeError, SystemExit):
            return None


def _public_members(module_name: str, module: types.ModuleType) -> Iterator[tuple[str, object]]:
    exported = getattr(module, "__all__", None)
    for name in sorted(exported if exported is not None else vars(module)):
        if name.startswith("_") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        home = getattr(value, "__module__", None) or module_name
        # Without __all__, a name that another public module defines was only imported for use.
        elsewhere = home != module_name and not home.startswith("_")
        own_in_c = home in ("builtins", "nt", "posix") and not inspect.isclass(value)
        if exported is None and module_name != "builtins" and elsewhere and not own_in_c:
            continue
        yield name, value


def _class_members(cls: type, with_inherited: bool) -> Iterator[tuple[str, object, object]]:
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is object and cls is not object:
            continue
        inherited = base is not cls
        if inherited and not (with_inherited or base.__name__.startswith("_")):
            continue
        if inherited and issubclass(cls, BaseException):
            continue
        for name, raw in sorted(vars(base).items(), key=lambda item: item[0]):
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(raw, (property, types.GetSetDescriptorType, types.MemberDescriptorType)):
                yield name, raw, raw
                continue
            try:
                bound = getattr(cls, name)
            except (AttributeError, TypeError, NotImplementedError):
                continue
            if inspect.isroutine(raw) or isinstance(raw, (classmethod, staticmethod)):
                yield name, raw, bound


def _identity(value: object) -> int:
    return id(getattr(value, "__func__", value))


def _best_names(found: dict[str, tuple[object, object, str]]) -> dict[int, str]:
    """For each object the name a reader would use: in a well-known module, then the shortest, then the first by
    letter."""

    def rank(name: str, module_name: str) -> tuple[int, int, int, str]:
        known = WELL_KNOWN.index(module_name) if module_name in WELL_KNOWN else len(WELL_KNOWN)
        return (0 if module_name in WELL_KNOWN else 1, name.count("."), known, name)

    best: dict[int, tuple[tuple[int, int, int, str], str]] = {}
    for name, (_, value, module_name) in found.items():
        candidate = (rank(name, module_name), name)
        key = _identity(value)
        if key not in best or candidate < best[key]:
            best[key] = candidate
    return {key: name for key, (_, name) in best.items()}


def _describe(name: str, raw: object, value: object, module_name: str, *, public: bool, in_class: bool) -> Entry | None:
    doc = _own_docstring(value)
    kind = _kind_of(raw, value, in_class)
    signature = "" if kind in ("module", "property") else _signature_of(name, value)
    lines = doc.strip().splitlines()
    text, doc_parameters = _split_signature_lines(lines, name.rpartition(".")[2])
    if not signature and doc_parameters and kind not in ("module", "property"):
        signature = name + doc_parameters
    paragraph = " ".join(text.split("\n\n")[0].split()) if text else ""
    sentences = split_sentences(paragraph)
    sentence = sentences[0] if sentences else ""
    if kind == "module" and sentence:
        sentence, sentences = _strip_module_title(name, sentence, sentences)
    if len(sentence) > MAX_SENTENCE_CHARACTERS or not _is_prose(sentence):
        sentence, sentences = "", []
    if not sentence and not signature:
        return None
    return Entry(
        name=name,
        kind=kind,
        signature=signature,
        sentence=sentence,
        paragraph=_join_within(sentences[:3], MAX_PARAGRAPH_CHARACTERS) if sentence else "",
        module=module_name,
        public=public,
        well_known=module_name in WELL_KNOWN,
        file=_source_file(value),
    )


def _kind_of(raw: object, value: object, in_class: bool) -> str:
    if isinstance(value, types.ModuleType):
        return "module"
    if inspect.isclass(value):
        return "class"
    if isinstance(raw, (property, types.GetSetDescriptorType, types.MemberDescriptorType)):
        return "property"
    return "method" if in_class else "function"


def _own_docstring(value: object) -> str:
    # A class without a docstring must not answer with its base's, as getdoc would; a method may.
    doc = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    return inspect.cleandoc(doc) if isinstance(doc, str) else ""


def _signature_of(name: str, value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (
        ValueError,
        TypeError,
        AttributeError,
        NameError,
    ):  # the last two: defaults that cannot be looked up
        return ""
    # Reprs with an address differ from run to run; such a signature cannot be quoted.
    if " at 0x" in text or "<" in text or len(text) > MAX_SIGNATURE_CHARACTERS:
        return ""
    return name + text


_PARAMETERS = r"(\([^()]*(?:\([^()]*\)[^()]*)*\))"
_SIGNATURE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?(\w+)" + _PARAMETERS + r"\s*(.*)$")
_RETURNS = re.compile(r"^(?:-{1,2}>|=>|--|-\s)\s*(.*)$")


def _split_signature_lines(lines: list[str], short: str) -> tuple[str, str]:
    """Docstring without leading signature lines, and the parameters such a line gave.

    Many C functions write `max(iterable, *[, default=obj, key=func]) -> value` first. A line that says more than a
    type after the arrow (`D.pop(k[,d]) -> v, remove specified key ...`) stays: it is the docstring's first sentence.
    """
    parameters = ""
    for index, line in enumerate(lines):
        match = _SIGNATURE.match(line.strip())
        if match is None or match.group(1) != short:
            return "\n".join(lines[index:]).strip(), parameters
        returns = _RETURNS.match(match.group(3))
        if match.group(3) and returns is None:
            return "\n".join(lines[index:]).strip(), parameters
        parameters = parameters or match.group(2)
        words = returns.group(1).split() if returns is not None else []
        following = [text.strip() for text in lines[index + 1 :]]
        prose_follows = any(following) and following[0] == ""
        if len(words) > 2 and not (prose_follows and not re.search(r"[,.;]", returns.group(1) if returns else "")):
            # Further forms of the call may follow on the next lines (`dict() -> ...`, `dict(mapping) -> ...`).
            several = bool(following) and _SIGNATURE.match(following[0]) is not None
            return line.strip() if several else "\n".join(lines[index:]).strip(), parameters
    return "", parameters


def _strip_module_title(name: str, sentence: str, sentences: list[str]) -> tuple[str, list[str]]:
    # "fcntl -- control of file descriptors": the name is known already.
    cut = re.sub(rf"^(?:Module\s+)?{re.escape(name)}\s*(?:--?|:)\s*", "", sentence)
    return cut, [cut, *sentences[1:]]


_ABBREVIATIONS = (
    "e.g.",
    "i.e.",
    "etc.",
    "vs.",
    "cf.",
    "resp.",
    "incl.",
    "approx.",
    "Dr.",
    "Mr.",
    "No.",
    "St.",
)


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of one line of text; a full stop ends one when white space follows and it is no abbreviation."""
    sentences = []
    start = 0
    for match in re.finditer(r"[.!?][\"')\]]*(?=\s|$)", paragraph):
        words = paragraph[start : match.end()].split()
        if words and words[-1].lstrip("([\"'").lower() in {a.lower() for a in _ABBREVIATIONS}:
            continue
        ellipsis = paragraph[: match.end()].rstrip(")]'\"").endswith("..") and match.group().startswith(".")
        if ellipsis and match.group() != ".":
            continue  # inside brackets: `itemgetter(item, ...)`
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    tail = paragraph[start:].strip()
    if tail:
        sentences.append(tail)
    return sentences


def _join_within(sentences: list[str], limit: int) -> str:
    text = sentences[0]
    for sentence in sentences[1:]:
        if len(text) + 1 + len(sentence) > limit:
            break
        text = f"{text} {sentence}"
    return text


def _is_prose(sentence: str) -> bool:
    # Tables, rulers and doctest lines make no answer.
    if not sentence or ">>>" in sentence or "0x7f" in sentence or " at 0x" in sentence:
        return False
    letters = sum(c.isalpha() or c == " " for c in sentence)
    return letters >= 0.5 * len(sentence) and len(sentence) >= 3


def _source_file(value: object) -> str:
    target = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
    if isinstance(target, property):
        target = target.fget
    try:
        return inspect.getsourcefile(target) or ""  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
