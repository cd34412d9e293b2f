"""The ways of routing by name: by prefixes, and at random, which that is compared with.

Both are the same front with the same replicas; what differs is the choice alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from mlxr.cluster.router import Choice, NoReplica, Router


class Routing(StrEnum):
    """How the front chooses a replica."""

    PREFIX = "prefix"
    RANDOM = "random"


class RandomRouter(Router):
    """Any replica for any request: neither pages nor work are looked at, and nothing is fetched."""

    def choose(self, keys: Sequence[bytes], tokens: int, without: Collection[str] = ()) -> Choice:  # noqa: ARG002
        """A replica that is drawn, and not one of `without`; raises NoReplica when none is left."""
        left = [replica.name for replica in self._order if replica.name not in without]
        if not left:
            raise NoReplica(f"none of {len(self._order)} replicas can take the request")
        return Choice(self._random.choice(left), 0, "drawn")


ROUTERS: dict[Routing, type[Router]] = {Routing.PREFIX: Router, Routing.RANDOM: RandomRouter}
