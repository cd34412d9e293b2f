"""What the choice of one token depends on besides the logits, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxr.core.types import TokenLogprob
from mlxr.kernels.tensor import FloatArray, IntArray

NO_IDS: IntArray = np.empty(0, np.int32)
NO_VALUES: FloatArray = np.empty(0, np.float32)
NO_TOKEN = -1  # in place of a token id where no token is possible


@dataclass(slots=True, eq=False)
class SampleRow:
    """How the token of one row of logits is chosen; the meanings are those of `core.types.SamplingParams`.

    `history_ids` are the distinct tokens of prompt and answer so far, `history_counts` how often each occurs in the
    answer (0: only in the prompt). `bias_ids` are distinct. `uniform` in [0, 1) is the next number of the request's
    own random stream, `following_uniform` the one after it, where it is known. `top_logprobs` asks for that many best
    tokens. Bit i % 32 of mask[i // 32] says whether token i may be chosen, (ceil(vocabulary / 32),).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history_ids: IntArray = field(default_factory=lambda: NO_IDS)
    history_counts: IntArray = field(default_factory=lambda: NO_IDS)
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    uniform: float = 0.0
    following_uniform: float | None = None
    top_logprobs: int = 0
    mask: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The chosen token, its log-probability, and the best tokens (as many as were asked for), best first.

    Where no token has a finite logit: NO_TOKEN, minus infinity, and none.
    """

    token_id: int
    logprob: float
    top: list[TokenLogprob]
