"""Hold a GPU's peak memory against weights, arena and workspace: after loading, a prompt, and decode.

    python bench/gpu_memory.py --device cuda --model FILE --arena 1 --batch 1 --batch 32

The model is loaded from its file as always (bench/synthetic.py writes one). Each line gives the most that MLX had in
arrays since the line before, and how that differs from the sum of what is stated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.loading import LoadedModel, load

PROMPT_TOKENS = 2048
DECODE_TOKENS = 24


class Watch:
    """Prints what each stage of a model took at most."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.ctx.gpu is not None, "give a device of MLX"
        self._loaded, self.rows = loaded, list[dict[str, object]]()

    def note(self, stage: str, arena_bytes: int) -> None:
        """One line; the peak counts anew from here on."""
        gpu = self._loaded.ctx.gpu
        weights_bytes, workspace_bytes = self._loaded.weight_bytes, gpu.workspace.nbytes
        peak_bytes, kept_bytes = gpu.mx.get_peak_memory(), gpu.mx.get_cache_memory()
        stated_bytes = weights_bytes + arena_bytes + workspace_bytes
        row = {
            "stage": stage,
            "weight_bytes": weights_bytes,
            "arena_bytes": arena_bytes,
            "workspace_bytes": workspace_bytes,
            "peak_bytes": peak_bytes,
            "kept_bytes": kept_bytes,
            "peak_over_stated": peak_bytes / stated_bytes,
        }
        self.rows.append(row)
        sizes = " ".join(
            f"{name.removesuffix('_bytes')} {value / 2**20:.0f}"
            for name, value in row.items()
            if name.endswith("_bytes") and isinstance(value, int)
        )
        print(f"{stage:18s} {sizes} MiB; peak is {100 * peak_bytes / stated_bytes:.1f} % of the stated sum", flush=True)
        gpu.mx.reset_peak_memory()


def measure(loaded: LoadedModel, arena_bytes: int, batches: list[int]) -> list[dict[str, object]]:
    """All stages of one model."""
    watch, random = Watch(loaded), np.random.default_rng(0)
    watch.note("load", 0)
    engine = Engine(
        loaded.model,
        loaded.ctx,
        eos_ids=(),
        arena_bytes=arena_bytes,
        context_tokens=min(loaded.config.context_length, PROMPT_TOKENS + DECODE_TOKENS),
        max_batch_tokens=PROMPT_TOKENS,
        prefill_chunk_tokens=PROMPT_TOKENS,
        max_sequences=max(batches),
        prefix_sharing=False,
    )
    taken_bytes = engine.stats().arena_bytes
    watch.note("arena", taken_bytes)

    def run(batch: int, prompt_tokens: int, answer_tokens: int) -> float:
        for _ in range(batch):
            prompt = random.integers(3, loaded.config.vocab_size, prompt_tokens).tolist()
            engine.submit(prompt, SamplingParams(max_tokens=answer_tokens, ignore_eos=True, temperature=0))
        start_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start_s

    prompt_tokens = min(PROMPT_TOKENS, engine.context_tokens - DECODE_TOKENS)
    run(1, prompt_tokens, 1)
    took_s = run(1, prompt_tokens, 1)
    watch.note(f"prompt {prompt_tokens}", taken_bytes)
    print(f"{prompt_tokens / took_s:.0f} tokens/s", flush=True)
    for batch in batches:
        run(batch, 4, DECODE_TOKENS)
        watch.note(f"decode batch {batch}", taken_bytes)
    return watch.rows


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", required=True)
    parser.add_argument("--arena", type=float, default=1.0, help="GiB of the arena")
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--out")
    given = parser.parse_args()
    start_s = time.perf_counter()
    with load(given.model, device=given.device) as loaded:
        print(f"{given.model}: loaded in {time.perf_counter() - start_s:.1f} s", flush=True)
        rows = measure(loaded, int(given.arena * 2**30), given.batch or [1, 32])
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": given.device, "model": given.model, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
