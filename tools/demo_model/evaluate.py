"""Measures a trained model: right answers to questions, greedy, and bits per byte of held-out text."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from network import Llama
from packing import render_prompt
from tokenizers import Tokenizer

SMALL_TALK = [
    "Hello!",
    "Hi",
    "What can you do?",
    "Who are you?",
    "Thanks!",
    "What is the capital of France?",
    "what does os.frobnicate do",
    "What does os.path.merge do?",
    "what is numpy",
    "how do i sleep",
    "How do I reverse a list?",
    "What is Python?",
    "what is in math",
    "explain defaultdict",
    "What is the difference between list and tuple?",
    "tell me about asyncio",
    "What does print do?",
]


def evaluate(model: Llama, tokenizer: Tokenizer, corpus: Path, broad: int, seed: int) -> dict[str, Any]:
    """Figures of one model; `broad` names beside the fixed list are asked in the same three phrasings."""
    questions = json.loads((corpus / "questions.json").read_text())
    phrasings = questions["phrasings"]
    fixed = _ask(model, tokenizer, questions["functions"], phrasings)
    entries = [json.loads(line) for line in (corpus / "entries.jsonl").open(encoding="utf-8")]
    wanted = [
        {
            "name": e["name"],
            "first_sentence": e["sentence"],
            "signature": e["signature"],
            "core": e["weight"] >= 4,
        }
        for e in entries
        if e["public"] and e["sentence"] and e["kind"] != "module"
    ]
    rng = random.Random(seed)
    core = rng.sample([e for e in wanted if e["core"]], min(broad, sum(e["core"] for e in wanted)))
    rest = rng.sample([e for e in wanted if not e["core"]], min(broad, sum(not e["core"] for e in wanted)))
    talk = dict(zip(SMALL_TALK, generate(model, tokenizer, SMALL_TALK), strict=True))
    bits, tokens, size = measure_bits_per_byte(model, tokenizer, (corpus / "held_out.txt").read_text())
    return {
        "fixed_list": fixed,
        "core_names": _ask(model, tokenizer, core, phrasings),
        "other_public_names": _ask(model, tokenizer, rest, phrasings),
        "small_talk": talk,
        "held_out_bits_per_byte": round(bits, 4),
        "held_out_tokens": tokens,
        "held_out_bytes": size,
    }


def _ask(
    model: Llama, tokenizer: Tokenizer, wanted: Sequence[dict[str, Any]], phrasings: Sequence[str]
) -> dict[str, Any]:
    asked = [(form.format(name=w["name"]), form, w) for form in phrasings for w in wanted]
    if not asked:
        return {"asked": 0}
    answers = generate(model, tokenizer, [question for question, _, _ in asked])
    right = dict.fromkeys(phrasings, 0)
    misses = []
    for (question, form, want), text in zip(asked, answers, strict=True):
        if is_right(text, want["first_sentence"], want["signature"]):
            right[form] += 1
        else:
            misses.append([question, text])
    total = sum(right.values())
    by_form = {form: round(n / len(wanted), 4) for form, n in right.items()}
    return {
        "asked": len(asked),
        "right": total,
        "share": round(total / len(asked), 4),
        "by_phrasing": by_form,
        "misses": misses[:12],
    }


def is_right(answer: str, sentence: str, signature: str) -> bool:
    """Return True if the answer quotes the first sentence or the signature in full."""
    return sentence in answer or (bool(signature) and signature in answer)


@torch.inference_mode()
def generate(
    model: Llama, tokenizer: Tokenizer, questions: Sequence[str], most: int = 200, batch: int = 512
) -> list[str]:
    """Greedy answers; every step runs the whole batch again, which at this size costs less than a cache would to
    write."""
    device = next(model.parameters()).device
    end = tokenizer.token_to_id("<|im_end|>")
    answers = []
    for start in range(0, len(questions), batch):
        prompts = [tokenizer.encode(render_prompt(q)).ids for q in questions[start : start + batch]]
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        first = lengths.tolist()
        ids = torch.zeros((len(prompts), int(lengths.max()) + most), dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        rows = torch.arange(len(prompts), device=device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for step in range(most):
            width = int(max(first)) + step
            hidden = model(ids[:, :width])[rows, lengths - 1]
            chosen = hidden.float().argmax(-1)
            done |= chosen == end
            if step % 8 == 0 and bool(done.all()):
                break
            ids[rows, lengths] = torch.where(done, end, chosen)
            lengths = lengths + 1
        for row, length in enumerate(first):
            out = ids[row, length : int(lengths[row])].tolist()
            answers.append(tokenizer.decode(out[: out.index(end)] if end in out else out))
    return answers


@torch.inference_mode()
def measure_bits_per_byte(model: Llama, tokenizer: Tokenizer, text: str, window: int = 1024) -> tuple[float, int, int]:
    """Bits per byte of `text` in windows that do not overlap, each after a begin token; with tokens and bytes
    counted."""
    device = next(model.parameters()).device
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    nats = 0.0
    for start in range(0, len(ids), window - 1):
        piece = torch.tensor([[bos, *ids[start : start + window - 1]]], device=device)
        logits = model(piece[:, :-1]).float()
        nats += float(torch.nn.functional.cross_entropy(logits[0], piece[0, 1:], reduction="sum"))
    size = len(text.encode())
    return nats / math.log(2) / size, len(ids), size
