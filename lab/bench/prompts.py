"""Time prompts of many sequences on an NVIDIA GPU: attention alone, through the engine, and through vLLM beside them.

    PYTHONPATH=src:bench python lab/bench/prompts.py attention
    PYTHONPATH=src:bench python lab/bench/prompts.py engine --type bf16
    python lab/bench/prompts.py vllm

Weights are random. With `attention`, "before" is what gathers pages for the library, "now" `attend/panels.*`; both take
turns in one process. vLLM runs offline, in an environment of its own, with its defaults but for prefix caching.
`--small` tries a script on another `--device` with little work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

PAGE, VOCABULARY, LONG = 32, 128256, 16384
Work = dict[str, Callable[[], float]]  # tokens/s of each
# Heads, heads of keys, their dims, and of each sequence the queries and the positions that they see.
ATTENTION = (
    (32, 8, 128, [(500, 500)] * 4),
    (32, 8, 128, [(2048, 2048)]),
    (32, 8, 128, [(8192, 8192)]),
    (32, 8, 128, [(2048, 16384)]),
    (32, 8, 128, [(16384, 16384)]),
    (16, 2, 256, [(8192, 8192)]),
    (32, 4, 64, [(8192, 8192)]),
)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "engine", "vllm"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--type", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[2048], help="that a step of the engine computes")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    {"attention": time_attention, "engine": time_engine, "vllm": time_vllm}[options.what](options)


def time_attention(options: argparse.Namespace) -> None:
    """One layer's attention, before and now."""
    from mlxr.cache.arena import Arena
    from mlxr.kernels.attend import gpu
    from mlxr.kernels.attend.scores import Scores
    from mlxr.kernels.context import Context

    ctx = Context(options.device)
    device: Any = ctx.gpu
    mx, takes_panels = device.mx, gpu.takes_panels
    for heads, kv_heads, head_dim, runs in ((8, 2, 128, [(50, 50)] * 2),) if options.small else ATTENTION:
        batch = make_batch(runs)
        arena = Arena(ctx, 1, batch.page_table.size, kv_heads, PAGE, head_dim, "bf16")
        pools: list[Any] = [arena.k_pools[0], arena.v_pools[0]]
        for pool in pools:
            pool.array = mx.random.normal(pool.array.shape).astype(mx.bfloat16)
        q = mx.random.normal((batch.tokens, heads, head_dim)).astype(mx.bfloat16)
        mx.eval(q, *(pool.array for pool in pools))
        operations = sum(4 * heads * head_dim * (count * seen - count * (count - 1) / 2) for count, seen in runs)
        repeats = 2 if options.small else max(3, min(30, int(2e13 / operations)))
        told = []
        for is_now in (False, True):
            gpu.takes_panels = takes_panels if is_now else (lambda *_: False)
            mx.eval(gpu.attend(ctx, q, *pools, batch, Scores(head_dim**-0.5)))
            seconds = []
            for _ in range(options.rounds):
                mx.synchronize()
                start_s = time.perf_counter()
                for _ in range(repeats):
                    mx.async_eval(gpu.attend(ctx, q, *pools, batch, Scores(head_dim**-0.5)))
                mx.synchronize()
                seconds.append((time.perf_counter() - start_s) / repeats)
            best = statistics.median(seconds)
            told.append(f"{best * 1e6:.0f} us, {operations / best / 1e12:.0f} TFLOP/s")
        gpu.takes_panels = takes_panels
        print(f"{len(runs)} of {runs[0]}, {heads} heads of {head_dim}: before {told[0]}; now {told[1]}", flush=True)


