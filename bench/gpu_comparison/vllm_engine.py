"""vLLM in a comparison, with the interface of `Ours`: its engine in this process, stepped like its own `LLM`.

Random weights and defaults, except that no prefix is cached and no token becomes text, as in the comparison. CUDA
graphs are those that it records by itself. Steps are given as a mean, since the next step is under way already when one
is reported.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpu_comparison.cases import VLLM, VLLM_4BIT, Case
from gpu_comparison.vllm_folder import write_folder
from synthetic import Shape

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
SPARE_TOKENS = 64  # of an answer, beyond the tokens asked for
MEMORY_SHARE = 0.85
MOST_TOKENS = 2048  # in a step at least, even if vLLM's default is lower


class Vllm:
    """vLLM with one model, for one case after the other. Times end when the tokens are there."""

    warms_itself = False
    note = ""

    def __init__(self, device: str, shape: Shape, type_name: str) -> None:
        if device != "cuda":
            raise ValueError("vLLM is compared on NVIDIA's GPUs alone")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.name = VLLM_4BIT if type_name == "q4_k_m" else VLLM
        self._vllm, self._shape, self._delta = vllm, shape, RequestOutputKind.DELTA
        self._folder = tempfile.TemporaryDirectory()
        folder = write_folder(Path(self._folder.name), shape, type_name, has_vocabulary=False)
        model = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=shape.context_length,
            gpu_memory_utilization=MEMORY_SHARE,
        )
        self._engine: Any = model.llm_engine
        self._random = np.random.default_rng(1)
        self._count = 0
        self._running: list[str] = []

    def start(self, case: Case, steps: int) -> None:
        """Begin a case; for decode, compute all contexts."""
        self._case = case
        if case.kind == "decode":
            waiting_steps = case.batch * case.context // MOST_TOKENS + 2  # the first decode while the last prefill
            for _ in range(case.batch):
                self._submit(case.context, steps + waiting_steps + SPARE_TOKENS)
            begun: set[str] = set()
            while len(begun) < case.batch:
                begun |= {name for name, tokens in self._step() if tokens}

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of a step, the mean of so many."""
        missing = steps * self._case.batch
        start = time.perf_counter()
        while missing > 0:
            missing -= sum(tokens for _, tokens in self._step())
        return [(time.perf_counter() - start) / steps]

    def prefill(self) -> float:
        """Return the seconds from prompts to their first tokens."""
        for _ in range(self._case.batch):
            self._submit(self._case.context, 1)
        missing = self._case.batch
        start = time.perf_counter()
        while missing > 0:
            missing -= sum(tokens for _, tokens in self._step())
        took_s = time.perf_counter() - start
        self.stop()
        return took_s

    def measure_bytes(self) -> dict[str, int]:
        """Its memory is not reported, as it takes its share of the card from the start."""
        return dict.fromkeys(("weight_bytes", "cache_bytes", "arena_bytes", "peak_bytes"), 0)

    def stop(self) -> None:
        """End the requests that still run."""
        self._engine.abort_request(self._running)
        self._running = []
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _submit(self, tokens: int, more: int) -> None:
        prompt = {"prompt_token_ids": self._random.integers(3, self._shape.vocab_size, tokens).tolist()}
        wanted = self._vllm.SamplingParams(
            max_tokens=more, ignore_eos=True, temperature=0.0, detokenize=False, output_kind=self._delta
        )
        self._count += 1
        name = str(self._count)
        self._engine.add_request(name, prompt, wanted)
        self._running.append(name)

    def _step(self) -> list[tuple[str, int]]:
        """Run a step; returns the requests that got tokens, and how many each."""
        return [(done.request_id, len(done.outputs[0].token_ids)) for done in self._engine.step()]
