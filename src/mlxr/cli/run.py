"""`mlxr run`: one prompt, one answer, streamed, or with a model alone, a chat; `mlxr embed`: vectors of texts."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.chat import chat
from mlxr.cli.flags import (
    Json,
    Sampling,
    System,
    SystemFile,
    make_sampling,
    read_system,
    read_text,
)
from mlxr.cli.remote import (
    Answerer,
    AnswerStream,
    RemoteModel,
    Url,
    ask_parameters,
    find_here,
    find_own_key,
    name_default,
    open_model,
)
from mlxr.cli.terminal import make_renderer, print_json, print_note, write_piece, write_thought
from mlxr.core.errors import InvalidRequest, MlxrError, NotFound, RegistryError
from mlxr.core.settings import Settings
from mlxr.core.types import Finish, FinishReason, ReasoningDelta, SamplingParams, TextDelta
from mlxr.loading import find_model, read_sampling
from mlxr.registry import ModelRecord, library
from mlxr.registry.record import ModelName
from mlxr.service.catalogue import open_registry, recommend
from mlxr.service.opening import find_record, note_use
from mlxr.service.sight import make_part, read_picture
from mlxr.service.streams import Completion, fold_events

PICTURE_NAME = re.compile(r"[^\n]{1,1000}\.(jpe?g|png|webp|gif|bmp|avif|wav|mp3|flac|ogg)", re.ASCII | re.IGNORECASE)
PLAIN_TOKENS = 256  # of a plain text, which has no natural end, unless --max-tokens says otherwise
SILENT_S = 2.0  # after which a note says that the command waits for stdin

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [PROMPT] [PICTURE]...",
        help="The model (default: your own that was used last, else demo) and the prompt; '-' reads the prompt from "
        "stdin. What comes through a pipe beside a prompt is added to it. Files of pictures and sounds go with it.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")]
AdapterPath = Annotated[
    Path | None, typer.Option("--adapter", help="A low-rank adapter (LoRA) for it: a PEFT folder or a GGUF file.")
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="A file that is the prompt, or is added to it; may be given several times."
    ),
]
ShowStats = Annotated[bool, typer.Option("--stats", help="Print timings on stderr.")]


def run(
    settings: Settings,
    sampling: Sampling,
    words: Words = None,
    file: PromptFiles = None,
    raw: Raw = False,
    system: System = None,
    system_file: SystemFile = None,
    stats: ShowStats = False,
    json: Json = False,
    url: Url = None,
    adapter: AdapterPath = None,
) -> None:
    """Answer one prompt, or chat. Without a prompt the model answers what comes through a pipe; on a terminal it chats.

    A prompt is a turn of a chat if the model has a chat template. Otherwise, and
    with --raw, it is plain text.
    """
    words, pictures = split_pictures(words or [])
    model, prompt = split_words(words, lambda word: names_model(word, settings, url))
    if pictures and prompt is None and sys.stdin.isatty():
        raise InvalidRequest("PICTURE", "needs a prompt, and a chat has none")
    if adapter is not None and url is not None:
        raise InvalidRequest("--adapter", "is for a model that is loaded here; a server has its own adapters")
    system = read_system(system, system_file)
    texts = [read_text(path, "--file") for path in file or []]
    if prompt is None and texts:
        prompt = "\n\n".join(texts)
        texts = []
    if prompt is None and sys.stdin.isatty():
        refuse_flags({"--adapter": adapter is not None, "--raw": raw, "--stats": stats, "--json": json})
        chat(settings, sampling, model, system, url=url)
        return
    prompt = "\n\n".join([read_prompt(prompt, is_raw=raw), *texts])
    record, named = None, None
    if url is None:
        model = model or name_default(settings)
        base, named = find_here(model, settings)
        model, record = str(base), find_record(base, settings)
        if record is not None:
            note_use(record, settings)
    params = make_sampling(find_parameters(model, record, settings, url), sampling)
    opening = () if record is None else record.messages
    needs_template = system is not None and not raw
    with open_model(model, settings, url, needs_chat_template=needs_template, adapter=adapter or named) as answerer:
        if not (raw or answerer.can_chat) and "max_tokens" not in sampling and params.max_tokens is None:
            params = replace(params, max_tokens=PLAIN_TOKENS)
            text = f"(no chat template: the text goes on, by {PLAIN_TOKENS} tokens at most; see --raw, --max-tokens)"
            print_note(text)
        stream = start_answer(answerer, prompt, params, raw=raw, system=system, opening=opening, pictures=pictures)
        with stream:
            completion, timing = follow(stream, quiet=json, is_plain=raw or not answerer.can_chat)
            if completion.finish_reason is FinishReason.ERROR:
                raise MlxrError(completion.error or "the answer failed")
            if json:
                print_json({"model": model or url, **describe(completion), **timing})
            if stats:
                print_note(format_stats(completion, timing))


def find_parameters(
    model: str | None, record: ModelRecord | None, settings: Settings, url: str | None
) -> Mapping[str, object]:
    """Return the sampling parameters of a model, under Ollama's names: those of its record, or of its files."""
    if url is not None:
        return ask_parameters(settings, url, model)
    path = model or name_default(settings)
    if record is not None:
        return {**recommend(record.path), **record.parameters}
    return {**recommend(find_model(path)), **read_sampling(path)}


