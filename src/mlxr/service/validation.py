"""Checks that the fast implementations run, and that they are right, with a prompt and some generated tokens.

The model runs through the engine as always. Every call's logits are kept and compared with those of the reference
backend, which computes the same tokens in NumPy float32; the ledger tells which implementations ran.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import InvalidRequest, MlxrError, ModelError
from mlxr.core.frozen import frozen
from mlxr.core.model_settings import size_steps
from mlxr.core.settings import Settings
from mlxr.core.stats import Dispatch, ExpertRows
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.memory_plan import compare_windows
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import Model, ModelShape
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.speculative.planner import HOST_DEVICES
from mlxr.engine.stats import EngineStats
from mlxr.loading import Adapter, DraftHead, LoadedModel, Progress, list_native_operators
from mlxr.service.opening import build_engine, open_model
from mlxr.service.stats import StateUse, collect_stats, find_state_use

Floats = npt.NDArray[np.float32]
CACHE_CHECK_PAGES = 3
FULL_SEQUENCES, FULL_TOKENS = 8, 8192
CACHE_CHECK_TOKENS = 8
# Native products round activations: to 8 bits if the weights are quantised, to 16 bits or not at all if they are
# floats. The effect on the logits depends on the model, so the reference's weights are moved as much to measure it.
MOVED_QUANTISED, MOVED_FLOAT = 0.005, 0.0005
MAX_TIMES_MOVED = 4.0
MAX_PRODUCT_ERROR = 0.05
MIN_RELATIVE_ERROR, MIN_DIVERGENCE_NATS = 0.002, 1e-5


@frozen
class Reference:
    """Logits of the reference backend, (positions, vocabulary): `rows`, and `moved` with weights that are a little off.

    `product_error` is the largest error that `Decoder.compare_products` found, in the drafting layer, too; that layer
    takes `draft_bytes`.
    """

    rows: Floats
    moved: Floats
    product_error: float
    draft_bytes: int = 0


@frozen
class LogitsCheck:
    """The difference between the logits and the reference's over `positions` positions.

    `relative_error` is the root mean square difference divided by the reference's standard deviation, averaged over
    the positions; `divergence_nats` the mean Kullback-Leibler divergence from the reference's distribution;
    `same_greedy` the number of positions with the same likeliest token. Both bounds are measured for this model: its
    logits' change when every weight is off by as much as rounding activations changes products. `product_error` is the
    largest error of a single weight's products.
    """

    positions: int
    relative_error: float
    divergence_nats: float
    same_greedy: int
    product_error: float
    max_relative_error: float
    max_divergence_nats: float

    @property
    def agree(self) -> bool:
        """True if the criterion holds; it never does for not-a-number."""
        return (
            self.relative_error <= self.max_relative_error
            and self.divergence_nats <= self.max_divergence_nats
            and self.product_error <= MAX_PRODUCT_ERROR
        )

    @property
    def criterion(self) -> str:
        """The criterion of `agree` in words."""
        return (
            f"root mean square difference of the logits at most {self.max_relative_error:.2%} of their standard "
            f"deviation and mean divergence at most {self.max_divergence_nats:.2g} nats, which is "
            f"{MAX_TIMES_MOVED:g} times what rounding moves this model by; every weight's products within "
            f"{MAX_PRODUCT_ERROR:.0%}"
        )


@frozen
class CacheCheck:
    """The check of the cache with one prompt: two answers side by side, then the same prompt once more.

    `cached_tokens` of the last prompt's `prompt_tokens` came out of the cache. `sharing` has the cache's statistics
    while both answers grew, `after` those when all had ended and the cache was closed. `answers_agree` if every answer
    equals that of a request that runs alone, without pages and sharing.
    """

    prompt_tokens: int
    cached_tokens: int
    sharing: EngineStats
    after: EngineStats
    answers_agree: bool


@frozen
class FullUse:
    """Bytes of the cache for `sequences` of `tokens` each: those needed, and those needed if no layer had a window."""

    sequences: int
    tokens: int
    needed_bytes: int
    unwindowed_bytes: int


@frozen
class Validation:
    """The measurements and findings of a validation."""

    prompt_tokens: int
    generated_tokens: int
    prefill_ms: float
    decode_ms_per_token: float
    step_bytes: int
    engine: EngineStats
    dispatches: tuple[Dispatch, ...]
    copied_bytes: int
    logits: LogitsCheck
    cache: CacheCheck
    full_use: FullUse
    state_use: StateUse | None
    draft_bytes: int = 0
    expert_rows: tuple[ExpertRows, ...] = ()
    implementation: str = "cpu"

    @property
    def decode_tokens_per_s(self) -> float:
        """The decoded tokens per second of one request that runs alone."""
        return 1000 / self.decode_ms_per_token

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The bytes of weights read per second while decoding."""
        return self.step_bytes * self.decode_tokens_per_s

    @property
    def reference_runs(self) -> list[str]:
        """The operators that have a native implementation but ran the reference."""
        native = list_native_operators(self.implementation)
        return sorted({row.operator for row in self.dispatches if row.implementation == "reference"} & native)

    @property
    def passed(self) -> bool:
        """True if native code ran wherever there is some, and logits and answers out of the cache agree."""
        return not self.reference_runs and self.logits.agree and self.cache.answers_agree


