"""`mlxr embed`: vectors of texts or files; `mlxr rerank`: documents ranked; `mlxr find`: search of a folder."""

from __future__ import annotations

import json as json_text
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlxr.cli.flags import Json, complete_models, read_text
from mlxr.cli.remote import Url, ask_server, refuse_model_settings
from mlxr.cli.terminal import make_printable, print_json, print_note, show_progress
from mlxr.core.errors import InvalidRequest
from mlxr.core.settings import Settings

if TYPE_CHECKING:
    from mlxr.service.embedding import PromptChoice, Vector
    from mlxr.service.session import Session
    from mlxr.service.text_index import Passage

EmbedModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A file, a folder or a name.", autocompletion=complete_models)
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT", help="The texts, or with --out files. If there are none, each line of stdin is a text."
    ),
]
LastToken = Annotated[bool, typer.Option("--last-token", help="The same as --pooling last.")]
Pooling = Literal["mean", "last", "cls"]
PoolingOption = Annotated[
    Pooling | None,
    typer.Option(
        "--pooling",
        help="Make vectors of the states of all tokens, of the last or of the first one; default: as the model's files "
        "state, else of all.",
    ),
]
InputType = Annotated[
    str | None, typer.Option("--input-type", help="What the texts are: query, document, ...; chooses the prompt.")
]
PromptName = Annotated[str | None, typer.Option("--prompt-name", help="The model's prompt of that name goes before.")]
OwnPrompt = Annotated[str | None, typer.Option("--prompt", help="This goes before each text.")]
Dimensions = Annotated[int | None, typer.Option("--dimensions", min=1, help="Keep the first so many numbers.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long, instead of refusing them.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write the vectors of files to this .npy, with their names in a .jsonl beside it, or to a .parquet. What "
        "is interrupted goes on where it was.",
    ),
]
KindOption = Annotated[
    Literal["dense", "sparse", "multi"],
    typer.Option(
        "--kind", help="Print a vector of each text, the weights of its tokens, or a vector of each token (bge-m3)."
    ),
]
ASKED_AT_ONCE = 64  # texts that a server gets in one request


def embed(
    model: EmbedModel,
    settings: Settings,
    texts: Texts = None,
    pooling: PoolingOption = None,
    last_token: LastToken = False,
    prompt_name: PromptName = None,
    input_type: InputType = None,
    prompt: OwnPrompt = None,
    dimensions: Dimensions = None,
    truncate: Truncate = False,
    out: Out = None,
    kind: KindOption = "dense",
    json: Json = False,
    url: Url = None,
) -> None:
    """Print a vector of length 1 for each text. Each line of output is the JSON list of the numbers of one vector.

    With --out the arguments are files: each is a text, but of a .jsonl each line, a JSON text or an object with `text`.
    """
    from mlxr.service.embedding import PromptChoice

    if last_token and pooling not in (None, "last"):
        raise InvalidRequest("--last-token", f"is the same as --pooling last; got --pooling {pooling} as well")
    wanted = Wanted(
        model, "last" if last_token else pooling, PromptChoice(prompt_name, input_type, prompt), dimensions, truncate
    )
    if kind != "dense":
        if out is not None or url is not None or dimensions is not None or wanted.pooling is not None:
            raise InvalidRequest("--kind", f"{kind} goes without --out, --url, --dimensions and --pooling")
        with _open_session(settings, model) as session:
            for made in session.embed_tokens(texts or _read_lines(), kind, wanted.choice, truncates=truncate):
                print(json_text.dumps(made if isinstance(made, dict) else made.tolist()))
        return
    if out is not None:
        _write_vectors(settings, wanted, [Path(text) for text in texts or ()], out, url)
        return
    given = texts or _read_lines()
    with _open_embedder(settings, wanted, url) as (compute, _):
        vectors = [vector.tolist() for vector in compute(given)]
    if json:
        print_json({"model": model, "embeddings": vectors})
        return
    for vector in vectors:
        print(json_text.dumps(vector))


