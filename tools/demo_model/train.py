"""Trains the demo models on one GPU within a budget of seconds, measures them and exports Hugging Face folders.

Each step learns from a batch of chat rows (answers only) and a batch of library text. Matrices inside the layers are
trained with Muon (momentum whose update is orthogonalised by a Newton-Schulz iteration,
https://kellerjordan.github.io/posts/muon/), embeddings and norms with AdamW. The learning rate follows elapsed time,
so a run ends when its budget does.

    python tools/demo_model/train.py --corpus FOLDER --tokenizer FOLDER --out FOLDER --models main:110:12 draft:60:16
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import evaluate, measure_bits_per_byte
from export import export_folder
from network import SHAPES, Llama
from numpy.typing import NDArray
from packing import Rows, join_documents, pack_conversations
from tokenizers import Tokenizer
from torch import Tensor

CHAT_LENGTH = 512
TEXT_LENGTH = 2048
FOLDERS = {"main": "demo", "draft": "demo-draft", "tiny": "tiny"}  # a converted file is named after its folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; prints one line of JSON per report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["main:110:12", "draft:60:16"],
        help="name:seconds:text_rows, name one of main, draft, tiny",
    )
    parser.add_argument(
        "--conversations", type=int, default=400_000, help="drawn once, then gone through again and again"
    )
    parser.add_argument("--chat-rows", type=int, default=128, help=f"rows of {CHAT_LENGTH} tokens in a step")
    parser.add_argument("--broad", type=int, default=600, help="further names to ask about when measuring")
    parser.add_argument(
        "--decay", type=float, default=0.1, help="weight decay of the matrices, times the learning rate"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    options = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    chat = pack_conversations(options.corpus, tokenizer, options.conversations, CHAT_LENGTH, options.seed)
    text = join_documents(options.corpus, tokenizer, options.seed)
    report(
        "data",
        seconds=time.monotonic() - started,
        chat_rows=len(chat.ids),
        chat_filled=float((chat.segments > 0).mean()),
        chat_targets=int((chat.targets >= 0).sum()),
        text_tokens=len(text),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        torch=torch.__version__,
    )
    validation = (options.corpus / "validation.txt").read_text()
    for spec in options.models:
        name, seconds, text_rows = spec.split(":")
        torch.manual_seed(options.seed)
        model = Llama(SHAPES[name]).to(device)
        train(
            model,
            chat,
            text,
            float(seconds),
            int(text_rows),
            options,
            lambda m: measure_bits_per_byte(m, tokenizer, validation)[0],
        )
        folder = options.out / FOLDERS[name]
        export_folder(model, options.tokenizer, folder)
        began = time.monotonic()
        # Measured as exported: through float16, in float32 arithmetic.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
        figures = evaluate(model.eval(), tokenizer, options.corpus, options.broad, options.seed)
        (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        report("evaluation", model=name, seconds=time.monotonic() - began, **figures)


def train(
    model: Llama,
    chat: Rows,
    text: NDArray[np.int16],
    seconds: float,
    text_rows: int,
    options: argparse.Namespace,
    measure: Callable[[Llama], float],
) -> None:
    """Trains in place for `seconds`, compilation not counted (it happens in a first step that is thrown away).

    `measure` gives the bits per byte of other text than the held-out one, for the reports: they show whether
    `text_rows` (windows of library text in a step) times `seconds` goes through the library too often.
    """
    device = next(model.parameters()).device
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    muon = Muon(matrices, momentum=0.95, decay=options.decay)
    adam = torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.97), eps=1e-9, weight_decay=0.0, fused=device.type == "cuda")
    loss_of = model.loss if options.eager or device.type == "cpu" else torch.compile(model.loss, dynamic=False)
    chat_batches = iterate_chat(chat, options.chat_rows, device, options.seed)
    text_batches = iterate_text(text, text_rows, device, options.seed)
    began = time.monotonic()
    for ids, targets, mask in (next(chat_batches), next(text_batches)):
        with torch.autocast(device.type, torch.bfloat16):
            loss_of(ids, targets, mask).backward()
    model.zero_grad(set_to_none=True)
    _synchronize(device)
    report("compiled", seconds=time.monotonic() - began, parameters=sum(p.numel() for p in model.parameters()))

    began, step, averages = time.monotonic(), 0, torch.zeros(2, device=device)
    while True:
        progress = (time.monotonic() - began) / seconds
        if progress >= 1.0:
            break
        rate = learning_rate(progress, step)
        for index, (ids, targets, mask) in enumerate((next(chat_batches), next(text_batches))):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(ids, targets, mask)
            loss.backward()
            averages[index] = loss.detach() if step == 0 else averages[index] * 0.98 + loss.detach() * 0.02
        muon.step(0.02 * rate)
        for group in adam.param_groups:
            group["lr"] = 0.003 * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            _synchronize(device)  # keeps the queue short, so that elapsed time is true
        if step == 20 or step % 500 == 0:
            losses = dict(zip(("chat_loss", "text_loss"), averages.tolist(), strict=True))
            report(
                "step",
                step=step,
                seconds=time.monotonic() - began,
                rate=rate,
                bits_per_byte=measure(model),
                **losses,
            )
    tokens = step * (options.chat_rows * CHAT_LENGTH + text_rows * TEXT_LENGTH)
    chat_loss, text_loss = averages.tolist()
    report(
        "trained",
        steps=step,
        seconds=time.monotonic() - began,
        tokens=tokens,
        chat_loss=chat_loss,
        text_loss=text_loss,
    )


def learning_rate(progress: float, step: int) -> float:
    """Share of the peak rate: 100 steps of warm-up, level for a third of the time, then a cosine to nearly nothing."""
    level = 1.0 if progress < 0.33 else 0.5 + 0.5 * math.cos(math.pi * (progress - 0.33) / 0.67)
    return min(1.0, (step + 1) / 100) * max(level, 0.002)


def iterate_chat(rows: Rows, count: int, device: torch.device, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless batches (ids, targets, mask): each pass over all rows in a new order; a token sees its own
    conversation's past."""
    ids, targets, segments = (torch.from_numpy(a).to(device) for a in (rows.ids, rows.targets, rows.segments))
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=device).tril()
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(ids), generator=generator).to(device)
        for start in range(0, len(ids) - count + 1, count):
            chosen = order[start : start + count]
            segment = segments[chosen]
            mask = (segment[:, None, :, None] == segment[:, None, None, :]) & causal
            yield ids[chosen].long(), targets[chosen].long(), mask


