"""Reading of untrusted documents: a PDF becomes the text of its pages, and pictures of pages without text.

`Documents.read` starts a process, `python -m mlxr.pictures.documents`, which answers once and ends. Its input is the
file. Its output has for each page a line of JSON, ["text", TEXT] or ["png", BYTES] followed by the picture; an error
ends it with a line of its message. `read_text` asks only for the text, of up to a whole book. The process uses
pypdfium2, which the extra `pdf` installs, and the system bounds its memory and time, as for the process of pictures.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
import math
import resource
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from mlxr.core.errors import InvalidRequest
from mlxr.core.processes import ask, limit

MAX_PAGES, MAX_SHOWN, MAX_CHARACTERS, PAGE_PIXELS, MAX_RATIO = 100, 16, 1 << 22, 1 << 21, 200
MAX_BOOK_PAGES, MAX_BOOK_CHARACTERS = 10_000, 1 << 26  # limits if only text is read
MAX_MEMORY_BYTES, MAX_PROCESSOR_S, MAX_READ_S, MAX_PROCESSES = 2 << 30, 30, 60.0, 2
KEPT_BYTES = 64 << 20
MAX_DOCUMENTS = 16  # most documents in a request
_MODULE = "pypdfium2"
Pages = list[str | bytes]


class Documents:
    """A reader of documents that keeps its last results, as conversations send them with each turn; for any thread."""

    _turns = threading.BoundedSemaphore(MAX_PROCESSES)  # for all models together

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Pages] = OrderedDict()

    def read(self, data: bytes, field: str) -> Pages:
        """Return the pages of a PDF, each text or a picture, or a text in UTF-8 as one page. Raises InvalidRequest."""
        if not data.startswith(b"%PDF-"):
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                raise InvalidRequest(field, "is neither a PDF nor a text in UTF-8")
            return [text]
        name = hashlib.sha256(data).digest()
        with self._lock:
            found = self._kept.get(name)
        pages = self._ask(data, field) if found is None else found
        with self._lock:
            self._kept[name] = pages
            self._kept.move_to_end(name)
            while len(self._kept) > 1 and sum(map(len, (p for kept in self._kept.values() for p in kept))) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return pages

    def _ask(self, data: bytes, field: str) -> Pages:
        with self._turns:
            return _read_apart(data, field)


def read_text(data: bytes, field: str) -> str:
    """Return the text of a PDF of many pages, empty if it has none. Raises InvalidRequest."""
    return "\n\n".join(page for page in _read_apart(data, field, "text") if isinstance(page, str))


def _read_apart(data: bytes, field: str, *arguments: str) -> Pages:
    if importlib.util.find_spec(_MODULE) is None:
        raise InvalidRequest(field, "cannot be read: pypdfium2 is not installed; pip install pypdfium2 pillow")
    try:
        answers = ask("mlxr.pictures.documents", data, MAX_READ_S, *arguments)
    except subprocess.TimeoutExpired:
        raise InvalidRequest(field, f"took longer than {MAX_READ_S:g} s to read; it was stopped") from None
    return list(_read_answers(answers, field))


def _read_answers(answers: bytes, field: str) -> Iterator[str | bytes]:
    source = io.BytesIO(answers)
    while (line := source.readline()).endswith(b"\n"):
        said = json.loads(line)
        if isinstance(said, str):
            raise InvalidRequest(field, said)
        if said == ["end", 0]:
            return
        yield said[1] if said[0] == "text" else source.read(said[1])
    raise InvalidRequest(field, "could not be read: its process used too much memory or time, or was ended")


class DocumentRefused(Exception):
    """The document cannot be read. The message says why, and continues "the document"."""


def read_pages(data: bytes, *, draws: bool = True) -> Iterator[str | bytes]:
    """Yield the pages of a PDF: text, or if it `draws` PNG pictures of pages without text. Raises DocumentRefused."""
    most, most_characters = (MAX_PAGES, MAX_CHARACTERS) if draws else (MAX_BOOK_PAGES, MAX_BOOK_CHARACTERS)
    pdfium: Any = importlib.import_module(_MODULE)
    try:
        document = pdfium.PdfDocument(data)
        count = len(document)
    except pdfium.PdfiumError as error:
        raise DocumentRefused(f"is a PDF that cannot be opened: {error}") from None
    if count > most:
        raise DocumentRefused(f"has {count} pages, at most {most} are read; send a part of it")
    characters = shown = 0
    for number in range(count):
        try:
            page = document[number]
            text = page.get_textpage().get_text_bounded().replace("\r\n", "\n")
            characters += len(text)
            if characters > most_characters:
                raise DocumentRefused(f"has more than {most_characters} characters of text; send a part of it")
            if text.strip() or not draws:
                yield text
                continue
            shown += 1
            if shown > MAX_SHOWN:
                raise DocumentRefused(f"has more than {MAX_SHOWN} pages without text; send a part of it")
            yield _draw(page, number)
        except pdfium.PdfiumError as error:
            raise DocumentRefused(f"has a page {number + 1} that cannot be read: {error}") from None


def _draw(page: Any, number: int) -> bytes:
    width, height = page.get_size()
    if not (math.isfinite(width * height) and 0 < max(width, height) <= MAX_RATIO * min(width, height)):
        raise DocumentRefused(f"has a page {number + 1} of {width:g} x {height:g} points, which cannot be drawn")
    image = page.render(scale=math.sqrt(PAGE_PIXELS / (width * height))).to_pil()
    target = io.BytesIO()
    image.convert("RGB").save(target, "PNG", compress_level=1)
    return target.getvalue()


def main() -> None:
    """Read the file, answer and end."""
    for kind, most in ((resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_CPU, MAX_PROCESSOR_S)):
        limit(kind, most)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        limit(kind, 0)
    target = sys.stdout.buffer
    try:
        for page in read_pages(sys.stdin.buffer.read(), draws=sys.argv[1:] != ["text"]):
            said = ["text", page] if isinstance(page, str) else ["png", len(page)]
            target.write(json.dumps(said).encode() + b"\n" + (b"" if isinstance(page, str) else page))
        target.write(b'["end", 0]\n')
    except DocumentRefused as error:
        target.write(json.dumps(str(error)).encode() + b"\n")
    except MemoryError:
        target.write(json.dumps(f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory").encode() + b"\n")
    target.flush()


if __name__ == "__main__":
    main()
