"""Our engine in a comparison: random weights made on the device, requests and events included."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np

from gpu_comparison.cases import Case
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.formats import by_name
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.steps import Steps
from mlxr.kernels.ledger import Ledger
from mlxr.models import Decoder
from synthetic import Pools, Shape

PAGE_SIZE = 32
CHUNK_TOKENS = 2048


class RandomTensor:
    """A tensor whose values are made when they are needed; vectors are all ones, like fresh norms, or minus ones."""

    def __init__(self, name: str, type_name: str, shape: tuple[int, ...], gain: float) -> None:
        self.name, self.type_name, self.shape, self.gain = name, type_name, shape, gain
        self.data = np.zeros(1, np.uint8)
        kind = by_name(type_name)
        self.nbytes = int(np.prod(shape)) // kind.block_size * kind.type_size

    def to_float32(self, start: int | None = None, stop: int | None = None) -> Any:
        """Make values of about the size of those in the blocks."""
        if len(self.shape) == 1:
            sign = -1 if self.name.endswith("ssm_a") else 1  # negative, so that the state decays
            return np.full(self.shape, sign, np.float32)[start:stop]
        rows = range(*slice(start, stop).indices(self.shape[0]))
        values = np.random.default_rng(rows.start).standard_normal((len(rows), self.shape[1]), np.float32)
        return values * np.float32(self.gain / self.shape[1] ** 0.5)

    def take_rows(self, start: int, stop: int) -> RandomTensor:
        """Return some rows, random like the others."""
        return RandomTensor(self.name, self.type_name, (stop - start, *self.shape[1:]), self.gain)

    def take_matrix(self, index: int) -> RandomTensor:
        """Return one matrix of a stack, random like the others."""
        return RandomTensor(f"{self.name}.{index}", self.type_name, self.shape[1:], self.gain)

    def release(self) -> None:
        """Do nothing: no file is mapped."""


class RandomGpu(Gpu):
    """A GPU on which uploads of random tensors are drawn from a small pool of valid blocks."""

    def __init__(self, device: str, ledger: Ledger) -> None:
        super().__init__(device, ledger)
        self._pools = Pools(0)
        self._placed_pools: dict[tuple[str, int, float], Any] = {}

    def read(self, tensor: Any) -> Any:
        """Draw blocks at random, also for rows or columns of a random tensor."""
        random = tensor
        while random is not None and not isinstance(random, RandomTensor):
            random = getattr(random, "source", None)
        if random is None:
            return super().read(tensor)
        mx, key = self.mx, (tensor.type_name, tensor.shape[-1], random.gain)
        if key not in self._placed_pools:
            self._placed_pools[key] = mx.array(self._pools.get_pool(*key))
        pool = self._placed_pools[key]
        count = tensor.nbytes // pool.shape[1]
        mx.random.seed(zlib.crc32(tensor.name.encode()))  # the same in all processes
        array = mx.take(pool, mx.random.randint(0, pool.shape[0], (count,)), axis=0)
        if tensor.type_name in ("bf16", "f16"):
            array = array.view(mx.bfloat16 if tensor.type_name == "bf16" else mx.float16).reshape(tensor.shape)
        else:
            array = array.reshape(-1)
        mx.eval(array)
        return array


def make_context(device: str) -> Context:
    """A context whose models have random weights."""
    ctx = Context(device)  # type: ignore[arg-type]
    ctx.gpu = RandomGpu(device, ctx.ledger)
    return ctx


class Ours:
    """mlxr with one model, for one case after the other. Times end when the events are there."""

    name = "mlxr"
    note = ""
    warms_itself = False

    def __init__(self, device: str, shape: Shape, recipe: str, ctx: Context | None = None) -> None:
        self.shape, self.ctx = shape, ctx or make_context(device)
        self._mx = self.ctx.gpu.mx
        tensors = {
            name: RandomTensor(name, "f32" if len(rows) == 1 else kind, rows, gain)
            for name, kind, rows, gain in shape.plan_tensors(recipe)
        }
        self.model: Any = Decoder(self.ctx, shape.to_config(), tensors)  # type: ignore[arg-type]
        self._engine: Engine | None = None
        self._random = np.random.default_rng(1)

    def start(self, case: Case, steps: int) -> None:
        """Start an engine for the case with room for `steps` more tokens; for decode, compute all contexts."""
        self._case = case
        self._mx.reset_peak_memory()
        waiting_steps = case.batch * case.context // CHUNK_TOKENS + 2  # the first decode while the last are in prefill
        more = steps + waiting_steps + 2
        total = case.context + more
        self._engine = Engine(
            self.model,
            self.ctx,
            ModelSettings(
                page_size=PAGE_SIZE,
                context_tokens=total,
                max_batch_tokens=max(CHUNK_TOKENS, case.batch),
                max_sequences=case.batch,
                prefill_chunk_tokens=CHUNK_TOKENS,
            ),
            eos_ids=(),
            pages=case.batch * (-(-total // PAGE_SIZE) + 1),
            prefix_sharing=False,
        )
        if case.kind == "decode":
            for _ in range(case.batch):
                self._submit(case.context, more)
            begun: set[int] = set()
            while len(begun) < case.batch:
                begun |= {event.sequence_id for event in self._engine.step()}

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of each of so many steps."""
        assert self._engine is not None
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            events = self._engine.step()
            times.append(time.perf_counter() - start)
            assert len(events) == self._case.batch
        return times

    def prefill(self) -> float:
        """Return the seconds from prompts to their first tokens."""
        assert self._engine is not None
        for _ in range(self._case.batch):
            self._submit(self._case.context, 1)
        start = time.perf_counter()
        while self._engine.has_work:
            self._engine.step()
        return time.perf_counter() - start

    def measure_bytes(self) -> dict[str, int]:
        """The bytes of weights and of cache that a step reads, and the peak of memory: weights, arena and the rest."""
        assert self._engine is not None
        stats, case = self._engine.stats(), self._case
        return {
            "weight_bytes": self.model.step_bytes,
            "cache_bytes": stats.page_bytes // PAGE_SIZE * case.context * case.batch,
            "arena_bytes": stats.arena_bytes,
            "peak_bytes": self._mx.get_peak_memory() + self.ctx.gpu.held_bytes,
        }

    def stop(self) -> None:
        """Free the case's memory."""
        self._engine = None
        self.ctx.gpu.steps = Steps()
        self.ctx.gpu.forget_placed()
        self._mx.clear_cache()

    def _submit(self, tokens: int, more: int) -> None:
        assert self._engine is not None
        prompt = self._random.integers(3, self.shape.vocab_size, tokens).tolist()
        self._engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=more, ignore_eos=True)))
