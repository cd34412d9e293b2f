"""The demo model behind a gate: no step is computed unless the test lets it, so the test decides what happens when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mlxr.core.settings import Settings
from mlxr.registry import ModelRecord
from mlxr.service.opening import open_model
from mlxr.service.session import Session

STEP_S = 30.0


@dataclass
class Gate:
    """`let(n)` admits n steps, `open()` all from now on; `on_step` runs in each before it is computed."""

    steps: int = 0
    on_step: Callable[[int], None] = lambda number: None
    _tickets: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _is_open: bool = False

    def let(self, steps: int = 1) -> None:
        self._tickets.release(steps)

    def open(self) -> None:
        self._is_open = True
        self._tickets.release()

    def enter(self) -> None:
        if not self._is_open:
            assert self._tickets.acquire(timeout=STEP_S), "the test never let this step happen"
        self.steps += 1
        self.on_step(self.steps)

    def open_session(self, record: ModelRecord, settings: Settings, memory_bytes: int) -> Session:
        """Open a session whose model waits at this gate; the pool of models calls it."""
        loaded = open_model(record.path, settings)
        gated = replace(loaded, name=record.short_name, model=GatedModel(loaded.model, self))  # type: ignore[arg-type]
        return Session(gated, settings, memory_bytes=memory_bytes)


class GatedModel:
    """A model whose `forward` waits at the gate."""

    def __init__(self, model: Any, gate: Gate) -> None:
        self._model, self._gate = model, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self._gate.enter()
        return self._model.forward(*arguments, **options)

    def forward_hidden(self, *arguments: Any, **options: Any) -> Any:
        """Compute the states for embeddings once the gate lets it."""
        self._gate.enter()
        return self._model.forward_hidden(*arguments, **options)
