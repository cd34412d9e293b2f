"""Token arrays for training: conversations packed into short rows, library text cut into long ones.

A chat row holds several whole conversations; `segments` numbers them so that none sees another, and only the
assistant's words are targets. A text row is a window of all documents joined. It knows tokens and nothing of the
model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from phrasing import Conversations, Message
from tokenizers import Tokenizer

IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """`ids`, `targets` (next token or IGNORED) and `segments` are (rows, length); segment 0 is padding."""

    ids: NDArray[np.int16]
    targets: NDArray[np.int16]
    segments: NDArray[np.int16]


def render_prompt(question: str) -> str:
    """The chat template's text for one user message, without the beginning-of-text token that encoding adds."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def pack_conversations(corpus: Path, tokenizer: Tokenizer, count: int, length: int, seed: int) -> Rows:
    """Draws `count` conversations and packs them whole into rows of `length` tokens."""
    entries = [json.loads(line) for line in (corpus / "entries.jsonl").open(encoding="utf-8")]
    source = Conversations(entries, json.loads((corpus / "contents.json").read_text()), seed)
    drawn = [source.draw() for _ in range(count)]
    texts = sorted({text for messages in drawn for text in _pieces(messages)})
    encoded = {
        text: np.array(e.ids, np.int16)
        for text, e in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True)
    }
    bos = np.array([tokenizer.token_to_id("<|begin_of_text|>")], np.int16)
    rows: list[tuple[list[NDArray[np.int16]], list[NDArray[np.int16]]]] = []
    open_rows: list[tuple[int, list[NDArray[np.int16]], list[NDArray[np.int16]]]] = []
    for messages in drawn:
        ids, targets = _encode(messages, encoded, bos)
        if len(ids) > length:
            continue
        place = next((i for i, (used, _, _) in enumerate(open_rows) if used + len(ids) <= length), None)
        if place is None:
            if len(open_rows) == 8:  # first fit over a few open rows: little padding, and no search over all of them
                fullest = max(range(8), key=lambda i: open_rows[i][0])
                rows.append(open_rows.pop(fullest)[1:])
            open_rows.append((0, [], []))
            place = len(open_rows) - 1
        used, row_ids, row_targets = open_rows[place]
        row_ids.append(ids)
        row_targets.append(targets)
        open_rows[place] = (used + len(ids), row_ids, row_targets)
    rows += [row[1:] for row in open_rows]
    return _stack(rows, length)


def _pieces(messages: Iterable[Message]) -> Iterable[str]:
    for role, text in messages:
        if role == "assistant":
            yield from (f"<|im_start|>{role}\n", f"{text}<|im_end|>", "\n")
        else:
            yield f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _encode(
    messages: Sequence[Message], encoded: dict[str, NDArray[np.int16]], bos: NDArray[np.int16]
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    parts, learnt = [bos], [np.zeros(1, bool)]
    for text in _pieces(messages):
        ids = encoded[text]
        parts.append(ids)
        learnt.append(np.full(len(ids), text.endswith("<|im_end|>")))
    ids = np.concatenate(parts)
    is_target = np.concatenate(learnt)
    targets = np.full(len(ids), IGNORED, np.int16)
    targets[:-1][is_target[1:]] = ids[1:][is_target[1:]]
    return ids, targets


def _stack(rows: Sequence[tuple[list[NDArray[np.int16]], list[NDArray[np.int16]]]], length: int) -> Rows:
    shape = (len(rows), length)
    ids, targets, segments = (
        np.zeros(shape, np.int16),
        np.full(shape, IGNORED, np.int16),
        np.zeros(shape, np.int16),
    )
    for index, (row_ids, row_targets) in enumerate(rows):
        start = 0
        for number, (piece, target) in enumerate(zip(row_ids, row_targets, strict=True), 1):
            stop = start + len(piece)
            ids[index, start:stop], targets[index, start:stop] = piece, target
            segments[index, start:stop] = number
            start = stop
    return Rows(ids, targets, segments)


def join_documents(corpus: Path, tokenizer: Tokenizer, seed: int) -> NDArray[np.int16]:
    """All documents as one run of tokens in a shuffled order, each between begin and end tokens."""
    texts = [json.loads(line)["text"] for line in (corpus / "documents.jsonl").open(encoding="utf-8")]
    random.Random(seed).shuffle(texts)
    end = np.array([tokenizer.token_to_id("<|im_end|>")], np.int16)
    parts = []
    for encoding in tokenizer.encode_batch(texts):
        parts += [np.array(encoding.ids, np.int16), end]
    return np.concatenate(parts)
