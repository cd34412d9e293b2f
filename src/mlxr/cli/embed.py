"""`mlxr embed`: vectors of texts, computed here or by a server."""

from __future__ import annotations

import asyncio
import json as json_text
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from mlxr.cli.flags import Json, complete_models
from mlxr.cli.remote import Url, ask_server, refuse_model_settings
from mlxr.cli.terminal import print_json, show_progress
from mlxr.core.errors import InvalidRequest
from mlxr.core.settings import Settings

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A file, a folder or a name.", autocompletion=complete_models)
]
Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="The texts. If there are none, each line of stdin is a text.")
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


def embed(
    model: Model,
    settings: Settings,
    texts: Texts = None,
    pooling: PoolingOption = None,
    last_token: LastToken = False,
    json: Json = False,
    url: Url = None,
) -> None:
    """Print a vector of length 1 for each text. Each line of output is the JSON list of the numbers of one vector."""
    wanted = texts or _read_lines()
    if last_token and pooling not in (None, "last"):
        raise InvalidRequest("--last-token", f"is the same as --pooling last; got --pooling {pooling} as well")
    pooling = "last" if last_token else pooling
    if url is not None:
        refuse_model_settings(settings)
        vectors = _ask(settings, url, model, wanted, pooling)
    else:
        vectors = asyncio.run(_compute(settings, model, wanted, pooling))
    if json:
        print_json({"model": model, "embeddings": vectors})
        return
    for vector in vectors:
        print(json_text.dumps(vector))


def _read_lines() -> list[str]:
    try:
        lines = sys.stdin.buffer.read().decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest("TEXT", f"is not UTF-8: {error.reason} at byte {error.start} of stdin") from error
    if not lines:
        raise InvalidRequest("TEXT", "is missing: none was given, and stdin is empty")
    return lines


def _ask(settings: Settings, url: str, model: str, texts: Sequence[str], pooling: Pooling | None) -> list[list[float]]:
    body: dict[str, object] = {"model": model, "input": list(texts), "pooling": pooling}
    reply = ask_server(settings, url, "/v1/embeddings", body, timeout_s=None)
    return [entry["embedding"] for entry in reply["data"]]


async def _compute(settings: Settings, model: str, texts: Sequence[str], pooling: Pooling | None) -> list[list[float]]:
    from mlxr.service.embedding import scale_vector
    from mlxr.service.opening import open_model
    from mlxr.service.session import Session

    with show_progress("loading") as progress:
        session = Session(open_model(model, settings, progress), settings)
    try:
        vectors = []
        for number, text in enumerate(texts):
            try:
                vector = await session.embed(session.encode_prompt(text, parse_special=False), pooling)
            except InvalidRequest as error:
                raise InvalidRequest("TEXT", f"number {number + 1}: {error.reason}") from error
            vectors.append(scale_vector(vector).tolist())
        return vectors
    finally:
        await session.stop()