def split_pictures(words: list[str]) -> tuple[list[str], list[str]]:
    """Split words into other words and names of pictures or sounds, by their ending; the first word is never one."""
    named = [word for word in words[1:] if PICTURE_NAME.fullmatch(word)]
    return [word for word in words if word not in named], named


def split_words(words: list[str], is_model: Callable[[str], bool]) -> tuple[str | None, str | None]:
    """Split the words into model and prompt, None for a missing one; raises InvalidRequest for too many words.

    `is_model` returns True if a word alone is a model.
    """
    if len(words) > 2:
        raise InvalidRequest("PROMPT", f"got {len(words)} words; put the prompt in quotes")
    if not words:
        return None, None
    if len(words) == 2:
        return words[0], words[1]
    return (words[0], None) if is_model(words[0]) else (None, words[0])


def names_model(word: str, settings: Settings, url: str | None) -> bool:
    """Return True if a word alone names a model, of the server or on this machine, and is no prompt.

    A name with a tag, such as llama3:8b, always counts as a model, so that an unknown one is an error and no other
    model answers.
    """
    try:
        name = ModelName.parse(word)
    except InvalidRequest:
        return url is None and names_path(word)
    if url is not None:
        with RemoteModel(url, None, find_own_key(settings)) as server:
            return str(name).lower() in {str(ModelName.parse(known)).lower() for known in server.list_names()}
    return ":" in word or names_path(word) or is_installed(word, settings) or library.find(word) is not None


def is_installed(name: str, settings: Settings) -> bool:
    """Return True if the catalogue has a model of that name, even a broken one."""
    try:
        open_registry(settings).get(name)
    except (NotFound, InvalidRequest):
        return False
    except RegistryError:
        return True
    return True


def names_path(word: str) -> bool:
    """Return True if a word is the folder of a model, or a name ending in .gguf."""
    path = Path(word)
    try:
        is_file, is_folder = path.is_file(), (path / "config.json").is_file()
    except (OSError, ValueError):  # longer than any path, or with a zero byte: a prompt
        return False
    return is_folder or (path.suffix == ".gguf" and (is_file or len(word.split()) == 1))


def refuse_flags(given: Mapping[str, bool]) -> None:
    """Raise InvalidRequest for the first given flag, as it needs a prompt."""
    for flag, is_given in given.items():
        if is_given:
            raise InvalidRequest(flag, "needs a prompt, and a chat has none")


def read_prompt(prompt: str | None, *, is_raw: bool) -> str:
    """Return the prompt; None and '-' stand for stdin. A line break at the end of stdin counts only with --raw.

    Text from a pipe or a file on stdin is added to a given prompt, after a blank line.

    Raises InvalidRequest for bytes that are not UTF-8, and for an empty stdin without a prompt.
    """
    try:
        if prompt is None or prompt == "-":
            text = sys.stdin.buffer.read().decode()
            if not text and prompt is None:
                raise InvalidRequest("PROMPT", "is missing: none was given, and stdin is empty")
            return _check_words(text if is_raw else text.removesuffix("\n"), is_raw)
        prompt.encode()  # arguments that are no UTF-8 arrive as lone surrogates
        beside = read_beside().decode()
    except UnicodeError as error:
        raise InvalidRequest("PROMPT", "is not UTF-8") from error
    if beside.strip():
        beside = beside if is_raw else beside.removesuffix("\n")
        return f"{prompt}\n\n{beside}" if prompt.strip() else beside
    return _check_words(prompt, is_raw)


