"""What the choice of one token depends on besides the logits, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.kernels.tensor import FloatArray, IntArray

NO_IDS: IntArray = np.empty(0, np.int32)
NO_VALUES: FloatArray = np.empty(0, np.float32)
NO_TOKEN = -1  # in place of a token id where no token is possible
GREEDY = SamplingParams()


def takes_likeliest(params: SamplingParams) -> bool:
    """Whether the token is always the one with the largest logit, so that no number is drawn."""
    return (
        params.temperature == 0 and params.dynatemp_range == 0 and (params.mirostat > 0 or not drops_likeliest(params))
    )


def drops_likeliest(params: SamplingParams) -> bool:
    """Whether a rule may leave out the likeliest token, so that greedy choice has to look at what is left."""
    return params.typical_p < 1 or (params.xtc_probability > 0 and params.xtc_threshold <= 0.5)


@dataclass(slots=True, eq=False)
class SampleRow:
    """How the token of one row of logits is chosen: by `params`, and by what changes from token to token.

    `history_ids` are the distinct tokens of prompt and answer so far, `history_counts` how often each occurs in the
    answer (0: only in the prompt). `bias_ids` are distinct, and so are `dry_ids`, whose logits fall by `dry_penalties`.
    `uniform` in [0, 1) is the next number of the request's own random stream, `following_uniform` the one after it,
    where it is known, and `chance` a second one for the same token, by which XTC decides. `surprise_bound` is what
    Mirostat has come to, in bits. `top_logprobs` asks for that many best tokens. Bit i % 32 of mask[i // 32] says
    whether token i may be chosen, (ceil(vocabulary / 32),).
    """

    params: SamplingParams = GREEDY
    history_ids: IntArray = field(default_factory=lambda: NO_IDS)
    history_counts: IntArray = field(default_factory=lambda: NO_IDS)
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    dry_ids: IntArray = field(default_factory=lambda: NO_IDS)
    dry_penalties: FloatArray = field(default_factory=lambda: NO_VALUES)
    uniform: float = 0.0
    following_uniform: float | None = None
    chance: float = 0.0
    surprise_bound: float = 0.0
    top_logprobs: int = 0
    mask: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The chosen token, its log-probability, and the best tokens (as many as were asked for), best first.

    `surprise` is that of the token among those Mirostat left, in bits; 0 without Mirostat. Where no token has a finite
    logit: NO_TOKEN, minus infinity, and none.
    """

    token_id: int
    logprob: float
    top: list[TokenLogprob]
    surprise: float = 0.0
