"""How an engine takes in requests: each is checked, becomes one sequence for each of its answers, and is queued.

Knows no step: what runs when is the scheduler's matter, and what comes of it that of `outcomes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from mlxr.cache.kv_cache import KVCache
from mlxr.core.errors import InvalidRequest
from mlxr.core.types import SamplingParams
from mlxr.engine.answers import Answers
from mlxr.engine.boundaries import Boundaries
from mlxr.engine.constraint import MaskSource, TokenConstraint
from mlxr.engine.drafts import DrafterMaker
from mlxr.engine.drafts.tail import StateTail
from mlxr.engine.limits import Limits
from mlxr.engine.pooling import Pool, Pooling
from mlxr.engine.request import Request
from mlxr.engine.runner import Runner
from mlxr.engine.scoring import PromptScores
from mlxr.engine.sequence import Sequence
from mlxr.models.adapter import Adapter


class Intake:
    """Makes sequences of requests, and queues them with the `answers`.

    `eos_ids` end answers that do not ignore them, and `open_drafter` makes what guesses their tokens. With `has_head`
    they keep the last states for a head that drafts. Recurrent layers keep theirs once in `spacing_tokens`, which is
    0 where there are none. The log-probabilities of prompts are computed `score_tokens` at a time.
    """

    def __init__(
        self,
        answers: Answers,
        cache: KVCache,
        runner: Runner,
        limits: Limits,
        *,
        eos_ids: frozenset[int],
        open_drafter: DrafterMaker | None,
        has_head: bool,
        spacing_tokens: int,
        score_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._answers, self._cache, self._runner, self._limits = answers, cache, runner, limits
        self._eos_ids, self._has_head, self._clock = eos_ids, has_head, clock
        self._score_tokens = score_tokens
        self.open_drafter, self.spacing_tokens = open_drafter, spacing_tokens
        self._ids = itertools.count(1)

    def take_prompt(
        self,
        token_ids: Collection[int],
        params: SamplingParams,
        *,
        priority: int,
        client: str | None,
        deadline_s: float | None,
        uses_cache: bool,
        boundary_tokens: Collection[int],
        constraint: TokenConstraint | None,
        scores_prompt: bool,
        adapter: Adapter | None,
    ) -> int:
        """Queue a request for answers and return its id; `Engine.submit` says what it may ask for."""
        self._limits.check_tokens("prompt", token_ids)
        self._limits.check_params(params)
        self._limits.check_urgency(priority, deadline_s)
        if constraint is not None and constraint.needs_end and params.ignore_eos:
            raise InvalidRequest("ignore_eos", "cannot be combined with a grammar, which ends with an end token")
        end_tokens = self._limits.choose_end(len(token_ids), params.max_tokens)
        self._answers.check_room()
        now, request_id = self._clock(), next(self._ids)
        scores = self._open_scores(token_ids, params.logprobs or 0, adapter) if scores_prompt else None
        keeps_pages = uses_cache and not scores_prompt
        sequences = [
            Sequence(
                request_id,
                token_ids,
                params,
                table=self._cache.open_private_table(),
                stop_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_ids),
                end_tokens=end_tokens,
                index=index,
                priority=priority,
                client=client,
                asked_s=now,
                keys=self._cache.start_keys(adapter.digest if adapter else b"") if keeps_pages else None,
                boundaries=self._plan_boundaries(len(token_ids), boundary_tokens) if keeps_pages else None,
                scores=scores,
                masks=None
                if constraint is None
                else MaskSource(constraint.fork(), self._limits.vocab_size, end_tokens - len(token_ids)),
                open_drafter=self.open_drafter,
                adapter=adapter,
                tail=StateTail() if self._has_head and params.draft_tokens != 0 and params.max_tokens != 0 else None,
            )
            for index in range(params.streams)
        ]
        self._answers.add(Request(params, sequences, now, deadline_s), sequences, now)
        return request_id

    def take_text(
        self,
        token_ids: Collection[int],
        pooling: Pooling,
        *,
        priority: int,
        client: str | None,
        deadline_s: float | None,
        adapter: Adapter | None,
    ) -> int:
        """Queue a text to embed and return its id; see `Engine.submit_embedding`."""
        self._limits.check_tokens("input", token_ids)
        self._limits.check_urgency(priority, deadline_s)
        self._limits.check_embed(len(token_ids))
        self._answers.check_room()
        now, request_id, params = self._clock(), next(self._ids), SamplingParams()
        sequence = Sequence(
            request_id,
            token_ids,
            params,
            table=self._cache.open_private_table(),
            stop_ids=(),
            end_tokens=len(token_ids) + 1,  # all of them are written
            priority=priority,
            client=client,
            asked_s=now,
            pool=Pool(pooling),
            adapter=adapter,
        )
        self._answers.add(Request(params, [sequence], now, deadline_s), [sequence], now)
        return request_id

    def _plan_boundaries(self, prompt_tokens: int, boundary_tokens: Collection[int]) -> Boundaries | None:
        if not self.spacing_tokens:
            return None
        return Boundaries(self._cache.page_size, self.spacing_tokens, prompt_tokens, boundary_tokens)

    def _open_scores(self, token_ids: Collection[int], top: int, adapter: Adapter | None) -> PromptScores:
        return PromptScores(
            list(token_ids), top, lambda hidden: self._runner.project(hidden, adapter), self._score_tokens
        )
