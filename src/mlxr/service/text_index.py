"""Vectors of texts on disk, each computed only once; and a search by question over a folder's files.

One SQLite file keeps vectors as little-endian float32 under the digests of their texts. Each is stored once it is
computed, so a process that is killed loses only unfinished ones. The file belongs to one way of making vectors, which
its `identity` names. A search reads all vectors and multiplies: for some ten thousand that is quicker than an index of
neighbours, and exact. Knows no model: the caller computes vectors.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.types import Closes
from mlxr.pictures import documents
from mlxr.service.embedding import Vector, scale_vector

Embed = Callable[[Sequence[str]], Iterable[Vector]]
Report = Callable[[int, int], None]
SUFFIXES = frozenset({".md", ".markdown", ".rst", ".txt", ".pdf"})
MAX_FILE_BYTES = 32 << 20
_VERSION = "1"
# Large pages, and the file mapped into memory, as a search reads all vectors.
_PRAGMAS = "PRAGMA page_size=32768; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA mmap_size=1073741824;"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, mtime_ns INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (path TEXT NOT NULL, line INTEGER NOT NULL, text TEXT NOT NULL, digest BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS chunks_of_files ON chunks (path);
CREATE INDEX IF NOT EXISTS chunks_of_texts ON chunks (digest);
"""


@frozen
class Passage:
    """A part of a file, from that line on, and its nearness to the question: the cosine of their vectors."""

    path: str
    line: int
    text: str
    score: float


@frozen
class Change:
    """Counts of an update: files that were read anew, files that are gone, vectors that were computed."""

    read: int
    gone: int
    computed: int
    skipped: tuple[str, ...] = ()  # files that could not be read, each with the reason


class VectorStore(Closes):
    """The vectors in the SQLite file at `path`, which is made if it is missing.

    Raises InvalidRequest if it holds those of another `identity`, MlxrError if it is none of ours or broken.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.executescript(_PRAGMAS + _SCHEMA)
            stated = dict(self._db.execute("SELECT key, value FROM about WHERE key IN ('version', 'identity')"))
            if stated and stated != {"version": _VERSION, "identity": identity}:
                self._db.close()
                raise InvalidRequest(
                    str(path), "holds vectors of another model, prompt or version; delete it to begin anew"
                )
            rows = [("version", _VERSION), ("identity", identity)]
            self._db.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise MlxrError(f"{path}: cannot be used as a file of vectors: {error}; delete it to begin anew") from error

    def count(self, texts: Sequence[str]) -> int:
        """Return how many different texts of these have a vector; the file may hold those of other texts, too."""
        return len(self._list_digests() & set(map(digest_text, texts)))

    def fill(self, texts: Sequence[str], embed: Embed, progress: Report | None = None) -> int:
        """Compute and store the vectors of those texts that have none; returns their number."""
        wanted = {digest_text(text): text for text in texts}
        have = self._list_digests()
        missing = {digest: text for digest, text in wanted.items() if digest not in have}
        done = len(wanted) - len(missing)
        for digest, vector in zip(missing, embed(list(missing.values())), strict=True):
            self._db.execute(
                "INSERT OR REPLACE INTO vectors (digest, vector) VALUES (?, ?)",
                (digest, vector.astype("<f4").tobytes()),
            )
            done += 1
            if progress is not None:
                progress(done, len(wanted))
        return len(missing)

    def read(self, texts: Sequence[str]) -> Vector:
        """Return the vectors of texts that all have one, (texts, size)."""
        stored = dict(self._db.execute("SELECT digest, vector FROM vectors"))
        return _join([stored[digest_text(text)] for text in texts])

    def _list_digests(self) -> set[bytes]:
        return {digest for (digest,) in self._db.execute("SELECT digest FROM vectors")}

    def close(self) -> None:
        """Close the file of the index."""
        self._db.close()

    def delete(self) -> None:
        """Close and remove the file."""
        self.close()
        for end in ("", "-wal", "-shm"):
            Path(f"{self.path}{end}").unlink(missing_ok=True)


class TextIndex(VectorStore):
    """The text files of a folder in passages of at most `characters`, with their vectors, for searches."""

    def __init__(self, path: Path, identity: str, characters: int = 800) -> None:
        super().__init__(path, f"{identity}, passages of {characters}")
        self._characters = characters
        self._loaded: tuple[list[bytes], Vector] | None = None
        self._is_whole = False  # every passage has its vector

    def update(self, folder: Path, embed: Embed, progress: Report | None = None) -> Change:
        """Read the files that are new or changed, forget those that are gone, and compute missing vectors.

        Files of other kinds, hidden ones and those behind links are left out. Raises InvalidRequest if it is no folder.
        """
        if not folder.is_dir():
            raise InvalidRequest("FOLDER", f"{folder} is no folder")
        found = dict(_list_files(folder))
        known = {path: stamp for path, *stamp in self._db.execute("SELECT path, mtime_ns, size FROM files")}
        gone = [path for path in known if path not in found]
        changed = [path for path, stamp in found.items() if known.get(path) != list(stamp)]
        skipped = []
        for path in gone:
            self._forget(path)
        for path in changed:
            try:
                passages = list(split_passages(read_text(folder / path), self._characters))
            except MlxrError as error:
                skipped.append(f"{path}: {error}")
                passages = []
            self._replace(path, found[path], passages)
        computed = 0
        if gone or changed or not self._is_whole:
            self._is_whole = False
            missing = "SELECT DISTINCT text FROM chunks WHERE digest NOT IN (SELECT digest FROM vectors)"
            texts = [text for (text,) in self._db.execute(missing)]
            computed = self.fill(texts, lambda wanted: map(scale_vector, embed(wanted)), progress) if texts else 0
            self._is_whole = True
        if gone or changed:
            self._db.execute("DELETE FROM vectors WHERE digest NOT IN (SELECT digest FROM chunks)")
        if gone or changed or computed:
            self._loaded = None
        return Change(len(changed), len(gone), computed, tuple(skipped))

    def find(self, question: Vector, count: int = 5) -> list[Passage]:
        """Return the passages nearest to the vector of a question, the nearest first."""
        digests, vectors = self._load()
        if not digests:
            return []
        if question.shape != vectors.shape[1:]:
            raise InvalidRequest("question", f"has {question.size} numbers, and this index {vectors.shape[1]}")
        scores = vectors @ scale_vector(question)
        passages: list[Passage] = []
        for place in np.argsort(-scores, kind="stable")[:count]:
            named = "SELECT path, line, text FROM chunks WHERE digest = ? ORDER BY path, line"
            rows = self._db.execute(named, (digests[place],))
            passages += [Passage(path, line, text, float(scores[place])) for path, line, text in rows]
        return passages[:count]

    def remember_model(self, name: str) -> None:
        """Keep the name of the model that makes the vectors, for `recall_model`."""
        self._db.execute("INSERT OR REPLACE INTO about VALUES ('model', ?)", (name,))

    def _load(self) -> tuple[list[bytes], Vector]:
        if self._loaded is None:
            rows = self._db.execute("SELECT digest, vector FROM vectors ORDER BY id").fetchall()
            self._loaded = [digest for digest, _ in rows], _join([vector for _, vector in rows])
        return self._loaded

    def _forget(self, path: str) -> None:
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM chunks WHERE path = ?", (path,))
        self._db.execute("DELETE FROM files WHERE path = ?", (path,))
        self._db.execute("COMMIT")

    def _replace(self, path: str, stamp: tuple[int, int], passages: Sequence[tuple[int, str]]) -> None:
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM chunks WHERE path = ?", (path,))
        rows = [(path, line, text, digest_text(text)) for line, text in passages]
        self._db.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?)", rows)
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (path, *stamp))
        self._db.execute("COMMIT")


def recall_model(path: Path) -> str | None:
    """Return the name of the model that made the vectors of an index, None if there is no index yet."""
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(path)) as db:
            row = db.execute("SELECT value FROM about WHERE key = 'model'").fetchone()
    except sqlite3.Error as error:
        raise MlxrError(f"{path}: is no index of ours: {error}; delete it to begin anew") from error
    return None if row is None else str(row[0])


def digest_text(text: str) -> bytes:
    """Return the key of a text's vector, 16 bytes."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def split_passages(text: str, characters: int) -> Iterator[tuple[int, str]]:
    """Yield passages of at most `characters` with the lines, from 1, where they begin.

    Paragraphs stay together as far as they fit. A heading of Markdown begins a passage; a paragraph that is too long is
    cut after a sentence, else after a word.
    """
    line, held, held_line = 1, "", 1
    for paragraph in re.split(r"(\n[ \t]*\n\s*|\n(?=#{1,6} ))", text):
        plain = paragraph.strip()
        if plain:
            start = line + paragraph[: len(paragraph) - len(paragraph.lstrip())].count("\n")
            if held and (len(held) + len(plain) + 2 > characters or plain.startswith("#")):
                yield held_line, held
                held = ""
            for offset, piece in _cut(plain, characters):
                if held and len(held) + len(piece) + 2 > characters:
                    yield held_line, held
                    held = ""
                held, held_line = (f"{held}\n\n{piece}", held_line) if held else (piece, start + offset)
        line += paragraph.count("\n")
    if held:
        yield held_line, held


