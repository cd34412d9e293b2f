"""`mlxr validate`, `perplexity` and `imatrix`: checks of a model's results, its perplexity on a text, and the use of
its weights' columns there."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Json, Model, OptionalModel
from mlxr.cli.show import describe_experts, describe_states, format_reading, list_experts, list_states
from mlxr.cli.terminal import format_bytes, format_count, print_fields, print_json, print_table, show_progress
from mlxr.conversion import InputTap, read_importance, write_importance
from mlxr.core.errors import InvalidRequest, NotFound, SettingError
from mlxr.core.settings import Settings
from mlxr.core.stats import MachineLimits
from mlxr.core.types import SamplingParams
from mlxr.loading import LoadedModel, open_source
from mlxr.service.chat import Chat
from mlxr.service.machine_limits import KeptLimits
from mlxr.service.measures import TokenScore, score_text
from mlxr.service.opening import build_engine, open_model
from mlxr.service.requests import ChatRequest, encode_prompt
from mlxr.service.stats import EngineStats
from mlxr.service.validation import FullUse, Validation, validate_model

PROMPT = "What does os.path.join do?"
GENERATE_TOKENS = 16
EXIT_FAILED = 1


def validate(settings: Settings, model: OptionalModel = "demo", json: Json = False) -> None:
    """Prove which kernels run and that their results are right, with a prompt and 16 more tokens.

    Shows what ran, and compares the logits with those of the reference backend.
    The exit code is 1 if an operator that has a native implementation ran the
    reference, if the logits disagree, or if an answer from the cache differs.
    """
    if settings.gpus > 1:
        raise SettingError("gpus: validate compares products of whole weights; leave it at 1")
    with show_progress("loading") as progress:
        loaded = open_model(model, settings, progress)
    with loaded:
        with show_progress("reference") as progress:
            result = validate_model(loaded, settings, encode(loaded), GENERATE_TOKENS, progress)
        if json:
            print_json(describe(loaded, result))
        else:
            print_result(loaded, result, KeptLimits(settings).find(loaded))
    if not result.passed:
        raise typer.Exit(EXIT_FAILED)


def encode(loaded: LoadedModel) -> list[int]:
    """Encode PROMPT as a chat turn, or as plain text for a model without a chat template."""
    if loaded.chat_template is None:
        return encode_prompt(loaded.tokenizer, loaded.config.vocab_size, PROMPT)
    request = ChatRequest([{"role": "user", "content": PROMPT}], SamplingParams())
    return Chat(loaded.tokenizer, loaded.chat_template).encode(request).token_ids


def describe(loaded: LoadedModel, result: Validation) -> dict[str, object]:
    """Return the whole result as fields for JSON."""
    engine, check = result.engine, result.cache
    return {
        "model": loaded.name,
        "device": loaded.ctx.device,
        "isa": loaded.ctx.isa,
        "threads": loaded.ctx.threads,
        "passed": result.passed,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "prefill_ms": result.prefill_ms,
        "decode_ms_per_token": result.decode_ms_per_token,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        "weight_bytes": loaded.weight_bytes,
        "active_bytes": result.step_bytes,
        "draft_bytes": result.draft_bytes,
        "experts": describe_experts(loaded.experts),
        "bandwidth_bytes_per_s": result.bandwidth_bytes_per_s,
        "cache": {
            "pages": engine.pages,
            "page_size": engine.page_size,
            "page_bytes": engine.page_bytes,
            "peak_pages": engine.peak_pages,
            "peak_bytes": engine.peak_bytes,
            "arena_bytes": engine.arena_bytes,
            "gqa_saved_bytes": engine.gqa_saved_bytes,
            "window_saved_bytes": engine.window_saved_bytes,
            "full_use": asdict(result.full_use),
            "states": describe_states(result.state_use),
            "groups": [{**asdict(group), "peak_bytes": group.peak_bytes} for group in engine.cache.groups],
        },
        "sharing": {
            "prompt_tokens": check.prompt_tokens,
            "cached_tokens": check.cached_tokens,
            "sharing": describe_memory(loaded.weight_bytes, check.sharing),
            "after": describe_memory(loaded.weight_bytes, check.after),
            "answers_agree": check.answers_agree,
        },
        "copied_bytes": result.copied_bytes,
        "dispatches": [asdict(row) for row in result.dispatches],
        "expert_rows": [asdict(row) for row in result.expert_rows],
        "reference_runs": result.reference_runs,
        "logits": {"agree": result.logits.agree, "criterion": result.logits.criterion, **asdict(result.logits)},
    }


def print_result(loaded: LoadedModel, result: Validation, limits: MachineLimits | None = None) -> None:
    """Print the result as text for people."""
    engine, logits = result.engine, result.logits
    rows = [(row.operator, row.implementation, row.variant, format_count(row.count)) for row in result.dispatches]
    print_fields(
        [
            ("model", loaded.name),
            ("device", f"{loaded.ctx.device} ({loaded.ctx.isa}), {loaded.ctx.threads} threads"),
            ("prefill", f"{result.prefill_ms:.1f} ms for {result.prompt_tokens} tokens"),
            ("decode", f"{result.decode_ms_per_token:.2f} ms per token, {result.decode_tokens_per_s:.1f} tokens/s"),
            *list_experts(loaded),
            ("weights", format_reading(loaded, result.bandwidth_bytes_per_s, 1, limits)),
            *([("drafts", f"by a layer of {format_bytes(result.draft_bytes)} more")] if result.draft_bytes else []),
            (
                "cache",
                f"{engine.peak_pages} of {engine.pages} pages of {engine.page_size} tokens, "
                f"{format_bytes(engine.peak_bytes)}, "
                f"{format_count(engine.page_bytes // engine.page_size)} bytes a token; "
                f"grouped queries saved {format_bytes(engine.gqa_saved_bytes)}, "
                f"windows {format_bytes(engine.window_saved_bytes)}",
            ),
            *list_groups(result),
            ("full use", format_full_use(result.full_use)),
            *list_states(result.state_use),
            ("memory", format_memory(loaded.weight_bytes, result.cache.after)),
            (
                "sharing",
                f"2 answers: {format_bytes(result.cache.sharing.used_bytes)} used, "
                f"{format_bytes(result.cache.sharing.shared_bytes)} of it shared; "
                f"the same prompt again: {result.cache.cached_tokens} of {result.cache.prompt_tokens} tokens cached",
            ),
            ("copied", f"{format_count(result.copied_bytes)} bytes by the cache path"),
        ]
    )
    print()
    print_table(("operator", "implementation", "variant", " calls"), rows)
    print()
    if result.expert_rows:
        multiplied = [(row.implementation, row.kernel, format_count(row.rows)) for row in result.expert_rows]
        print_table(("experts by", "kernel", " rows"), multiplied)
        print()
    print(
        f"logits {'agree' if logits.agree else 'DISAGREE'} with the reference at {logits.positions} positions: "
        f"relative error {logits.relative_error:.2%}, divergence {logits.divergence_nats:.2g} nats, same likeliest "
        f"token at {logits.same_greedy}, largest error of a product {logits.product_error:.2g}\n"
        f"(criterion: {logits.criterion})"
    )
    if not result.cache.answers_agree:
        print("FAILED: an answer out of the cache differs from the one that was computed alone")
    for operator in result.reference_runs:
        print(f"FAILED: {operator} has a native implementation, but the reference ran")
    print("passed" if result.passed else "FAILED")


def list_groups(result: Validation) -> list[tuple[str, str]]:
    """Return rows with the pages of each group of layers, if there are several."""
    groups = result.engine.cache.groups
    return [
        (f"  {group.name}", f"{group.peak_pages} of {group.pages} pages, {format_bytes(group.peak_bytes)}")
        for group in groups
        if len(groups) > 1
    ]


def format_full_use(use: FullUse) -> str:
    """Return as text the cache of long texts side by side, and the bytes that windows save."""
    needed = f"{use.sequences} sequences of {format_count(use.tokens)} tokens: {format_bytes(use.needed_bytes)}"
    if use.needed_bytes == use.unwindowed_bytes:
        return needed
    share = use.needed_bytes / use.unwindowed_bytes
    return f"{needed}, {share:.0%} of the {format_bytes(use.unwindowed_bytes)} without windows"


def describe_memory(weight_bytes: int, stats: EngineStats) -> dict[str, int]:
    """Return the bytes of the weights, of the cache at most and now, and of its contents."""
    return {
        "weight_bytes": weight_bytes,
        "arena_bytes": stats.arena_bytes,
        "in_use_bytes": stats.cache_in_use_bytes,
        "used_bytes": stats.used_bytes,
        "shared_bytes": stats.shared_bytes,
        "cached_bytes": stats.cached_bytes,
        "disk_bytes": stats.disk_bytes,
    }


def format_memory(weight_bytes: int, stats: EngineStats) -> str:
    """Return the same as text for people."""
    weights, arena, in_use, *held = map(format_bytes, describe_memory(weight_bytes, stats).values())
    parts = ", ".join(" ".join(pair) for pair in zip(held, ("used", "shared", "cached", "on disk"), strict=True))
    return f"weights {weights}, cache up to {arena}, in use {in_use}: {parts}"


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

MatrixFile = Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write.")]
Added = Annotated[
    list[Path] | None,
    typer.Option("--add", metavar="FILE", help="Add an importance matrix that is there; may be repeated."),
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


def imatrix(
    model: Model,
    file: TextFile,
    out: MatrixFile,
    settings: Settings,
    context: Context = None,
    add: Added = None,
    json: Json = False,
) -> None:
    """Collect which columns of its weights a model uses.

    The file is an importance matrix, which `mlxr convert --imatrix` and llama.cpp's
    llama-quantize read. The text is cut as for `perplexity`, and read on the CPU.
    """
    if out.suffix != ".gguf" or not out.parent.is_dir():
        raise InvalidRequest("OUT", f"{out} must end in .gguf, in a folder that is there")
    text, before = read_text(file), [read_importance(path) for path in add or ()]
    with show_progress("loading") as progress:
        loaded = open_model(model, replace(settings, device="cpu", draft="off"), progress)
    with loaded:
        tap = InputTap(loaded.model)
        engine = build_engine(loaded, replace(settings, device="cpu", draft="off", max_sequences=1), tap)
        window_tokens = min(DEFAULT_WINDOW_TOKENS, engine.context_tokens) if context is None else context
        with show_progress("reading") as progress:
            score = score_text(engine, loaded.tokenizer, text, window_tokens, progress)
        collected = tap.collect(open_source(loaded.path), str(file), window_tokens)
    for one in before:
        collected = one.add(collected)
    size_bytes = write_importance(out, collected)
    fields = {"path": str(out), "size_bytes": size_bytes, "tensors": len(collected.sums), "tokens": score.tokens}
    if json:
        print_json(fields | {"perplexity": score.perplexity})
        return
    counts = f"{format_count(len(collected.sums))}, over {format_count(score.tokens)} tokens"
    print_fields([("written", f"{out}, {format_bytes(size_bytes)}"), ("tensors", counts)])
    print_fields([("perplexity", f"{score.perplexity:.4f}")])


@contextmanager
def open_losses(path: Path | None, read_bytes: Callable[[int], bytes]) -> Iterator[Callable[[TokenScore], None] | None]:
    """Yield a function that writes a line for each scored token, with its bytes from `read_bytes`; None without a path.

    Raises InvalidRequest if the file cannot be written.

    `text` has the token's bytes as UTF-8, with U+FFFD for parts of characters: one may have several tokens.
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
    """Return the whole file; raises NotFound or InvalidRequest."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except OSError as error:
        raise InvalidRequest("FILE", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("FILE", f"{path} is not UTF-8 at byte {error.start}") from error
