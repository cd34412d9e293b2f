"""How many replicas there should be: so many that each has no more than a given number of prompt tokens waiting."""

from __future__ import annotations

import math
from typing import Any

WAITING = "waiting_tokens"  # what replicas record for Ray Serve


class ScaleByWaiting:
    """A policy for Ray Serve's autoscaling: `tokens_per_replica` are what one replica may have waiting."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The replicas wanted now, within the bounds, and nothing to be remembered."""
        waiting = (context.aggregated_metrics or {}).get(WAITING, {})
        wanted = math.ceil(sum(waiting.values()) / self._tokens_per_replica)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}
