"""The other side: llama.cpp through the low-level API of llama-cpp-python, as a process that takes orders.

Run as `python -m comparison.llama` by an interpreter that has llama_cpp; needs nothing of mlxr. Each measured loop is
one `llama_decode` and one `llama_synchronize` per step on a batch whose arrays are laid out beforehand, so Python costs
some microseconds a step.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from comparison.protocol import draw_tokens, read_memory, serve

BATCH_TOKENS = 512
SPARE_TOKENS = 64
api: Any = None  # the module llama_cpp, imported by main, so that a failure becomes an answer


@dataclass
class Held:
    """A llama.cpp context and the tokens of its sequences."""

    context: Any
    batch: Any
    sequences: int
    tokens: list[int] = field(default_factory=list)  # of each sequence


class Side:
    """A loaded model and one context for each combination of options, which keep their tokens."""

    def __init__(self) -> None:
        self._model: Any = None
        self._threads = 1
        self._vocab_size = 0
        self._contexts: dict[str, Held] = {}
        self._now: Held | None = None
        self._seeds = itertools.count(10**6)
        self._quiet: Any = None

    def open(self, model: str, threads: int) -> dict[str, Any]:
        """Load a model file with llama.cpp's defaults: memory-mapped, weights repacked if possible."""
        self._quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        start_s = time.perf_counter()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        load_s = time.perf_counter() - start_s
        self._threads = threads
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        versions = importlib.import_module("importlib.metadata")
        return {
            "load_s": load_s,
            "version": f"(llama-cpp-python {versions.version('llama_cpp_python')})",
            "system": api.llama_print_system_info().decode().strip(),
            **read_memory(),
        }

    def start(self, context_tokens: int, sequences: int, option: dict[str, bool]) -> dict[str, Any]:
        """Use the context of these options, made if there is none: `flash` attention, `unified` cache."""
        key = f"{context_tokens} {sequences} {sorted(option.items())}"
        if key not in self._contexts:
            self._contexts[key] = self._make_context(context_tokens + SPARE_TOKENS, sequences, option)
        self._now = self._contexts[key]
        return {}

    def drop(self) -> None:
        """Free all contexts; the model stays loaded."""
        for held in self._contexts.values():
            api.llama_batch_free(held.batch)
            api.llama_free(held.context)
        self._contexts, self._now = {}, None

    def _make_context(self, context_tokens: int, sequences: int, option: dict[str, bool]) -> Held:
        params = api.llama_context_default_params()
        params.n_ctx = context_tokens * sequences
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if option["flash"] else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = option["unified"]
        params.no_perf = True
        context = api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {context_tokens} x {sequences} tokens with {option}")
        return Held(context, api.llama_batch_init(BATCH_TOKENS, 0, 1), sequences, [0] * sequences)

    def hold(self, sequences: int, tokens: int) -> None:
        """Make each of `sequences` sequences hold exactly `tokens` tokens, computing only the missing ones."""
        held = self._held
        for sequence in range(sequences):
            if held.tokens[sequence] > tokens:
                self._cut(sequence, tokens)
            ids = draw_tokens(self._vocab_size, tokens, sequence)
            self._compute(sequence, ids, held.tokens[sequence])
            held.tokens[sequence] = tokens

    def prefill(self, tokens: int) -> float:
        """Return the seconds to compute `tokens` new tokens of sequence 0, with the logits of the last."""
        depth = self._held.tokens[0]
        ids = draw_tokens(self._vocab_size, tokens, next(self._seeds))
        start_s = time.perf_counter()
        self._compute(0, [*[0] * depth, *ids], depth)
        seconds = time.perf_counter() - start_s
        self._cut(0, depth)
        return seconds

    def decode(self, steps: int) -> float:
        """Return the seconds of `steps` steps in which every held sequence grows by one token, with logits for each."""
        held, batch = self._held, self._held.batch
        ids = iter(draw_tokens(self._vocab_size, (steps + 1) * held.sequences, next(self._seeds)))
        for sequence in range(held.sequences):
            self._place(sequence, sequence, next(ids), held.tokens[sequence], True)
        batch.n_tokens = held.sequences
        self._run()  # untimed: the step from the prompt to the first token of the answer
        start_s = time.perf_counter()
        for _ in range(steps):
            for sequence in range(held.sequences):
                batch.token[sequence] = next(ids)
                batch.pos[sequence] += 1
            self._run()
        seconds = time.perf_counter() - start_s
        for sequence in range(held.sequences):
            self._cut(sequence, held.tokens[sequence])
        return seconds

    def _compute(self, sequence: int, ids: list[int], first: int) -> None:
        """Compute ids[first:] at their positions in batches, with the logits of the very last token."""
        for start in range(first, len(ids), BATCH_TOKENS):
            end = min(len(ids), start + BATCH_TOKENS)
            for index, position in enumerate(range(start, end)):
                self._place(index, sequence, ids[position], position, position == len(ids) - 1)
            self._held.batch.n_tokens = end - start
            self._run()

    def _place(self, index: int, sequence: int, token: int, position: int, wants_logits: bool) -> None:
        batch = self._held.batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wants_logits

    def _run(self) -> None:
        code = api.llama_decode(self._held.context, self._held.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        api.llama_synchronize(self._held.context)

    def _cut(self, sequence: int, tokens: int) -> None:
        """Forget a sequence from position `tokens` on.

        The state of recurrent layers cannot be cut: such a sequence is forgotten whole and computed again, untimed.
        """
        memory = api.llama_get_memory(self._held.context)
        if api.llama_memory_seq_rm(memory, sequence, tokens, -1):
            return
        if not api.llama_memory_seq_rm(memory, sequence, -1, -1):
            raise RuntimeError(f"llama.cpp does not cut sequence {sequence} at {tokens}")
        self._compute(sequence, draw_tokens(self._vocab_size, tokens, sequence), 0)

    @property
    def _held(self) -> Held:
        assert self._now is not None
        return self._now

    def close(self) -> dict[str, Any]:
        """Free everything; returns the process's peak memory."""
        self.drop()
        api.llama_model_free(self._model)
        return read_memory()


def main() -> None:
    """Serve until stdin ends."""
    side = Side()

    def open_model(model: str, threads: int) -> dict[str, Any]:
        global api
        api = importlib.import_module("llama_cpp")
        return side.open(model, threads)

    handlers = {name: getattr(side, name) for name in ("start", "drop", "hold", "prefill", "decode", "close")}
    serve({"open": open_model, **handlers})


if __name__ == "__main__":
    main()