def _cut(text: str, characters: int) -> Iterator[tuple[int, str]]:
    """Yield the pieces of a paragraph, and the number of lines before each."""
    at = 0
    while at < len(text):
        piece = text[at : at + characters]
        if at + characters < len(text):
            ends = [match.end() for match in re.finditer(r"[.!?]\s|\n", piece)] or [piece.rfind(" ") + 1]
            piece = piece[: ends[-1]] if ends[-1] > characters // 3 else piece
        if piece.strip():
            yield text[:at].count("\n"), piece.strip()
        at += len(piece)


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, or of a PDF; raises MlxrError with the reason if there is none."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise MlxrError(f"has more than {MAX_FILE_BYTES >> 20} MiB")
        data = path.read_bytes()
        return documents.read_text(data, "PDF") if path.suffix.lower() == ".pdf" else data.decode("utf-8-sig")
    except InvalidRequest as error:
        raise MlxrError(error.reason) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MlxrError(f"cannot be read as UTF-8: {error}") from error


def _list_files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path below the folder of each text file, with the time of its change and its size.

    Each question looks at all files, and a `Path` for each would take most of the time of its answer.
    """
    places = [""]
    while places:
        place = places.pop()
        try:
            with os.scandir(folder / place) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        folders = []
        for entry in found:
            path = f"{place}{entry.name}"
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            if entry.is_dir():
                folders.append(f"{path}/")
            elif entry.name[entry.name.rfind(".") :].lower() in SUFFIXES:
                try:
                    stat = entry.stat()
                    path.encode()
                except (OSError, UnicodeEncodeError):
                    continue
                yield path, (stat.st_mtime_ns, stat.st_size)
        places += reversed(folders)


def _join(blobs: Sequence[bytes]) -> Vector:
    vectors = np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), -1 if blobs else 0)
    return vectors.astype(np.float32, copy=False)
