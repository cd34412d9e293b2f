"""What a replica knows of the others: the token by which they know each other, and how fast pages come from them.

The front makes the token when it starts and tells it with its reply to each report, so it is known to the replicas of
one cluster alone.
"""

from __future__ import annotations

import hmac
from time import monotonic

from prometheus_client import CollectorRegistry, Counter

from mlxr.cluster.costs import Link
from mlxr.engine.page_exchange import PageExchange

PAGES_PATH = "/cluster/pages"
PEER, TOKEN = b"x-mlxr-peer", b"x-mlxr-token"  # headers: where pages can be fetched, and who may say so
WEIGHT = 0.3  # of the newest measurement
KEPT_S = 60.0  # after which a speed is unknown again: a link that was bad may be good


class LinkSpeed:
    """Bytes per second of the last fetches, 0 where that is not known."""

    def __init__(self) -> None:
        self._bytes_per_s = self._at_s = 0.0

    def note(self, size_bytes: int, seconds: float) -> None:
        """A fetch brought so many bytes."""
        now_s, known = monotonic(), self.read()
        measured = max(1.0, size_bytes / max(seconds, 1e-6))
        self._bytes_per_s = measured if known == 0 else (1 - WEIGHT) * known + WEIGHT * measured
        self._at_s = now_s

    def read(self) -> float:
        """Return the speed, as far as it is known."""
        return self._bytes_per_s if monotonic() - self._at_s < KEPT_S else 0.0


class PeerCounts:
    """The metrics of a replica about pages that travel."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages = Counter("mlxr_fetched_pages", "Cache pages that came from other replicas", registry=registry)
        self.bytes = Counter("mlxr_fetched_bytes", "Bytes of such pages", registry=registry)
        self.seconds = Counter("mlxr_fetch_seconds", "Seconds that requests waited for such pages", registry=registry)
        self.refusals = Counter(
            "mlxr_fetch_refusals", "Fetches that brought less than was asked for", ["cause"], registry=registry
        )
        self.lent_pages = Counter("mlxr_lent_pages", "Cache pages sent to other replicas", registry=registry)
        self.lent_bytes = Counter("mlxr_lent_bytes", "Bytes of such pages", registry=registry)


class Peers:
    """`token` is empty until the front has told it, `exchange` None until the model is loaded."""

    def __init__(self, registry: CollectorRegistry, max_bytes: int, timeout_s: float) -> None:
        self.token = ""
        self.exchange: PageExchange | None = None
        self.counts, self.speed = PeerCounts(registry), LinkSpeed()
        self.max_bytes, self.timeout_s = max_bytes, timeout_s

    def admits(self, token: str) -> bool:
        """Whether `token` is the cluster's."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())

    def describe_link(self) -> Link | None:
        """What it takes to fetch pages; None where none can be."""
        exchange = self.exchange
        if exchange is None or not self.max_bytes or not self.timeout_s:
            return None
        return Link(exchange.linked_bytes, exchange.boundary_bytes, self.max_bytes, self.timeout_s, self.speed.read())
