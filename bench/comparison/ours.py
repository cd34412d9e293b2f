"""Our side: mlxr through its engine, as a process that takes orders. Run as `python -m comparison.ours`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from comparison.protocol import draw_tokens, read_memory, serve
from mlxr.core.errors import MlxrError
from mlxr.core.settings import resolve
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.loading import LoadedModel
from mlxr.service.opening import build_engine, open_model

SPARE_TOKENS = 64  # room in each context beyond the measured tokens
LEAD_STEPS = 32  # the first of several sequences may be so far ahead of the last; at most SPARE_TOKENS


class Side:
    """A loaded model and its engine. The engine's own prefix cache holds the contexts: nothing is computed twice, and
    each measurement checks that."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None
        self._engine: Engine | None = None
        self._given: Mapping[str, object] = {}
        self._prompts: list[list[int]] = []
        self._seeds = itertools.count(10**6)
        self._drag = 0.0  # share of each decode step's time that is slept after it

    def open(self, model: str, threads: int, settings: Mapping[str, object]) -> dict[str, Any]:
        """Load a model file."""
        self._given = {"threads": threads, "draft": "off", **settings}
        start_s = time.perf_counter()
        self._loaded = open_model(model, resolve(self._given))
        return {
            "load_s": time.perf_counter() - start_s,
            "threads": self._loaded.ctx.threads,
            "isa": self._loaded.ctx.isa,
            "weight_bytes": self._loaded.weight_bytes,
            **read_memory(),
        }

    def start(self, context_tokens: int, sequences: int, option: object) -> dict[str, Any]:
        """Start a fresh engine; `option` has no choices here."""
        assert self._loaded is not None
        assert option is None
        if self._engine is not None:
            self._engine.close()
        tokens = context_tokens + SPARE_TOKENS
        sizes = {"context_tokens": tokens, "max_sequences": max(2, sequences)}
        self._engine = build_engine(self._loaded, resolve({**self._given, **sizes}))
        stats = self._engine.stats()
        page_tokens = self._engine.plan.page_size
        return {"kv_bytes_per_token": stats.page_bytes // page_tokens, "arena_bytes": stats.arena_bytes}

    def hold(self, sequences: int, tokens: int) -> None:
        """Compute `sequences` contexts of `tokens` tokens; the cache keeps them."""
        vocab_size = self._model.config.vocab_size
        self._prompts = [draw_tokens(vocab_size, tokens, seed) for seed in range(sequences)]
        for prompt in self._prompts:
            if prompt:
                self._fill(prompt)

    def prefill(self, tokens: int) -> float:
        """Return the seconds from the submission of a prompt with `tokens` new tokens to its first token."""
        fresh = draw_tokens(self._model.config.vocab_size, tokens, next(self._seeds))
        start_s = time.perf_counter()
        event = self._fill([*self._prompts[0], *fresh])
        seconds = time.perf_counter() - start_s
        if event.usage.cached_tokens != len(self._prompts[0]):
            raise MlxrError(f"{event.usage.cached_tokens} tokens came from the cache, not {len(self._prompts[0])}")
        return seconds

    def decode(self, steps: int) -> float:
        """Return the seconds of `steps` steps in which every held context grows by one token."""
        params = SamplingParams(max_tokens=steps + LEAD_STEPS, ignore_eos=True)
        ids = [self._running.submit(EngineRequest(prompt, params)) for prompt in self._prompts]
        try:
            waiting = set(ids)
            while waiting:
                waiting.difference_update(event.sequence_id for event in self._step())
            start_s = time.perf_counter()
            grown = [len(self._drag_step()) for _ in range(steps)]
            seconds = time.perf_counter() - start_s
        finally:
            for request_id in ids:
                self._running.cancel(request_id)
        if set(grown) != {len(ids)}:
            raise MlxrError(f"steps advanced {min(grown)} to {max(grown)} of {len(ids)} sequences")
        return seconds

    def drag(self, share: float) -> None:
        """Let each measured decode step sleep for a share of its time, which a gate of speed must notice."""
        self._drag = share

    def _drag_step(self) -> list[TokenEvent]:
        start_s = time.perf_counter()
        events = self._step()
        if self._drag:
            time.sleep(self._drag * (time.perf_counter() - start_s))
        return events

    def _fill(self, prompt: list[int]) -> TokenEvent:
        """Compute a prompt; returns the event of its first token."""
        request_id = self._running.submit(EngineRequest(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        while True:
            for event in self._step():
                if event.sequence_id == request_id:
                    return event

    def _step(self) -> list[TokenEvent]:
        events = self._running.step()
        failed = next((event.error for event in events if event.error), None)
        if failed is not None:
            raise MlxrError(failed)
        return events

    @property
    def _model(self) -> LoadedModel:
        assert self._loaded is not None
        return self._loaded

    @property
    def _running(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def close(self) -> dict[str, Any]:
        """Free everything; returns the process's peak memory."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        return read_memory()


def main() -> None:
    """Serve until stdin ends."""
    side = Side()
    names = ("open", "start", "hold", "prefill", "decode", "drag", "close")
    serve({name: getattr(side, name) for name in names})


if __name__ == "__main__":
    main()
