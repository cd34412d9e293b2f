"""Protocols of the native module `mlxr._native`: CPU kernels, and the objects that hold their weights (csrc/bindings).

A test compares the names and arguments with the module's. Its grammars are not here; `mlxr.service` uses them. This
module knows no operator.
"""

# ruff: noqa: D102, N802 -- signatures say what operators take; classes of the module are called by their names
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlxr.kernels.ledger import NativeRow
from mlxr.kernels.tensor import ByteArray, FloatArray, IntArray, PoolArray

Rotation = tuple[FloatArray, FloatArray, bool, FloatArray | None]  # cos, sin, interleaved, factors of queries


class NativeRuntime(Protocol):
    """The thread pool, the instruction set and scratch memory."""

    takes_strips: bool  # True if products may take strips; the results are equal to the bit

    @property
    def isa(self) -> str:
        """The instruction set that runs."""

    def list_expert_rows(self) -> list[tuple[str, int]]:
        """Return kernel and form, and the rows that experts multiplied with it."""

    def list_ran(self) -> list[NativeRow]:
        """Return a `NativeRow` for each kernel that ran."""

    def now_ns(self) -> int:
        """Return the time on a profile's clock, in nanoseconds."""

    def start_profile(self, events: int) -> None:
        """Start timing calls, and keep at most `events` of them one by one."""

    def stop_profile(self) -> list[tuple[int, int, int]]:
        """Return index, start and end of the calls that were kept."""

    @property
    def threads(self) -> int:
        """The number of threads."""


class NativeLinearWeight(Protocol):
    """One or several weights that share their input, repacked."""

    def append(
        self, runtime: NativeRuntime, type_name: str, rows: int, data: ByteArray, bias: FloatArray | None
    ) -> None:
        """Add the next weight."""

    @property
    def in_features(self) -> int:
        """The number of columns of inputs."""

    def leave(self, type_name: str, rows: int, data: ByteArray, bias: FloatArray | None) -> None:
        """Add a weight whose raw blocks stay in the file that they are mapped from."""

    @property
    def nbytes(self) -> int: ...

    @property
    def out_features(self) -> int:
        """The number of columns of results."""


class NativeAdapter(Protocol):
    """Low-rank updates of weights, laid out for the kernels."""

    def append(self, weight: NativeLinearWeight, first: int, a: PoolArray, b: PoolArray, scale: float) -> None:
        """Add the next update, of a weight."""

    def append_table(self, b: PoolArray, scale: float) -> None:
        """Add an update of table rows that are looked up."""

    @property
    def nbytes(self) -> int: ...


NativeUpdates = Sequence[tuple[NativeAdapter, IntArray, float, FloatArray | None]]  # and rows, factor, table rows


class NativeExperts(Protocol):
    """Experts: feed-forward blocks of one shape, checked."""

    def append(self, up: NativeLinearWeight, down: NativeLinearWeight) -> None:
        """Add the next expert."""

    def limit(self, runtime: NativeRuntime, slots: int) -> None:
        """Keep the weights of at most `slots` experts in memory."""

    def list_use(self) -> tuple[Any, ...]:
        """Return the rows of each expert, and the counts of steps, of experts with rows in these, and of those read."""


class NativeRouter(Protocol):
    """The rule by which a token's experts and their shares are chosen."""