def make_batch(runs: Sequence[tuple[int, int]]) -> Any:
    """The last queries of some sequences, whose pages lie out of order."""
    from mlxr.kernels.ragged import RaggedBatch

    width = -(-max(seen for _, seen in runs) // PAGE)
    table = np.random.default_rng(0).permutation(width * len(runs)).astype(np.int32).reshape(len(runs), width)
    positions = np.concatenate([np.arange(seen - count, seen) for count, seen in runs]).astype(np.int32)
    owners = np.repeat(np.arange(len(runs)), [count for count, _ in runs])
    return RaggedBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=(table[owners, positions // PAGE] * PAGE + positions % PAGE).astype(np.int32),
        query_starts=np.cumsum([0, *(count for count, _ in runs)]).astype(np.int32),
        context_lengths=np.array([seen for _, seen in runs], np.int32),
        page_table=table,
        output_rows=np.arange(len(positions), dtype=np.int32),
    )


def time_engine(options: argparse.Namespace) -> None:
    """Prompts and answers of many sequences through the engine, for each number of tokens in a step."""
    from gpu_comparison.cases import Case
    from gpu_comparison.ours import Ours
    from mlxr.core.model_settings import ModelSettings
    from mlxr.core.types import SamplingParams
    from mlxr.engine.engine import Engine
    from mlxr.engine.request import EngineRequest

    case, longest = Case.parse(f"{options.shape}-{options.type}:1"), 64 if options.small else LONG
    ours = Ours(options.device, replace(case.model, context_length=longest + 512), options.type)
    pages = max(64 * (-(-708 // PAGE) + 1), longest // PAGE + 4)
    random = np.random.default_rng(3)
    for step_tokens in options.step_tokens:
        settings = ModelSettings(
            page_size=PAGE,
            context_tokens=longest + 64,
            max_batch_tokens=step_tokens,
            max_sequences=128,
            prefill_chunk_tokens=step_tokens,
        )
        engine = Engine(ours.model, ours.ctx, settings, eos_ids=(), pages=pages, prefix_sharing=False)

        def run(tokens: int, count: int, more: int, engine: Engine = engine) -> float:
            for _ in range(count):
                prompt = random.integers(3, ours.shape.vocab_size, tokens).tolist()
                engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=more, ignore_eos=True)))
            start_s = time.perf_counter()
            while engine.has_work:
                engine.step()
            return time.perf_counter() - start_s

        for name, work in list_work(run, is_small=options.small).items():
            rates = [round(work()) for _ in range(options.rounds + 1)][1:]  # the first one warms up
            print(f"steps of {step_tokens}, {name}: {rates}", flush=True)
        del engine, run, work
        ours.stop()


def time_vllm(options: argparse.Namespace) -> None:
    """The same through vLLM, 8B in bf16."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    model = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=LONG + 616,
        max_num_seqs=128,
    )
    random = np.random.default_rng(3)

    def run(tokens: int, count: int, more: int) -> float:
        prompts = [{"prompt_token_ids": random.integers(3, VOCABULARY, tokens).tolist()} for _ in range(count)]
        wanted = vllm.SamplingParams(max_tokens=more, ignore_eos=True, temperature=0.0, detokenize=False)
        start_s = time.perf_counter()
        model.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - start_s

    for name, work in list_work(run, is_small=False).items():
        print(name, [round(work()) for _ in range(options.rounds + 1)][1:], flush=True)


def list_work(run: Callable[[int, int, int], float], *, is_small: bool) -> Work:
    """What is asked of both: `run` takes the tokens of a prompt, how many there are, and the tokens of an answer."""
    count, tokens, more, longest = (3, 20, 4, 40) if is_small else (64, 500, 200, LONG)
    short = min(2048, longest)
    return {
        f"{count} prompts of {tokens}, tokens/s": lambda: count * tokens / run(tokens, count, 1),
        f"{count} of {tokens} + {more}, output tokens/s": lambda: count * more / run(tokens, count, more),
        f"a prompt of {short}, tokens/s": lambda: short / run(short, 1, 1),
        f"a prompt of {longest}, tokens/s": lambda: longest / run(longest, 1, 1),
    }


if __name__ == "__main__":
    main()