class Wanted:
    """The options that decide which vector a text gets."""

    def __init__(
        self,
        model: str,
        pooling: Pooling | None = None,
        choice: PromptChoice | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> None:
        from mlxr.service.embedding import PromptChoice

        self.model, self.pooling, self.dimensions, self.truncate = model, pooling, dimensions, truncate
        self.choice = choice or PromptChoice()

    def __str__(self) -> str:
        return f"{self.pooling}, {self.choice}, {self.dimensions}, {self.truncate}"


@contextmanager
def _open_embedder(
    settings: Settings, wanted: Wanted, url: str | None
) -> Iterator[tuple[Callable[[Sequence[str]], Iterable[Vector]], str]]:
    """Yield a function from texts to vectors of length 1, and a name that differs if these vectors would."""
    if url is not None:
        refuse_model_settings(settings)
        yield lambda texts: _ask(settings, url, wanted, texts), f"{url} {wanted.model}: {wanted}"
        return
    with _open_session(settings, wanted.model) as session:
        identity = f"{session.loaded.fingerprint.hex()}: {wanted}"
        yield lambda texts: _compute(session, wanted, texts), identity


@contextmanager
def _open_session(settings: Settings, model: str) -> Iterator[Session]:
    from mlxr.service.opening import open_model
    from mlxr.service.session import Session

    with show_progress("loading") as progress:
        session = Session(open_model(model, settings, progress), settings)
    try:
        yield session
    finally:
        session.close()


def _compute(session: Session, wanted: Wanted, texts: Sequence[str]) -> Iterator[Vector]:
    from mlxr.service.embedding import check_dimensions, scale_vector

    check_dimensions(wanted.dimensions, session.config.vector_size, field="--dimensions")
    pooling = session.choose_pooling(wanted.pooling, "TEXT")
    prompts = session.encode_each(texts, "TEXT", wanted.choice, truncates=wanted.truncate)
    for vector in session.embed_each(prompts, pooling):
        yield scale_vector(vector, wanted.dimensions)


def _ask(settings: Settings, url: str, wanted: Wanted, texts: Sequence[str]) -> Iterator[Vector]:
    import numpy as np

    choice = wanted.choice
    body: dict[str, object] = {
        "model": wanted.model,
        "pooling": wanted.pooling,
        "prompt_name": choice.name,
        "input_type": choice.input_type,
        "prompt": choice.text,
        "dimensions": wanted.dimensions,
        "truncate": wanted.truncate,
    }
    for start in range(0, len(texts), ASKED_AT_ONCE):
        part = list(texts[start : start + ASKED_AT_ONCE])
        reply = ask_server(settings, url, "/v1/embeddings", body | {"input": part}, timeout_s=None)
        yield from (np.array(entry["embedding"], np.float32) for entry in reply["data"])


def _write_vectors(settings: Settings, wanted: Wanted, files: Sequence[Path], out: Path, url: str | None) -> None:
    from mlxr.service.text_index import VectorStore

    if out.suffix not in (".npy", ".parquet"):
        raise InvalidRequest("--out", f"must end in .npy or .parquet, got {out}")
    if out.suffix == ".parquet":
        _import_arrow()
    if not files:
        raise InvalidRequest("FILE", "is missing: --out wants files")
    texts = [row for file in files for row in _read_texts(file)]
    if not texts:
        raise InvalidRequest("FILE", "holds no text")
    with (
        _open_embedder(settings, wanted, url) as (compute, identity),
        VectorStore(out.with_name(f"{out.name}.partial"), identity) as store,
    ):
        wanted_texts = [text for _, _, text in texts]
        distinct = len(set(wanted_texts))
        try:
            with show_progress("embedding") as progress:
                computed = store.fill(wanted_texts, compute, progress)
        except KeyboardInterrupt:
            kept = store.count(wanted_texts)
            print_note(f"interrupted: {kept} of {distinct} vectors are kept; the same command goes on from there")
            raise
        _save(out, texts, store.read(wanted_texts))
        store.delete()
    print_note(
        f"{len(texts)} texts: {computed} vectors computed, {distinct - computed} were there, "
        f"{len(texts) - distinct} texts are repeated"
    )


def _save(out: Path, texts: Sequence[tuple[str, int, str]], vectors: Vector) -> None:
    """Write the file at once: an old one stays until the new one is complete."""
    import numpy as np

    part = out.with_name(f"{out.name}.new")
    if out.suffix == ".parquet":
        arrow, parquet = _import_arrow()
        rows = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), vectors.shape[1])
        columns = [[file for file, _, _ in texts], [line for _, line, _ in texts], [text for *_, text in texts], rows]
        parquet.write_table(arrow.table(columns, names=["file", "line", "text", "vector"]), part)
    else:
        names = out.with_suffix(".jsonl")
        lines = [json_text.dumps({"file": file, "line": line}, ensure_ascii=False) for file, line, _ in texts]
        names.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with part.open("wb") as file:
            np.save(file, vectors)
    os.replace(part, out)


def _import_arrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise InvalidRequest("--out", ".parquet needs pyarrow: pip install pyarrow; or take .npy") from None


def _read_texts(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the texts of a file, each with the file's name and the line where it begins."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("FILE", f"{file} cannot be read as UTF-8: {error}") from error
    if file.suffix != ".jsonl":
        yield str(file), 1, text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json_text.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("FILE", f"{file}:{number} is no JSON: {error}") from None
        found = value.get("text") if isinstance(value, dict) else value
        if not isinstance(found, str):
            raise InvalidRequest("FILE", f"{file}:{number} must be a text, or an object with one as `text`")
        yield str(file), number, found


def _read_lines() -> list[str]:
    try:
        lines = sys.stdin.buffer.read().decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest("TEXT", f"is not UTF-8: {error.reason} at byte {error.start} of stdin") from error
    if not lines:
        raise InvalidRequest("TEXT", "is missing: none was given, and stdin is empty")
    return lines


Query = Annotated[str, typer.Argument(metavar="QUERY", help="What the documents shall answer.")]
Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE", help="Each is a document. If there are none, each line of stdin is one."),
]
TopN = Annotated[int | None, typer.Option("--top", min=1, help="Print only the best so many.")]