# fmt: off
class NativeLayers(Protocol):
    """Operators of layers and their weights, checked."""

    def append_activate(self, kind: str, features: int, first: int | None, parameters: tuple[float, ...]) -> None: ...
    def append_attend(self) -> None: ...
    def append_gate_heads(self, softplus: bool) -> None: ...
    def append_gate_rows(self, target: str) -> None: ...
    def append_gated_delta(
        self, rates: FloatArray, bias: FloatArray, key_heads: int, value_heads: int, rows: int, columns: int,
        tiled: bool, eps: float, scale: float, bound: float, first: int, at: int
    ) -> None: ...
    def append_gated_norm(
        self, weight: FloatArray | None, width: int, eps: float, gate_first: bool, first: int
    ) -> None: ...
    def append_hadamard(
        self, signs: FloatArray | None, order: IntArray | None, block: int, source: str, target: str
    ) -> None: ...
    def append_heads(
        self, heads: int, kv_heads: int, head_dim: int, scale: float, window: int, symmetric: bool,
        softcap: float, sinks: FloatArray | None, rope: int, group: int, value_dim: int, whole_pictures: bool,
        biases: FloatArray | None, chunked: bool
    ) -> None:
        """Set the heads of the layer."""
    def append_balance_streams(
        self, streams: int, scale: FloatArray, base: FloatArray, turns: int, eps: float
    ) -> None: ...
    def append_blend_streams(self, streams: int, has_gains: bool, adds: bool, target: str, source: str) -> None: ...
    def append_cut_gates(self, features: int, factor: float) -> None: ...
    def append_level_streams(self, streams: int) -> None: ...
    def append_join(self, factor: float, target: str, source: str) -> None: ...
    def append_layer(self, columns: int) -> None:
        """Begin a layer whose stream has `columns` columns."""
    def append_mamba2(
        self, rates: FloatArray, bias: FloatArray, skip: FloatArray, groups: int, rows: int, columns: int, first: int,
        at: int
    ) -> None: ...
    def append_scan(self, rates: FloatArray, skip: FloatArray, at: int) -> None: ...
    def append_match_streams(self, streams: int, scale: float) -> None: ...
    def append_mix(self, experts: NativeExperts, source: str, target: str) -> None: ...
    def append_mix_streams(self, streams: int, target: str) -> None: ...
    def append_ngrams(
        self, type_name: str, data: ByteArray, columns: int, end: int, multipliers: tuple[int, ...],
        sizes: tuple[int, ...], offsets: tuple[int, ...], at: int, target: str
    ) -> None: ...
    def append_norm(
        self, weight: FloatArray, bias: FloatArray | None, eps: float, is_layer_norm: bool, source: str, target: str,
        parts: int
    ) -> None: ...
    def append_product(self, weight: NativeLinearWeight, source: str, target: str) -> None: ...
    def append_project_parts(
        self, weights: tuple[NativeLinearWeight, ...], passed: int, source: str, target: str
    ) -> None: ...
    def append_route(self, router: NativeRouter) -> None: ...
    def append_rows(self, type_name: str, data: ByteArray, columns: int, target: str) -> None: ...
    def append_scale(self, factor: float, softcap: float, target: str) -> None: ...
    def append_short_conv(
        self, weight: FloatArray, bias: FloatArray | None, kind: str, first: int, at: int
    ) -> None: ...
    def append_rope_and_write_kv(
        self, q_norm: FloatArray | None, k_norm: FloatArray | None, eps: float, norms_values: bool, projected: str,
        norms: str
    ) -> None: ...
    def append_rope_and_write_latent(self, norm: FloatArray, eps: float) -> None: ...
    def append_spread_streams(
        self, streams: int, factor: float, gate_scale: float, has_gains: bool, adds: bool, source: str, target: str
    ) -> None: ...
    def append_sum(self, factor: float) -> None: ...
    def append_take_shares(self, source: str, target: str) -> None: ...
# fmt: on


class NativeProbe(Protocol):
    """Measurement of the machine: reads of memory and products of int8."""

    def multiply(self, runtime: NativeRuntime, macs: int) -> float:
        """Return multiply-adds per second of all threads."""

    @property
    def nbytes(self) -> int: ...

    def read(self, runtime: NativeRuntime, ahead: int) -> float:
        """Return the seconds to read the buffer once with all threads."""


