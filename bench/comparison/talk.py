"""llama.cpp answering prompts in turn, through the `Llama` class of llama-cpp-python, for bench/resume.py and
bench/drafts.py.

Run as `python -m comparison.talk` by an interpreter that has llama_cpp. It reuses the prompt and answer before, as far
as its library can.
"""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any

from comparison.protocol import read_memory, serve


class Talker:
    """A model with one context."""

    def __init__(self) -> None:
        self._llama: Any = None
        self._computed_tokens = 0

    def open(
        self, model: str, threads: int, context_tokens: int, draft: str = "", draft_tokens: int = 0
    ) -> dict[str, Any]:
        """Load a model file; `draft` is the file of a draft model, or `ngram`."""
        library = importlib.import_module("llama_cpp")
        options = {"n_ctx": context_tokens, "n_threads": threads, "n_threads_batch": threads, "flash_attn": True}
        guesses = _open_draft(library, draft, draft_tokens, {**options, "verbose": False}) if draft else None
        self._llama = library.Llama(model, draft_model=guesses, verbose=False, **options)
        evaluate = self._llama.eval

        def count(tokens: list[int]) -> None:
            self._computed_tokens += len(tokens)
            evaluate(tokens)

        self._llama.eval = count
        return {"version": library.__version__, **read_memory()}

    def complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """The likeliest `tokens` tokens after a prompt, the count of reused prompt tokens, the time to the first."""
        self._computed_tokens = 0
        start_s = time.perf_counter()
        answer = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        first = next(answer)
        first_ms = 1e3 * (time.perf_counter() - start_s)
        cached_tokens = len(prompt) - self._computed_tokens
        rest = list(itertools.islice(answer, tokens - 1))
        seconds = time.perf_counter() - start_s
        return {"tokens": [first, *rest], "cached_tokens": cached_tokens, "first_ms": first_ms, "seconds": seconds}


def _open_draft(library: Any, draft: str, tokens: int, options: dict[str, Any]) -> Any:
    """Open a draft model for the library."""
    if draft == "ngram":
        lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        return lookup(num_pred_tokens=tokens)
    model = library.Llama(draft, **options)
    numpy = importlib.import_module("numpy")

    def guess(input_ids: Any, /, **_: Any) -> Any:
        likeliest = model.generate(input_ids, temp=0.0, repeat_penalty=1.0)
        return numpy.array(list(itertools.islice(likeliest, tokens)), dtype=numpy.intc)

    return guess


def main() -> None:
    """Serve until stdin ends."""
    talker = Talker()
    serve({"open": talker.open, "complete": talker.complete})


if __name__ == "__main__":
    main()
