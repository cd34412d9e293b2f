"""Measure what low-rank adapters cost: the decode speed of one batch without adapters, and with several of them in it.

    python lab/bench/adapters.py [--model NAME] [--device cpu] [--threads 2] [--batch 16] [--adapters 8] [--rank 16]
        [--tokens 48] [--targets all,attention] [--types bf16,f32] [--turns 5]

Adapters of random numbers are written as GGUF files for the model's own weights, those of attention (queries and
values), of experts, or all that every token is multiplied by, and loaded. The same prompts are answered in turns
without adapters and with the sequences shared out among them; the median of the speeds counts. For each kind of adapter
it prints bytes, tokens a second and the part of the speed that is lost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlxr import LLM, SamplingParams
from mlxr.formats import TensorToWrite, open_gguf, write_gguf
from mlxr.loading import find_model

TARGETS = {
    "attention": ("attn_q", "attn_v"),
    "experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "all": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
}
ALPHA = 1e-3  # small, so that answers stay like those without


def write_adapter(path: Path, model: Path, seed: int, args: argparse.Namespace, targets: str, kind: str) -> None:
    """A GGUF adapter of random numbers for weights of a GGUF model."""
    chance, tensors = np.random.default_rng(seed), []
    with open_gguf(model) as base:
        for name, tensor in base.tensors.items():
            if not name.endswith(tuple(f".{part}.weight" for part in TARGETS[targets])):
                continue
            *experts, rows, columns = tensor.shape
            for side, shape in (("a", (*experts, args.rank, columns)), ("b", (*experts, rows, args.rank))):
                values = chance.standard_normal(shape, np.float32).view(np.uint32)
                data = (values >> 16).astype(np.uint16) if kind == "bf16" else values
                content = data.tobytes()
                tensors.append(TensorToWrite(f"{name}.lora_{side}", kind, shape, lambda content=content: [content]))
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": ALPHA}
    write_gguf(path, about, tensors)


def measure(llm: LLM, prompts: Sequence[str], adapters: Sequence[str | None], tokens: int) -> float:
    """Tokens a second of all sequences together after their first ones; the time until these does not count."""
    seconds = []
    for count in (1, tokens + 1):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, adapter=adapters)
        seconds.append(time.perf_counter() - start)
    return len(prompts) * tokens / (seconds[1] - seconds[0])


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--targets", default="all,attention")
    parser.add_argument("--types", default="bf16,f32")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    prompts = [f"# Lesson {number}: how a computer adds {number} and two.\n" for number in range(args.batch)]
    path = find_model(args.model)
    settings = {"device": args.device, "draft": "off", "adapter_bytes": 1 << 32}
    if args.device == "cpu":
        settings["threads"] = args.threads
    with LLM(args.model, **settings) as llm, tempfile.TemporaryDirectory() as folder:
        for targets in args.targets.split(","):
            for kind in args.types.split(","):
                file_bytes = 0
                for number in range(args.adapters):
                    file = Path(folder) / f"{targets}-{kind}-{number}.gguf"
                    write_adapter(file, path, number, args, targets, kind)
                    file_bytes += file.stat().st_size
                    llm.load_adapter(file)
                chosen = [f"{targets}-{kind}-{place % args.adapters}" for place in range(args.batch)]
                speeds: dict[bool, list[float]] = {False: [], True: []}
                for _ in range(args.turns):
                    for adapted, names in ((False, [None] * args.batch), (True, chosen)):
                        speeds[adapted].append(measure(llm, prompts, names, args.tokens))
                plain, adapted_speed = (statistics.median(speeds[adapted]) for adapted in (False, True))
                print(
                    f"{args.model}, batch {args.batch}, {args.adapters} adapters of rank {args.rank} in {kind}, "
                    f"{targets}: {file_bytes / 1e6:.0f} MB; {plain:.1f} -> {adapted_speed:.1f} tokens/s, "
                    f"{100 * (1 - adapted_speed / plain):.1f} % lost",
                    flush=True,
                )
                for name in set(chosen):
                    llm.unload_adapter(name)


if __name__ == "__main__":
    main()