# fmt: off
class Native(Protocol):
    """The module. An operator writes its results into `out`, or into arguments named like its results."""

    __file__: str
    def Runtime(self, threads: int, isa: str) -> NativeRuntime: ...
    def LinearWeight(self, in_features: int) -> NativeLinearWeight: ...
    def Adapter(self) -> NativeAdapter: ...
    def Experts(self, activation: str, parameters: tuple[float, ...] = ()) -> NativeExperts: ...
    def Router(
        self, experts: int, used: int, scoring: str, renormalises: bool, floor: float, scale: float, groups: int,
        groups_used: int, gap: float, choice_bias: FloatArray | None, expert_scales: FloatArray | None
    ) -> NativeRouter: ...
    def Layers(self) -> NativeLayers: ...
    def Probe(self, runtime: NativeRuntime, nbytes: int) -> NativeProbe: ...
    def activate(
        self, runtime: NativeRuntime, gate_up: FloatArray, kind: str, out: FloatArray, gated: bool = True,
        up: FloatArray | None = None, first: int = 0, parameters: tuple[float, ...] = ()
    ) -> None: ...
    def add(self, runtime: NativeRuntime, x: FloatArray, other: FloatArray, factor: float, out: FloatArray) -> None: ...
    def attend(
        self, runtime: NativeRuntime, q: FloatArray, k_pool: PoolArray, v_pool: PoolArray, query_starts: IntArray,
        context_lengths: IntArray, page_table: IntArray, scale: float, window: int, out: FloatArray,
        softcap: float = 0.0, sinks: FloatArray | None = None, symmetric: bool = False,
        value_dim: int = 0, ends: IntArray | None = None, biases: FloatArray | None = None, chunked: bool = False
    ) -> None: ...
    def available_isas(self) -> list[str]:
        """List the instruction sets that this build and machine can run, lowest first."""
    def best_isa(self) -> str:
        """Return the fastest of `available_isas`."""
    def left_out_isas(self) -> list[str]:
        """List the instruction sets left out of this build, which was made for one machine only, lowest first."""
    def default_threads(self) -> int:
        """Return the number of physical cores that this process may use, by affinity and quota."""
    def embed(
        self, runtime: NativeRuntime, token_ids: IntArray, type_name: str, data: ByteArray, out: FloatArray
    ) -> None: ...
    def empty(self, runtime: NativeRuntime, rows: int, columns: int) -> FloatArray:
        """Return an array with undefined contents, whose memory is reused when it is freed."""
    def forward(
        self, runtime: NativeRuntime, layers: NativeLayers, table_type: str, table: ByteArray, norm: FloatArray,
        bias: FloatArray | None, eps: float, is_layer_norm: bool, output: NativeLinearWeight, logits: FloatArray,
        token_ids: IntArray, k_pools: Sequence[PoolArray | None], v_pools: Sequence[PoolArray | None],
        positions: IntArray, ropes: Sequence[Rotation], slots: Sequence[IntArray], query_starts: IntArray,
        context_lengths: IntArray, page_tables: Sequence[IntArray], states: Sequence[PoolArray | None],
        state_reads: IntArray, state_writes: IntArray, adapters: NativeUpdates, ends: IntArray, embedding_scale: float,
        logit_scale: float, softcap: float
    ) -> None: ...
    def gate_heads(
        self, runtime: NativeRuntime, x: FloatArray, gates: FloatArray, out: FloatArray, softplus: bool = False
    ) -> None: ...
    def gated_delta(
        self, runtime: NativeRuntime, qkv: FloatArray, x: FloatArray, first: int, rates: FloatArray, bias: FloatArray,
        key_heads: int, value_heads: int, rows: int, tiled: bool, eps: float, scale: float, bound: float,
        out: FloatArray, pool: FloatArray, at: int, reads: IntArray, writes: IntArray, starts: IntArray
    ) -> None: ...
    def gated_norm(
        self, runtime: NativeRuntime, x: FloatArray, gate: FloatArray, first: int, weight: FloatArray | None,
        width: int, eps: float, gate_first: bool, out: FloatArray
    ) -> None: ...
    def hadamard(
        self, runtime: NativeRuntime, x: FloatArray, signs: FloatArray | None, order: IntArray | None, block: int,
        inverse: bool, out: FloatArray
    ) -> None: ...
    def layer_norm(
        self, runtime: NativeRuntime, x: FloatArray, weight: FloatArray, bias: FloatArray | None, eps: float,
        residual: FloatArray | None, normed: FloatArray, summed: FloatArray | None, residual_scale: float = 1.0,
        sum_scale: float = 1.0
    ) -> None: ...
    def linear(self, runtime: NativeRuntime, x: FloatArray, weight: NativeLinearWeight, out: FloatArray) -> None: ...
    def lora(
        self, runtime: NativeRuntime, weight: NativeLinearWeight, adapters: NativeUpdates, x: FloatArray,
        out: FloatArray
    ) -> None: ...
    def lora_table(self, runtime: NativeRuntime, adapters: NativeUpdates, out: FloatArray) -> None: ...
    def mamba2(
        self, runtime: NativeRuntime, xbc: FloatArray, x: FloatArray, first: int, rates: FloatArray, bias: FloatArray,
        skip: FloatArray, groups: int, rows: int, out: FloatArray, pool: FloatArray, at: int, reads: IntArray,
        writes: IntArray, starts: IntArray
    ) -> None: ...
    def scan(
        self, runtime: NativeRuntime, u: FloatArray, steps: FloatArray, bc: FloatArray, rates: FloatArray,
        skip: FloatArray, out: FloatArray, pool: FloatArray, at: int, reads: IntArray, writes: IntArray,
        starts: IntArray
    ) -> None: ...
    def balance_streams(
        self, runtime: NativeRuntime, x: FloatArray, scale: FloatArray, base: FloatArray, streams: int, turns: int,
        eps: float, out: FloatArray
    ) -> None: ...
    def blend_streams(
        self, runtime: NativeRuntime, x: FloatArray, gains: FloatArray | None, added: FloatArray | None, streams: int,
        out: FloatArray
    ) -> None: ...
    def cut_gates(
        self, runtime: NativeRuntime, x: FloatArray, columns: int, factor: float, out: FloatArray
    ) -> None: ...
    def level_streams(
        self, runtime: NativeRuntime, x: FloatArray, base: FloatArray, streams: int, least: float, out: FloatArray
    ) -> None: ...
    def match_streams(
        self, runtime: NativeRuntime, keys: FloatArray, queries: FloatArray, scale: float, least: float, out: FloatArray
    ) -> None: ...
    def mix(
        self, runtime: NativeRuntime, x: FloatArray, chosen: IntArray, shares: FloatArray, experts: NativeExperts,
        adapters: NativeUpdates, out: FloatArray
    ) -> None: ...
    def mix_streams(
        self, runtime: NativeRuntime, x: FloatArray, gates: FloatArray, streams: int, out: FloatArray
    ) -> None: ...
    def ngrams(
        self, runtime: NativeRuntime, ids: IntArray, type_name: str, data: ByteArray, columns: int, end: int,
        multipliers: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...], out: FloatArray,
        pool: FloatArray, at: int, reads: IntArray, writes: IntArray, starts: IntArray
    ) -> None: ...
    def project_parts(
        self, runtime: NativeRuntime, x: FloatArray, weights: tuple[NativeLinearWeight, ...], passed: int,
        out: FloatArray
    ) -> None: ...
    def rms_norm(
        self, runtime: NativeRuntime, x: FloatArray, weight: FloatArray | None, eps: float, residual: FloatArray | None,
        normed: FloatArray, summed: FloatArray | None, residual_scale: float = 1.0, sum_scale: float = 1.0
    ) -> None: ...
    def rope(
        self, runtime: NativeRuntime, x: FloatArray, positions: IntArray, cos: FloatArray, sin: FloatArray,
        interleaved: bool, factors: FloatArray | None = None
    ) -> None: ...
    def route(
        self, runtime: NativeRuntime, logits: FloatArray, router: NativeRouter, chosen: IntArray, shares: FloatArray
    ) -> None: ...
    def run_layers(
        self, runtime: NativeRuntime, layers: NativeLayers, stream: FloatArray, delta: FloatArray, token_ids: IntArray,
        k_pools: Sequence[PoolArray | None], v_pools: Sequence[PoolArray | None], positions: IntArray,
        ropes: Sequence[Rotation], slots: Sequence[IntArray], query_starts: IntArray, context_lengths: IntArray,
        page_tables: Sequence[IntArray], states: Sequence[PoolArray | None], state_reads: IntArray,
        state_writes: IntArray, adapters: NativeUpdates, ends: IntArray
    ) -> None: ...
    def sample(
        self, runtime: NativeRuntime, logits: FloatArray, rows: Sequence[object]
    ) -> list[tuple[int, float, list[tuple[int, float]], float]]:
        """Choose a token for each row: id, log-probability, the best tokens, and the surprise of each."""
    def scale(self, runtime: NativeRuntime, x: FloatArray, factor: float, softcap: float, out: FloatArray) -> None: ...
    def short_conv(
        self, runtime: NativeRuntime, x: FloatArray, first: int, weight: FloatArray, bias: FloatArray | None, kind: str,
        out: FloatArray, pool: FloatArray, at: int, reads: IntArray, writes: IntArray, starts: IntArray
    ) -> None: ...
    def spread_streams(
        self, runtime: NativeRuntime, x: FloatArray, gates: FloatArray | None, base: FloatArray | None, streams: int,
        factor: float, gate_scale: float, out: FloatArray
    ) -> None: ...
    def write_pages(
        self, runtime: NativeRuntime, k: FloatArray, v: FloatArray | None, k_pool: PoolArray, v_pool: PoolArray,
        slots: IntArray
    ) -> None: ...
    def zeros(self, runtime: NativeRuntime, nbytes: int) -> ByteArray:
        """Return zeroed bytes in huge pages; the system gives the memory as they are written."""
# fmt: on
