"""One request as the engine takes it: made where text becomes tokens, and never changed on its way to the answers.

Whatever a request may ask of the engine is a field here. `EngineRequest` travels whole from the service, through the
thread that owns the engine, to each `Sequence` that answers it; who needs a field reads it from there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from mlxr.core.types import SamplingParams
from mlxr.engine.constraint import TokenConstraint
from mlxr.models.adapter import Adapter

Pooling = Literal["mean", "last", "cls"]  # of the states of a text: their mean, the last one, or the first


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Asks for the answers to a prompt, or with a `pooling` for the embedding of a text."""

    token_ids: Sequence[int]  # the prompt, or the text to embed
    params: SamplingParams = field(default_factory=SamplingParams)  # how tokens are chosen, and how many
    _: KW_ONLY
    priority: int = 0  # -100 to 100; a higher one is served first, see `Scheduler`
    client: str | None = None  # who asks: clients share the engine evenly; None is nobody's
    deadline_s: float | None = None  # after so many seconds the answers that still grow end with DEADLINE
    uses_cache: bool = True  # off: the prompt is computed without cached pages, and leaves none
    boundary_tokens: Collection[int] = ()  # where other prompts are likely to part; recurrent layers keep a state there
    constraint: TokenConstraint | None = None  # each answer follows a fork of it
    scores_prompt: bool = False  # the first event of each answer has the prompt's tokens with log-probabilities
    adapter: Adapter | None = None  # updates the weights for this request alone
    pooling: Pooling | None = None  # how the states of a text to embed become one vector; None: it is a prompt
    dry_breaker_ids: Collection[tuple[int, ...]] = ()  # DRY counts no repetition across these sequences of tokens
    prediction_ids: Sequence[int] = ()  # what the answer is likely to repeat: drafts are taken from it

    @property
    def answers(self) -> int:
        """Count the answers whose events are given out."""
        return 1 if self.pooling is not None else self.params.n