class LogitsTap:
    """A model that keeps a copy of all logits it computes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.rows: list[Floats] = []

    @property
    def config(self) -> ModelShape:
        """The configuration of the model that is checked."""
        return self._model.config

    def forward(self, batch: Any, arena: Any) -> Floats:
        """Return the model's logits, and keep a copy."""
        logits = self._model.forward(batch, arena)
        self.rows.append(np.array(logits, np.float32))
        return logits

    def forward_hidden(self, batch: Any, arena: Any) -> Floats:
        """Return the model's states; nothing is kept."""
        return self._model.forward_hidden(batch, arena)

    def project(self, hidden: Floats, adapters: Sequence[Adapter | None] = ()) -> Floats:
        """Return the model's logits, and keep a copy."""
        logits = self._model.project(hidden, adapters)
        self.rows.append(logits.copy())
        return logits


def validate_model(
    loaded: LoadedModel,
    settings: Settings,
    prompt_ids: Sequence[int],
    generate_tokens: int = 16,
    progress: Progress | None = None,
) -> Validation:
    """Run `prompt_ids` and `generate_tokens` greedy tokens, after a warm-up, and compare with the reference.

    All that is measured and compared is computed, not taken from the cache; the cache is checked afterwards.
    """
    tap = LogitsTap(loaded.model)
    engine = build_engine(loaded, replace(settings, kv_cache="paged", store_bytes=0, draft="off"), tap)
    _generate(engine, prompt_ids[::-1], 2)  # another prompt, so that none of it is found again
    tap.rows.clear()
    loaded.ctx.ledger.reset()
    token_ids, prefill_s, decode_s = _generate(engine, prompt_ids, generate_tokens)
    if len(token_ids) < generate_tokens:
        raise InvalidRequest(
            "context_tokens", f"the context ends after {len(token_ids)} of {generate_tokens} tokens; allow a longer one"
        )
    stats = collect_stats(loaded, None, engine)
    answer_rows = np.concatenate(tap.rows)
    reference = compute_reference(loaded, settings, [*prompt_ids, *token_ids], progress)
    return Validation(
        prompt_tokens=len(prompt_ids),
        generated_tokens=generate_tokens,
        prefill_ms=1000 * prefill_s,
        decode_ms_per_token=1000 * decode_s / (generate_tokens - 1),
        step_bytes=loaded.model.step_bytes,
        engine=stats.engine,
        dispatches=stats.dispatches,
        copied_bytes=stats.copied_bytes,
        logits=compare_logits(answer_rows, reference, len(prompt_ids) - 1),
        cache=check_cache(loaded, settings, prompt_ids),
        full_use=measure_full_use(loaded, settings),
        state_use=find_state_use(loaded, settings),
        draft_bytes=reference.draft_bytes,
        expert_rows=stats.expert_rows,
        implementation="cpu" if loaded.ctx.gpu is None else "gpu",
    )


def measure_full_use(loaded: LoadedModel, settings: Settings) -> FullUse:
    """Measure the cache of FULL_SEQUENCES whole contexts, of at most FULL_TOKENS each."""
    tokens = min(FULL_TOKENS, settings.context_tokens or loaded.config.context_length)
    kv_type = settings.kv_type or loaded.kv_type
    step_tokens = size_steps(settings, loaded.ctx.device).max_batch_tokens
    both = compare_windows(loaded.ctx, loaded.config, settings.page_size, kv_type, FULL_SEQUENCES, tokens, step_tokens)
    return FullUse(FULL_SEQUENCES, tokens, *both)


