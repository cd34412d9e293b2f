"""The cluster as two applications of Ray Serve: the front, and a deployment whose replicas are engines.

Ray Serve starts replicas, replaces dead ones, scales and updates them; requests and reports go past it. The only module
that imports Ray, together with `running`. `build_front` and `build_engines` make the applications from plain values,
as in a configuration file of Ray Serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import Response

from mlxr.cluster.front import Front
from mlxr.cluster.replica import Replica, Reply, Report
from mlxr.cluster.router import Routing
from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings, resolve
from mlxr.server.logs import start_logging

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


APPLICATION, ENGINES = "mlxr", "mlxr-engines"  # the front is one application, the replicas are another
FRONT, ENGINE = "Front", "Engine"
LOCAL = "127.0.0.1"
ONE_MACHINE = "mlxr_one_machine"  # a resource of a Ray that was started for one cluster on one machine
MAX_REQUESTS = 100_000  # that the front has under way; the replicas refuse what is too much for them
FRONT_END_S = 120.0  # for the answers that pass through the front when that ends
END_S = 15.0  # beyond drain_s, for a replica to end
HEALTH_S = 2.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What a cluster consists of. `settings` are those of the replicas that differ from the defaults.

    There are `replicas`, or from that many up to `max_replicas`, by `tokens_per_replica` (see `ScaleByWaiting`): more
    after more are wanted for `scale_up_s`, and fewer after `scale_down_s`. Each reserves `cpus` and `gpus`.
    """

    model: str
    replicas: int = 1
    max_replicas: int | None = None
    tokens_per_replica: int = 8192
    scale_up_s: float = 30.0
    scale_down_s: float = 600.0
    cpus: float = 1.0
    gpus: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self) -> Settings:
        """The settings of a replica on this machine; raises SettingError."""
        return resolve({**self.settings, "default_model": self.model})


def find_address() -> str:
    """The address of this machine in the cluster, or, where that is the only one, an address that no other reaches."""
    resources: Any = ray.cluster_resources
    if ONE_MACHINE in resources():
        return LOCAL
    util: Any = ray.util
    return str(util.get_node_ip_address())


class FrontDeployment:
    """The front in an actor, which routes as `routing` says."""

    def __init__(self, routing: str) -> None:
        self._front = Front(routing=Routing(routing))

    async def __call__(self, request: Request) -> Response:
        """Answer one request of a client."""
        return await self._front.answer(request)

    async def report(self, report: Report) -> Reply:
        """Take in the report of a replica, and tell it what it should know."""
        return await self._front.note(report)


class EngineDeployment:
    """One replica in an actor. The front is found when there is something to report."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        address = find_address()
        values = {**plan.settings, "default_model": plan.model, "host": address, "port": 0, "unix_socket": None}
        settings = resolve(values)
        start_logging(settings)
        context = serve.get_replica_context()
        self._replica = Replica(settings, context.replica_id.unique_id, self._send)
        self._replica.wait_ready()

    async def _send(self, report: Report) -> Reply:
        handle = serve.get_deployment_handle(FRONT, APPLICATION)
        reply: Reply = await handle.report.remote(report)
        return reply

    async def check_health(self) -> None:
        """Raise when the server has ended, so that this replica is replaced."""
        if not self._replica.is_alive:
            raise RuntimeError("the replica's server has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `ScaleByWaiting` counts."""
        return {WAITING: float(self._replica.load.waiting_tokens)}

    async def __del__(self) -> None:
        await self._replica.stop()


def build_front(values: Mapping[str, Any]) -> Any:
    """The application that clients talk to. It does not depend on the plan, and goes on when that changes.

    `values` may have `routing`, one of `Routing`; raises SettingError for another one.
    """
    routing = values.get("routing", Routing.PREFIX)
    if routing not in list(Routing):
        raise SettingError(f"routing: must be one of {', '.join(Routing)}; got {routing!r}")
    front: Any = serve.deployment(FrontDeployment)
    return front.options(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=FRONT_END_S,
    ).bind(str(routing))


def build_engines(values: Mapping[str, Any]) -> Any:
    """The application of the replicas, of a `ClusterPlan` with these values; raises SettingError."""
    try:
        plan = ClusterPlan(**values)
    except TypeError as error:
        raise SettingError(f"cluster: {error}") from None
    return bind_engines(plan)


def bind_engines(plan: ClusterPlan) -> Any:
    """The application of the replicas; raises SettingError for settings that are none."""
    drain_s = plan.resolve().drain_s
    engine: Any = serve.deployment(EngineDeployment)
    return engine.options(
        name=ENGINE,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        graceful_shutdown_timeout_s=drain_s + END_S,
        health_check_period_s=HEALTH_S,
        **_scale(plan),
    ).bind(plan)


def _scale(plan: ClusterPlan) -> dict[str, Any]:
    if plan.max_replicas is None:
        return {"num_replicas": plan.replicas}
    policy: Any = AutoscalingPolicy(  # type: ignore[no-untyped-call,unused-ignore]
        policy_function=f"{ScaleByWaiting.__module__}:{ScaleByWaiting.__name__}",
        policy_kwargs={"tokens_per_replica": plan.tokens_per_replica},
    )
    config = AutoscalingConfig(
        min_replicas=plan.replicas,
        max_replicas=plan.max_replicas,
        upscale_delay_s=plan.scale_up_s,
        downscale_delay_s=plan.scale_down_s,
        policy=policy,
    )
    return {"autoscaling_config": config}