def _check_words(prompt: str, is_raw: bool) -> str:
    """Return the prompt; raises InvalidRequest for a blank question. With --raw, white space is text to continue."""
    if not (is_raw or prompt.strip()):
        raise InvalidRequest("PROMPT", "is blank; write a question, or leave the prompt out to chat")
    return prompt


def read_beside() -> bytes:
    """Return everything on stdin if that is a pipe or a file; nothing from a terminal or /dev/null.

    If a pipe stays open without data, a note on stderr says that the command waits for it.
    """
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # closed, or no file of the system
        return b""
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    if not select.select([descriptor], [], [], SILENT_S)[0]:
        print_note("(reading stdin, which is added to the prompt; `< /dev/null` adds nothing)")
    return sys.stdin.buffer.read()


def start_answer(
    llm: Answerer,
    prompt: str,
    sampling: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    opening: Sequence[Mapping[str, str]],
    pictures: Sequence[str] = (),
) -> AnswerStream:
    """Start the answer, through the chat template if there is one; `opening` are the messages before the prompt, and
    `pictures` the files that go with it."""
    if raw or not llm.can_chat:
        if pictures:
            reason = "--raw was given" if raw else "this model has no chat template"
            raise InvalidRequest("PICTURE", f"needs a chat, and {reason}")
        if system is not None:
            reason = "--raw was given" if raw else "this model has no chat template"
            raise InvalidRequest("--system", f"needs a chat, and {reason}")
        return llm.stream(prompt, sampling)
    turns: list[Mapping[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    parts = [make_part(read_picture(path, "PICTURE")) for path in pictures]
    content: object = [*parts, {"type": "text", "text": prompt}] if parts else prompt
    return llm.stream_chat([*turns, *opening, {"role": "user", "content": content}], sampling)


def follow(stream: AnswerStream, *, quiet: bool, is_plain: bool = False) -> tuple[Completion, dict[str, float]]:
    """Print the answer as it grows (unless `quiet`) and time it. On a terminal it is Markdown, unless it `is_plain`."""
    renderer = None if is_plain else make_renderer()
    start_s = time.perf_counter()
    first_s: float | None = None
    events = []
    for event in stream:
        if first_s is None:
            first_s = time.perf_counter()
        if isinstance(event, TextDelta) and not quiet:
            write_piece(event.text if renderer is None else renderer.push(event.text))
        if isinstance(event, ReasoningDelta) and not quiet:
            write_thought(event.text)
        if isinstance(event, Finish) and not quiet:
            write_piece("\n" if renderer is None else renderer.push("", is_last=True) + "\n")
        events.append(event)
    end_s = time.perf_counter()
    first_s = first_s or end_s
    completion = fold_events(events)
    later_tokens = max(completion.usage.completion_tokens - 1, 1)
    return completion, {
        "first_text_ms": 1000 * (first_s - start_s),
        "total_ms": 1000 * (end_s - start_s),
        "ms_per_later_token": 1000 * (end_s - first_s) / later_tokens,
    }


def describe(completion: Completion) -> dict[str, object]:
    """Return the answer as JSON fields."""
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "stop": completion.stop,
        "usage": asdict(completion.usage),
    }


def format_stats(completion: Completion, timing: dict[str, float]) -> str:
    """Return one line of numbers."""
    usage = completion.usage
    thoughts = f" ({usage.reasoning_tokens} of them thoughts)" if usage.reasoning_tokens else ""
    return (
        f"{usage.prompt_tokens} prompt tokens, first text after {timing['first_text_ms']:.0f} ms; "
        f"{usage.completion_tokens} tokens{thoughts} in {timing['total_ms']:.0f} ms, "
        f"{timing['ms_per_later_token']:.2f} ms each after the first; ended by {completion.finish_reason.value}"
    )
