"""Filling in the middle: prompts made of the texts before and after a gap, for vocabularies with tokens for it.

Each row of FAMILIES is one family's spelling from its published vocabulary; the order is that of the models' training
data, prefix first. Other files come before the gap, each behind the family's separator and its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.service.requests import TextRequest
from mlxr.tokenizers import Tokenizer

PROJECT = "project\n"  # the repository's name, for vocabularies with a token for it
PREFIX_SHARE = 3 / 4  # of the room, if the texts around the gap do not fit


@frozen
class Spelling:
    """The tokens around a gap in one model family; those in `others` end an answer, as `file` does."""

    prefix: str
    suffix: str
    middle: str
    file: str | None = None
    project: str | None = None
    others: tuple[str, ...] = ()


FAMILIES: tuple[Spelling, ...] = (
    # Qwen 2.5 and 3
    Spelling("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>", ("<|fim_pad|>",)),
    Spelling("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),  # CodeGemma
    Spelling("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>", ("<fim_pad>",)),  # StarCoder2
    Spelling("<fim_prefix>", "<fim_suffix>", "<fim_middle>", others=("<fim_pad>",)),  # StarCoder, SmolLM
    Spelling("<fim-prefix>", "<fim-suffix>", "<fim-middle>", others=("<fim-pad>",)),  # SantaCoder
    Spelling("▁<PRE>", "▁<SUF>", "▁<MID>", others=("▁<EOT>",)),  # Code Llama
    Spelling("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


@frozen
class Snippet:
    """A file, or a part of one, that may help to fill the gap."""

    text: str
    filename: str


@frozen
class InfillTokens:
    """Ids of the tokens that open prefix, suffix, middle, another file and the project; `ends` end an answer."""

    prefix: int
    suffix: int
    middle: int
    file: int | None
    project: int | None
    ends: frozenset[int]


def find_infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Return the tokens of the first family that the vocabulary has in full, or else of the first with the three around
    the gap; None if there is none.
    """
    found = [tokens for tokens in (_find_family(tokenizer, family) for family in FAMILIES) if tokens is not None]
    return max(found, key=lambda tokens: tokens.file is not None, default=None)


def require_infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """Return `find_infill_tokens`; raises InvalidRequest naming `suffix` if the vocabulary has none."""
    tokens = find_infill_tokens(tokenizer)
    if tokens is None:
        raise InvalidRequest("suffix", "is not supported by this model: its vocabulary has no infill tokens")
    return tokens


def encode_infill(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    suffix: str,
    extra: Sequence[Snippet] = (),
    *,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the ids of a prompt whose continuation leads from `prompt` to `suffix`; control tokens are plain text.

    If it has more than `max_tokens`, `extra` loses its first files, the prompt its beginning and the suffix its end.
    Raises InvalidRequest naming `suffix` if the vocabulary has no infill tokens.
    """
    tokens = require_infill_tokens(tokenizer)
    before = tokenizer.encode(prompt, add_special=False) if isinstance(prompt, str) else list(prompt)
    after = tokenizer.encode(suffix, add_special=False)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    room = None if max_tokens is None else max(max_tokens - len(start) - 3, 2)
    if room is not None:
        before, after = _cut(before, after, room)
        room -= len(before) + len(after)
    context = _encode_files(tokenizer, tokens, extra, room) if extra else []
    return [*start, *context, tokens.prefix, *before, tokens.suffix, *after, tokens.middle]


def make_infill(tokenizer: Tokenizer, request: TextRequest, suffix: str) -> TextRequest:
    """Return the request with a prompt for the gap between its prompt and `suffix`; raises as `encode_infill` does."""
    ends = require_infill_tokens(tokenizer).ends
    params = replace(request.params, stop_token_ids=request.params.stop_token_ids | ends)
    return replace(request, prompt=encode_infill(tokenizer, request.prompt, suffix), params=params)


def _find_family(tokenizer: Tokenizer, family: Spelling) -> InfillTokens | None:
    prefix, suffix, middle = map(tokenizer.token_id, (family.prefix, family.suffix, family.middle))
    if prefix is None or suffix is None or middle is None:
        return None
    file = None if family.file is None else tokenizer.token_id(family.file)
    project = None if family.project is None else tokenizer.token_id(family.project)
    others = (*map(tokenizer.token_id, family.others), file, project, prefix, suffix, middle)
    return InfillTokens(prefix, suffix, middle, file, project, frozenset(one for one in others if one is not None))


def _cut(before: list[int], after: list[int], room: int) -> tuple[list[int], list[int]]:
    """Return the end of `before` and the start of `after`, together at most `room` tokens."""
    most_after = max(room - len(before), room - int(room * PREFIX_SHARE))
    after = after[:most_after]
    return before[max(len(before) - (room - len(after)), 0) :], after


def _encode_files(tokenizer: Tokenizer, tokens: InfillTokens, extra: Sequence[Snippet], room: int | None) -> list[int]:
    """Return the last of the files that fit into `room` tokens, and the opening of the file with the gap."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    start = [] if tokens.project is None else [tokens.project, *encode(PROJECT)]
    end = [] if tokens.file is None else [tokens.file, *encode("file\n")]
    left = None if room is None else room - len(start) - len(end)
    kept: list[list[int]] = []
    for snippet in reversed(extra):
        head = encode("\n\n") if tokens.file is None else [tokens.file, *encode(f"{snippet.filename}\n")]
        file = [*head, *encode(snippet.text)]
        if left is not None:
            if len(file) > left:
                break
            left -= len(file)
        kept.append(file)
    return [*start, *(token for file in reversed(kept) for token in file), *end] if kept else []