def iterate_text(
    tokens: NDArray[np.int16], count: int, device: torch.device, seed: int
) -> Iterator[tuple[Tensor, Tensor, None]]:
    """Endless batches (ids, targets, None): every pass cuts the run of tokens at another offset."""
    run = torch.from_numpy(tokens).to(device)
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(TEXT_LENGTH + 1, device=device)
    while True:
        offset = int(torch.randint(TEXT_LENGTH, (1,), generator=generator))
        starts = torch.arange(offset, len(run) - TEXT_LENGTH - 1, TEXT_LENGTH)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(device)
        for first in range(0, len(starts) - count + 1, count):
            rows = run[starts[first : first + count, None] + reach].long()
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None


class Muon:
    """Momentum whose update is made nearly orthogonal; matrices of one shape are handled together."""

    def __init__(self, parameters: Sequence[Tensor], momentum: float, decay: float) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self._groups = [
            (group, torch.zeros_like(torch.stack([p.detach() for p in group]))) for group in groups.values()
        ]
        self._momentum = momentum
        self._decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of all matrices from their gradients."""
        for parameters, momentum in self._groups:
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum.lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(gradient.lerp(momentum, self._momentum))
            rows, columns = update.shape[-2:]
            update = update.float() * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(parameters, 1 - rate * self._decay)
            torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-rate)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Quintic Newton-Schulz iteration towards the nearest semi-orthogonal matrices; (N, rows, columns) in, bfloat16
    out."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def report(event: str, **fields: Any) -> None:
    """One line of JSON on standard output."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps({"event": event, **rounded}, ensure_ascii=False), flush=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
