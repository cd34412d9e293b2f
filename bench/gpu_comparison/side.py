"""One engine of a comparison as a process that takes orders, so that its memory is its own. Run as
`python -m gpu_comparison.side`; `comparison.protocol` defines the orders."""

from __future__ import annotations

import gc
import statistics
from dataclasses import replace
from typing import Any

from comparison.protocol import serve
from gpu_comparison.cases import LLAMA_CPP, MLX_LM, MLX_LM_4BIT, OURS, VLLM, VLLM_4BIT, Case
from gpu_comparison.llama_cpp import LlamaCpp
from gpu_comparison.machine import measure_copy
from gpu_comparison.ours import Ours
from gpu_comparison.peers import MlxLm, Transformers
from gpu_comparison.vllm_engine import Vllm


class Side:
    """An engine with one model, for one case after the other."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._case: Case | None = None

    def open(self, engine: str, device: str, case: str, context_length: int, tools: str = "") -> None:
        """Make the model of a case with random weights; `tools` is the folder of llama.cpp's."""
        chosen = Case.parse(case)
        shape = replace(chosen.model, context_length=context_length)
        if engine == OURS:
            self._engine = Ours(device, shape, chosen.type_name)
        elif engine == LLAMA_CPP:
            self._engine = LlamaCpp(tools, chosen)
        elif engine in (VLLM, VLLM_4BIT):
            self._engine = Vllm(device, shape, chosen.type_name)
        elif engine in (MLX_LM, MLX_LM_4BIT):
            self._engine = MlxLm(device, shape, quantized=engine == MLX_LM_4BIT)
        else:
            self._engine = Transformers(device, shape)

    def start(self, case: str, steps: int, warm_steps: int) -> None:
        """Begin a case with room for `steps`; does `warm_steps` at once, unless the engine warms up by itself."""
        self.stop()  # the case before, if it failed
        self._case = Case.parse(case)
        self._engine.start(self._case, steps)
        if not self._engine.warms_itself:
            self.measure(warm_steps)

    def measure(self, steps: int) -> float:
        """Return the tokens per second of a prompt, or of the median step."""
        assert self._case is not None
        if self._case.kind == "prefill":
            took_s: float = self._engine.prefill()
        else:
            took_s = statistics.median(self._engine.decode(steps))
        return self._case.tokens / took_s

    def describe(self) -> dict[str, Any]:
        """The facts about the case besides its speed."""
        return {"note": self._engine.note, **self._engine.measure_bytes()}

    def stop(self) -> None:
        """End the case and free its memory."""
        self._engine.stop()
        gc.collect()


def main() -> None:
    """Answer until stdin ends."""
    side = Side()
    actions = {name: getattr(side, name) for name in ("open", "start", "measure", "describe", "stop")}
    serve({**actions, "measure_copy": measure_copy})


if __name__ == "__main__":
    main()