def check_cache(loaded: LoadedModel, settings: Settings, prompt_ids: Sequence[int]) -> CacheCheck:
    """Run two answers to one prompt, then the prompt once more, with the cache of `settings`; see CacheCheck.

    The prompt repeats `prompt_ids` until it fills some pages.
    """
    room_tokens = (settings.context_tokens or loaded.config.context_length) - CACHE_CHECK_TOKENS
    repeats = -(-CACHE_CHECK_PAGES * settings.page_size // len(prompt_ids))
    long_ids = (list(prompt_ids) * repeats)[: max(room_tokens, 1)]
    params = SamplingParams(max_tokens=CACHE_CHECK_TOKENS, ignore_eos=True)
    with closing(build_engine(loaded, replace(settings, kv_cache="simple", store_bytes=0))) as plain:
        plain.submit(EngineRequest(long_ids, params))
        wanted = _run(plain)
    with closing(build_engine(loaded, settings)) as engine:
        engine.submit(EngineRequest(long_ids, replace(params, n=2)))
        events: list[TokenEvent] = []
        while not events:
            events += _step(engine)
        sharing = engine.stats()
        events += _run(engine)
        engine.submit(EngineRequest(long_ids, params))
        again = _run(engine)
    answers = [[event.token_id for event in events if event.index == index] for index in (0, 1)]
    return CacheCheck(
        prompt_tokens=len(long_ids),
        cached_tokens=again[-1].usage.cached_tokens,
        sharing=sharing,
        after=engine.stats(),
        answers_agree=all(
            answer == [event.token_id for event in wanted] for answer in (*answers, [event.token_id for event in again])
        ),
    )


def compute_reference(
    loaded: LoadedModel, settings: Settings, token_ids: Sequence[int], progress: Progress | None = None
) -> Reference:
    """Compute the reference's logits after each of `token_ids` but the last, and the error of `loaded`'s products.

    Its pages keep numbers in the type of `settings`, so the cache's rounding makes no difference.
    """
    plain = Settings(
        device="reference",
        max_sequences=1,
        context_tokens=min(len(token_ids), loaded.config.context_length),
        kv_type=settings.kv_type or loaded.kv_type,
    )
    served = replace(plain, max_batch_tokens=len(token_ids), context_tokens=settings.context_tokens)
    with open_model(loaded.path, served, progress) as reference:
        tap = LogitsTap(reference.model)
        build_engine(reference, plain, tap).score(token_ids)
        right = np.concatenate(tap.rows)
        tap.rows.clear()
        product_error = loaded.model.compare_products(reference.model)
        head = _load_head(loaded)
        other = None if head is None else reference.load_head()
        if head is not None and other is not None:
            product_error = max(product_error, head.compare_products(other))
        reference.model.move_weights(MOVED_FLOAT, MOVED_QUANTISED)
        build_engine(reference, plain, tap).score(token_ids)
        return Reference(right, np.concatenate(tap.rows), product_error, 0 if head is None else head.weight_bytes)


def _load_head(loaded: LoadedModel) -> DraftHead | None:
    """Return the drafting layer of the model's file, if drafts are on and it fits."""
    try:
        return loaded.load_head() if loaded.ctx.device in HOST_DEVICES else None
    except ModelError:  # then answers have no such drafts
        return None


def compare_logits(rows: Floats, reference: Reference, start: int = 0) -> LogitsCheck:
    """Compare `rows` (positions, vocabulary) with the reference's from position `start` on."""
    right, moved = reference.rows[start:], reference.moved[start:]
    return LogitsCheck(
        positions=len(rows),
        relative_error=_measure_error(rows, right),
        divergence_nats=_measure_divergence(rows, right),
        same_greedy=int((rows.argmax(axis=1) == right.argmax(axis=1)).sum()),
        product_error=reference.product_error,
        max_relative_error=max(MIN_RELATIVE_ERROR, MAX_TIMES_MOVED * _measure_error(moved, right)),
        max_divergence_nats=max(MIN_DIVERGENCE_NATS, MAX_TIMES_MOVED**2 * _measure_divergence(moved, right)),
    )


def _measure_error(rows: Floats, reference: Floats) -> float:
    difference = rows.astype(np.float64) - reference
    errors = np.sqrt((difference**2).mean(axis=1)) / reference.std(axis=1, dtype=np.float64)
    return float(errors.mean())


def _measure_divergence(rows: Floats, reference: Floats) -> float:
    log_p, log_q = _log_softmax(reference), _log_softmax(rows)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def _log_softmax(rows: Floats) -> npt.NDArray[np.float64]:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _generate(engine: Engine, prompt_ids: Sequence[int], count: int) -> tuple[list[int], float, float]:
    """Return greedy tokens, the seconds until the first of them, and the seconds for the others."""
    engine.submit(EngineRequest(prompt_ids, SamplingParams(max_tokens=count, ignore_eos=True)))
    token_ids: list[int] = []
    start_s = first_s = time.perf_counter()
    while engine.has_work:
        token_ids += [event.token_id for event in _step(engine) if event.token_id is not None]
        if len(token_ids) <= 1:
            first_s = time.perf_counter()
    return token_ids, first_s - start_s, time.perf_counter() - first_s


def _run(engine: Engine) -> list[TokenEvent]:
    """Step until nothing is left to do; returns all events."""
    events: list[TokenEvent] = []
    while engine.has_work:
        events += _step(engine)
    return events


def _step(engine: Engine) -> list[TokenEvent]:
    """Do one step; raises if an answer fails."""
    events = engine.step()
    for event in events:
        if event.error is not None:
            raise MlxrError(event.error)
    return events
