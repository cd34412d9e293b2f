"""Documents become texts and pictures of pages; hostile ones are refused by name."""

from __future__ import annotations

import io
import random

import pytest
from made_documents import make_pdf

from mlxr.core.errors import InvalidRequest
from mlxr.pictures import documents
from mlxr.pictures.documents import Documents

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("pypdfium2")


def refuse(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        Documents().read(data, "messages[0].content[1]")
    assert caught.value.field == "messages[0].content[1]"


def test_pages_are_texts_or_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, data = Documents(), make_pdf(["The quick fox", "", "and the dog"])
    first, second, third = reader.read(data, "file")
    assert (first, third) == ("The quick fox", "and the dog")
    assert isinstance(second, bytes)
    image = Image.open(io.BytesIO(second))
    assert image.size == pytest.approx((2048, 1024), abs=2)
    assert image.getpixel((50 * 2048 // 200, 1024 - 50 * 1024 // 100)) == pytest.approx((128,) * 3, abs=2)
    assert reader.read("plain text é".encode(), "file") == ["plain text é"]
    monkeypatch.setattr(documents, "ask", None)  # what was read last is kept
    assert reader.read(data, "file")[2] == "and the dog"


def test_books_are_read_as_text_alone() -> None:
    assert documents.read_text(make_pdf(["one", "", *["two"] * 120]), "PDF") == "\n\n".join(["one", "", *["two"] * 120])
    with pytest.raises(InvalidRequest, match="is a PDF that cannot be opened"):
        documents.read_text(b"%PDF-1.4\n", "PDF")


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(b"\xff\xfe\x00", "is neither a PDF nor a text in UTF-8")
    refuse(b"PK\0\0", "is neither a PDF nor a text in UTF-8")
    refuse(b"%PDF-1.4\n", "is a PDF that cannot be opened")
    refuse(make_pdf(["a"] * 101), "has 101 pages, at most 100 are read")
    refuse(make_pdf(["a", *[""] * 17]), "has more than 16 pages without text")
    refuse(make_pdf([""], (14000, 3)), "has a page 1 of 14000 x 3 points, which cannot be drawn")
    monkeypatch.setattr(documents, "MAX_READ_S", 0.01)
    refuse(make_pdf(["a"]), "took longer than 0.01 s to read; it was stopped")
    monkeypatch.setattr(documents.importlib.util, "find_spec", lambda _: None)
    refuse(make_pdf(["a"]), "pip install pypdfium2")


def test_broken_documents_never_do_more_than_fail() -> None:
    """Cut, changed, or with false lengths and sizes: they give pages or an error in this process, nothing else."""
    whole = make_pdf(["The quick fox", ""])
    chance, failed = random.Random(1), 0
    for _ in range(6):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(6, len(whole))])])
        for _ in range(chance.randrange(1, 30)):
            data[chance.randrange(5, len(data))] = chance.randrange(256)
        try:
            assert len(list(documents.read_pages(bytes(data)))) <= 2
        except documents.DocumentRefused as error:
            failed += bool(str(error))
    assert failed
