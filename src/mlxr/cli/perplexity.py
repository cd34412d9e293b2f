"""`mlxr perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Json, Model
from mlxr.cli.terminal import format_count, print_fields, print_json, show_progress
from mlxr.core.errors import InvalidRequest, NotFound
from mlxr.core.settings import Settings
from mlxr.service.opening import build_engine, open_model
from mlxr.service.perplexity import TokenScore, score_text

DEFAULT_WINDOW_TOKENS = 512

TextFile = Annotated[Path, typer.Argument(metavar="FILE", help="A text file in UTF-8.")]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        help=f"Tokens in a window; default: {DEFAULT_WINDOW_TOKENS}, or the model's context if that is less.",
    ),
]
PerToken = Annotated[
    Path | None,
    typer.Option("--per-token", metavar="FILE", help="Also write the loss of each token, as lines of JSON."),
]


def perplexity(
    model: Model,
    file: TextFile,
    settings: Settings,
    context: Context = None,
    per_token: PerToken = None,
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text.

    The text is cut into windows that do not overlap. Each begins with BOS if the
    model wants that. Every token except the first of a window is scored.
    """
    text = read_text(file)
    with show_progress("loading") as progress:
        loaded = open_model(model, settings, progress)
    with loaded:
        engine = build_engine(loaded, replace(settings, max_sequences=1))
        window_tokens = min(DEFAULT_WINDOW_TOKENS, engine.context_tokens) if context is None else context
        start_s = time.perf_counter()
        with show_progress("scoring") as progress, open_losses(per_token, loaded.tokenizer.token_bytes) as note:
            score = score_text(engine, loaded.tokenizer, text, window_tokens, progress, note)
        seconds = time.perf_counter() - start_s
    fields = {
        "model": model,
        "file": str(file),
        "context": window_tokens,
        "tokens": score.tokens,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "seconds": seconds,
        "device": loaded.ctx.device,
        "threads": loaded.ctx.threads,
    }
    if json:
        print_json(fields)
        return
    print_fields(
        [
            ("perplexity", f"{score.perplexity:.4f}"),
            ("bits per byte", f"{score.bits_per_byte:.4f}"),
            ("tokens", f"{format_count(score.tokens)} in windows of {window_tokens}"),
            ("speed", f"{score.tokens / seconds:.0f} tokens/s on {loaded.ctx.device}, {loaded.ctx.threads} threads"),
        ]
    )


@contextmanager
def open_losses(path: Path | None, read_bytes: Callable[[int], bytes]) -> Iterator[Callable[[TokenScore], None] | None]:
    """Give a function that writes a line for each scored token, whose text `read_bytes` has; None without a path.

    Raises InvalidRequest where the file cannot be written.

    `text` has the token's bytes as UTF-8, with U+FFFD for what is none by itself: a character may have several tokens.
    """
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8") as lines:

            def write(token: TokenScore) -> None:
                text = read_bytes(token.token_id).decode(errors="replace")
                row = {"position": token.position, "token": token.token_id, "text": text, "loss": token.nats}
                lines.write(json_format.dumps(row, ensure_ascii=False) + "\n")

            yield write
    except OSError as error:
        raise InvalidRequest("--per-token", f"{path} cannot be written: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The whole file; raises NotFound or InvalidRequest."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except OSError as error:
        raise InvalidRequest("FILE", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("FILE", f"{path} is not UTF-8 at byte {error.start}") from error