def rerank(
    model: EmbedModel,
    query: Query,
    settings: Settings,
    files: Files = None,
    top: TopN = None,
    json: Json = False,
    url: Url = None,
) -> None:
    """Rank documents by how well they answer a query: a number from 0 to 1 and a name, or the text, on each line."""
    documents = [read_text(file, "FILE") for file in files] if files else _read_lines()
    names = [str(file) for file in files] if files else documents
    if url is not None:
        refuse_model_settings(settings)
        body: dict[str, object] = {"model": model, "query": query, "documents": documents}
        reply = ask_server(settings, url, "/v1/rerank", body, timeout_s=None)
        ranked = [(row["index"], row["relevance_score"]) for row in reply["results"]]
    else:
        with _open_session(settings, model) as session:
            ranked = _rank(session, query, documents)
    ranked = ranked[:top]
    if json:
        rows = [{"index": index, "name": names[index], "score": score} for index, score in ranked]
        print_json({"model": model, "results": rows})
        return
    for index, score in ranked:
        print(f"{score:.6f}\t{names[index]}")


def _rank(session: Session, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
    return sorted(enumerate(session.rank_all(query, documents)), key=lambda pair: -pair[1])


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Its text and Markdown files are searched, and PDF.")]
Question = Annotated[
    str | None,
    typer.Argument(metavar="QUESTION", help="What is looked for, in your own words; without, you are asked."),
]
FindModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Makes the vectors; afterwards the index knows it.", autocompletion=complete_models
    ),
]
Reranker = Annotated[
    str | None,
    typer.Option("--reranker", help="Puts the nearest passages in order again.", autocompletion=complete_models),
]
Top = Annotated[int, typer.Option("--top", min=1, help="So many passages.")]
IndexPath = Annotated[
    Path | None, typer.Option("--index", help="Where the index is kept; default: .mlxr-index.sqlite in the folder.")
]
INDEX_NAME = ".mlxr-index.sqlite"
RANKED_EACH = 5  # a reranker looks at this many passages for each wanted one
SHOWN_CHARACTERS = 400


def find(
    folder: Folder,
    settings: Settings,
    question: Question = None,
    model: FindModel = None,
    reranker: Reranker = None,
    top: Top = 5,
    index: IndexPath = None,
    json: Json = False,
) -> None:
    """Search the files of a folder by meaning. They are read and kept as vectors once, and later only what changed.

    Without a question it asks for one after the other, or reads a question from each line of stdin: the model stays
    loaded, so that the answers come at once.
    """
    from mlxr.service.embedding import PromptChoice
    from mlxr.service.text_index import TextIndex, recall_model

    if not folder.is_dir():
        raise InvalidRequest("FOLDER", f"{folder} is no folder")
    place = index or folder / INDEX_NAME
    name = model or recall_model(place)
    if name is None:
        raise InvalidRequest("--model", "is missing: the first time, say which model makes the vectors")
    document = Wanted(name, choice=PromptChoice(input_type="document"), truncate=True)
    query = Wanted(name, choice=PromptChoice(input_type="query"), truncate=True)
    with ExitStack() as opened:
        session = opened.enter_context(_open_session(settings, name))
        ranker = None if reranker is None else opened.enter_context(_open_session(settings, reranker))
        characters = min(800, 3 * session.text_tokens)
        found = opened.enter_context(TextIndex(place, session.loaded.fingerprint.hex(), characters))
        found.remember_model(name)
        for asked in _read_questions(question):
            with show_progress("reading") as progress:
                change = found.update(folder, lambda texts: _compute(session, document, texts), progress)
            for skipped in change.skipped:
                print_note(f"not read: {make_printable(skipped)}")
            if change.read or change.gone:
                print_note(f"{change.read} files read, {change.gone} gone, {change.computed} passages computed")
            vector = next(iter(_compute(session, query, [asked])))
            passages = found.find(vector, top * (1 if ranker is None else RANKED_EACH))
            if ranker is not None and passages:
                ranked = _rank(ranker, asked, [passage.text for passage in passages])
                passages = [replace(passages[place], score=score) for place, score in ranked[:top]]
            _print_passages(name, passages, json)


def _read_questions(question: str | None) -> Iterator[str]:
    """Yield the given question, else those of stdin; on a terminal with a prompt for each."""
    from mlxr.cli.chat import read_lines

    if question is not None:
        yield question
        return
    is_interactive = sys.stdin.isatty()
    lines = filter(str.strip, read_lines(is_interactive=is_interactive, complete=lambda _: [], draft=str))
    first = next(lines, None)
    if first is not None:
        yield first
        yield from lines
    elif not is_interactive:
        raise InvalidRequest("QUESTION", "is missing: none was given, and stdin is empty")


def _print_passages(model: str, passages: Sequence[Passage], json: bool) -> None:
    if json:
        print_json({"model": model, "results": [asdict(passage) for passage in passages]})
        return
    for passage in passages:
        shown = " ".join(passage.text.split())
        shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"
        print(make_printable(f"{passage.score:.3f}  {passage.path}:{passage.line}"))
        print(f"       {make_printable(shown)}")
